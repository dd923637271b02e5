"""`corpus.text_key`: from a record's fields to its text, by a name, a path through nested lists, or several fields joined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.conversations import conversation_of
from textmill.corpus.document import Document
from textmill.corpus.records import RAW, Bad, Unreadable
from textmill.corpus.source import Source

Path = tuple[str, ...]


@dataclass(frozen=True)
class Fields:
    """Where a source's text and metadata stand in its records."""

    source: str
    key: str
    """As the user wrote it; a field of exactly this name stands above the grammar."""
    lists: tuple[Path, ...]
    """The way to each list, from the element of the list before."""
    leaves: tuple[Path, ...]
    """What is joined, from the innermost element."""
    join: str | None
    keep: tuple[str, ...]
    url: bool = False
    """Whether a filter asks for the field `url`."""
    chat: str | None = None
    """The shape of conversations, where records are such."""

    def documents(self, value: object, place: str, raw: bytes) -> Iterator[Document | Bad]:
        """The documents of one record; one without any match is an empty document, so that it is counted."""
        if self.chat or not self.lists or (isinstance(value, dict) and self.key in value):
            yield self._one(value, value, place, raw, ())
            return
        try:
            elements = list(_elements(value, self.lists[0]))
        except Unreadable as error:
            yield Bad(self.source, place, str(error)[:RAW], raw[:RAW])
            return
        if not elements:
            yield Document("", self.source, place)
        for index, element in enumerate(elements):
            yield from self.within(element, f"{place}, {'.'.join(self.lists[0])}[{index}]", raw)

    def within(self, element: object, place: str, raw: bytes) -> Iterator[Document | Bad]:
        """The documents of one element of the first list."""
        inner = self.lists[1:]
        if self.join is not None or not inner:
            yield self._one(element, element, place, raw, inner)
            return
        count = 0
        try:
            for way, last in _walk(element, inner):
                count += 1
                yield self._one(last, element, f"{place}{way}", raw, ())
        except Unreadable as error:
            count += 1
            yield Bad(self.source, place, str(error)[:RAW], raw[:RAW])
        if not count:
            yield Document("", self.source, place)

    def _one(self, value: object, holder: object, place: str, raw: bytes, inner: tuple[Path, ...]) -> Document | Bad:
        turns = None
        try:
            if self.chat:
                turns = conversation_of(value, self.chat, self.key)
                text = "\n".join(said for _, said in turns)
            elif inner:
                text = (self.join or "").join(self.text_of(last) for _, last in _walk(value, inner))
            else:
                text = self.text_of(value)
            text.encode()
            return Document(text, self.source, place, self.meta_of(holder), self.url_of(holder), turns)
        except Unreadable as error:
            reason = str(error)[:RAW]
        except UnicodeEncodeError as error:
            what = (
                "not UTF-8, or half a surrogate pair"
                if 0xDC80 <= ord(text[error.start]) <= 0xDCFF
                else "half a surrogate pair"
            )
            reason = f"{what}, \\u{ord(text[error.start]):04x}, at character {error.start:,}"
        return Bad(self.source, place, reason, raw[:RAW])

    def text_of(self, value: object) -> str:
        """The text of an innermost element; of several fields, those that are missing or null are left out."""
        if isinstance(value, dict):
            found = value.get(self.key)
            if isinstance(found, str):
                return found
        if self.leaves == ((),):
            if isinstance(value, str):
                return value
            raise Unreadable(f"found a JSON {kind_of(value)}; '{self.key}' is a list of texts")
        if not isinstance(value, dict):
            raise Unreadable(
                f"found a JSON {kind_of(value)}; a line is an object with the field '{'+'.join(map('.'.join, self.leaves))}'"
            )
        texts = []
        for leaf in self.leaves:
            found = lookup(value, leaf)
            if isinstance(found, str):
                texts.append(found)
            elif len(self.leaves) == 1 or found is not None:
                raise Unreadable(_missing(value, leaf))
        if not texts:
            raise Unreadable(_missing(value, self.leaves[0]))
        return ("\n" if self.join is None else self.join).join(texts)

    def meta_of(self, value: object) -> str | None:
        """The kept fields that are there, as a JSON object."""
        if not self.keep or not isinstance(value, dict):
            return None
        kept = {name: found for name in self.keep if (found := lookup(value, tuple(name.split(".")))) is not None}
        if not kept:
            return None
        text = json.dumps(kept, ensure_ascii=False, default=str)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = json.dumps(kept, default=str)
        return text

    def url_of(self, value: object) -> str | None:
        """The address of a web page, kept or not."""
        found = value.get("url") if self.url and isinstance(value, dict) else None
        return found if isinstance(found, str) else None

    def columns(self, names: list[str]) -> list[str]:
        """Of a table's columns those that are needed; which of them make a conversation is seen row by row."""
        if self.chat:
            return names
        paths = [self.lists[0]] if self.lists else list(self.leaves)
        wanted = {self.key, *self.keep} | {word for path in paths for word in (".".join(path), path[0] if path else "")}
        wanted |= {name.partition(".")[0] for name in self.keep} | ({"url"} if self.url else set())
        return [name for name in names if name in wanted]


def fields_of(source: Source, config: CorpusConfig, keep: tuple[str, ...] = ()) -> Fields:
    """The fields to read of a source; `keep`: what its format keeps where nothing is asked for."""
    key = source.text_key or config.text_key
    *lists, leaf = [key] if config.chat else key.split("[]")
    ways = tuple(_path(part) for part in lists)
    leaves, kept = tuple(_path(part) for part in leaf.split("+")), tuple(config.keep_fields) or keep
    url = bool(config.block_domains or config.block_extensions)
    return Fields(source.name, key, ways, leaves, config.join, kept, url, config.chat)


def _path(text: str) -> Path:
    return tuple(word for word in text.strip(". ").split(".") if word)


def lookup(value: object, path: Path) -> object:
    """What stands at the end of a path, None where nothing does; a field whose own name has dots is found too."""
    for depth, word in enumerate(path):
        if not isinstance(value, dict):
            return None
        if word not in value:
            return value.get(".".join(path[depth:]))
        value = value[word]
    return value


def _elements(value: object, path: Path) -> Iterator[object]:
    found = lookup(value, path)
    if not isinstance(found, list):
        if not isinstance(value, dict):
            raise Unreadable(f"found a JSON {kind_of(value)}; wanted the list '{'.'.join(path)}[]'")
        raise Unreadable(f"no list '{'.'.join(path)}[]'; found {sorted(map(str, value))[:12]}")
    yield from found


def _walk(value: object, lists: tuple[Path, ...]) -> Iterator[tuple[str, object]]:
    """Every innermost element with the way to it."""
    if not lists:
        yield "", value
        return
    for index, element in enumerate(_elements(value, lists[0])):
        for way, last in _walk(element, lists[1:]):
            yield f".{'.'.join(lists[0])}[{index}]{way}", last


def _missing(value: dict[str, Any], path: Path) -> str:
    key = ".".join(path)
    found = lookup(value, path)
    if found is not None or key in value:
        return f"field '{key}' is {kind_of(found)}, not text"
    texts = [name for name, inner in value.items() if isinstance(inner, str) and name.isprintable()]
    advice = f"; set corpus.text_key={max(texts, key=lambda name: len(str(value[name])))}" if texts else ""
    return f"no field '{key}'; found {sorted(value)[:12]}{advice}"


def kind_of(value: object) -> str:
    """A JSON value's kind in a user's words."""
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    return kinds.get(type(value), "number")
