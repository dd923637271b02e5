"""Find a record's text with `corpus.text_key`: one field, a path through nested lists, or several joined fields.

For the record {"title": "Mills", "pages": [{"lines": ["a", "b"]}, {"lines": ["c"]}]}:

    text_key                     documents
    title                        "Mills"
    title+summary                the fields that exist, joined by corpus.join_with
    pages[].lines[]              "a", "b", "c", from the places pages[0].lines[0], pages[0].lines[1], pages[1].lines[0]
    the same with join_with=" "  "a b", "c": one for each element of the first list
    *                            the record as JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.conversations import find_layout, read_conversation
from textmill.corpus.document import Document
from textmill.corpus.records import RAW_BYTES, BadRecord, UnreadableRecord
from textmill.corpus.source import Source

FieldPath = tuple[str, ...]
RECORD = "*"
"""The key of the full record, read as JSON."""


@dataclass(frozen=True)
class TextFields:
    """Where the records of a source hold their text and metadata."""

    source: str
    key: str
    """`corpus.text_key` as written; a field with exactly this name takes precedence over the path syntax."""
    list_paths: tuple[FieldPath, ...]
    """The path to each `[]` list, starting from an element of the list before it."""
    text_paths: tuple[FieldPath, ...]
    """The fields that are joined, starting from the innermost element."""
    join: str | None
    kept_fields: tuple[str, ...]
    url: bool = False
    """True if a filter needs the field `url`."""
    chat: str | None = None
    """The layout of conversations; None if the records are plain text."""

    def documents(self, value: object, place: str, raw: bytes | None = None) -> Iterator[Document | BadRecord]:
        """Yield the documents of one record; without any match, one empty document, so that the record is counted.

        `raw`: its bytes as they are stored; without them a bad record shows its value."""
        if self.chat or not self.list_paths or (isinstance(value, dict) and self.key in value):
            yield self._to_document(value, value, place, raw, ())
            return
        try:
            elements = list(_elements(value, self.list_paths[0]))
        except UnreadableRecord as error:
            yield BadRecord(self.source, place, str(error), _shown(value, raw))
            return
        if not elements:
            yield Document("", self.source, place)
        for index, element in enumerate(elements):
            yield from self.element_documents(element, f"{place}, {'.'.join(self.list_paths[0])}[{index}]", raw)

    def element_documents(self, element: object, place: str, raw: bytes | None) -> Iterator[Document | BadRecord]:
        """Yield the documents of one element of the first list."""
        inner_lists = self.list_paths[1:]
        if self.join is not None or not inner_lists:
            yield self._to_document(element, element, place, raw, inner_lists)
            return
        count = 0
        try:
            for suffix, leaf in _walk(element, inner_lists):
                count += 1
                yield self._to_document(leaf, element, f"{place}{suffix}", raw, ())
        except UnreadableRecord as error:
            count += 1
            yield BadRecord(self.source, place, str(error), _shown(element, raw))
        if not count:
            yield Document("", self.source, place)

    def _to_document(
        self, value: object, metadata_holder: object, place: str, raw: bytes | None, inner_lists: tuple[FieldPath, ...]
    ) -> Document | BadRecord:
        turns = None
        try:
            if self.chat:
                turns = read_conversation(value, self.chat, self.key)
                text = "\n".join(turn_text for _, turn_text in turns)
            elif inner_lists:
                text = (self.join or "").join(self.read_text(leaf) for _, leaf in _walk(value, inner_lists))
            else:
                text = self.read_text(value)
            text.encode()
            return Document(
                text, self.source, place, self.read_metadata(metadata_holder), self.read_url(metadata_holder), turns
            )
        except UnreadableRecord as error:
            reason = str(error)
        except UnicodeEncodeError as error:
            may_be_byte = 0xDC80 <= ord(text[error.start]) <= 0xDCFF
            problem = "not UTF-8, or a lone surrogate" if may_be_byte else "a lone surrogate"
            reason = f"{problem}, \\u{ord(text[error.start]):04x}, at character {error.start:,}"
        shown = _shown(value, raw)
        return BadRecord(self.source, place, reason, shown, len(shown))

    def read_text(self, value: object) -> str:
        """The text of an innermost element; missing or null fields are left out if there are several."""
        if self.text_paths == ((RECORD,),):
            return json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, dict):
            text = value.get(self.key)
            if isinstance(text, str):
                return text
        if self.text_paths == ((),):
            if isinstance(value, str):
                return value
            raise UnreadableRecord(f"found a JSON {json_kind(value)}; '{self.key}' must be a list of strings")
        if not isinstance(value, dict):
            raise UnreadableRecord(
                f"found a JSON {json_kind(value)}; expected an object with the field "
                f"'{'+'.join(map('.'.join, self.text_paths))}'"
            )
        texts = []
        for text_path in self.text_paths:
            field = lookup(value, text_path)
            if isinstance(field, str):
                texts.append(field)
            elif len(self.text_paths) == 1 or field is not None:
                raise UnreadableRecord(_describe_missing(value, text_path))
        if not texts:
            raise UnreadableRecord(_describe_missing(value, self.text_paths[0]))
        return ("\n" if self.join is None else self.join).join(texts)

    def read_metadata(self, value: object) -> str | None:
        """The kept fields of a record, as a JSON object."""
        if not self.kept_fields or not isinstance(value, dict):
            return None
        fields = {name: lookup(value, tuple(name.split("."))) for name in self.kept_fields}
        metadata = {name: field for name, field in fields.items() if field is not None}
        if not metadata:
            return None
        text = json.dumps(metadata, ensure_ascii=False, default=str)
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate
            text = json.dumps(metadata, default=str)
        return text

    def read_url(self, value: object) -> str | None:
        """The URL of a web page, if a filter needs it."""
        url = value.get("url") if self.url and isinstance(value, dict) else None
        return url if isinstance(url, str) else None

    def columns(self, names: list[str]) -> list[str]:
        """The columns that are needed; all of them for conversations, since each row may use different ones."""
        if self.chat or self.text_paths == ((RECORD,),):
            return names
        needed = {self.key, *self.kept_fields}
        if self.url:
            needed.add("url")
        # The column of a.b is called a.b, or it is a column a with the field b.
        for path in self.list_paths[:1] or self.text_paths:
            needed |= {".".join(path), *path[:1]}
        needed |= {name.partition(".")[0] for name in self.kept_fields}
        return [name for name in names if name in needed]


def parse_text_key(source: Source, config: CorpusConfig, kept_fields: tuple[str, ...] = ()) -> TextFields:
    """Parse `corpus.text_key` for a source; `kept_fields`: metadata to keep if `corpus.keep_fields` is empty."""
    key = source.text_key or config.text_key
    *lists, texts = [key] if config.chat else key.split("[]")  # pages[].lines[] -> pages, .lines and an empty text
    return TextFields(
        source=source.name,
        key=key,
        list_paths=tuple(_path(name) for name in lists),
        text_paths=tuple(_path(name) for name in texts.split("+")),
        join=config.join_with,
        kept_fields=tuple(config.keep_fields) or kept_fields,
        url=bool(config.block_urls),
        chat=config.chat,
    )


def _path(text: str) -> FieldPath:
    return tuple(name for name in text.strip(". ").split(".") if name)


def _shown(value: object, raw: bytes | None) -> bytes:
    return str(value)[:RAW_BYTES].encode(errors="replace") if raw is None else raw


def lookup(value: object, path: FieldPath) -> object:
    """The value at a path, or None; also finds a field whose own name contains dots."""
    for depth, name in enumerate(path):
        if not isinstance(value, dict):
            return None
        if name not in value:
            return value.get(".".join(path[depth:]))
        value = value[name]
    return value


def _elements(value: object, path: FieldPath) -> Iterator[object]:
    elements = lookup(value, path)
    if not isinstance(elements, list):
        if not isinstance(value, dict):
            raise UnreadableRecord(f"found a JSON {json_kind(value)}; expected the list '{'.'.join(path)}[]'")
        raise UnreadableRecord(f"no list '{'.'.join(path)}[]'; found {sorted(map(str, value))[:12]}")
    yield from elements


def _walk(value: object, list_paths: tuple[FieldPath, ...]) -> Iterator[tuple[str, object]]:
    """Yield every innermost element with the path to it, such as (".pages[0].lines[1]", "b")."""
    if not list_paths:
        yield "", value
        return
    for index, element in enumerate(_elements(value, list_paths[0])):
        for suffix, leaf in _walk(element, list_paths[1:]):
            yield f".{'.'.join(list_paths[0])}[{index}]{suffix}", leaf


def _describe_missing(value: dict[str, Any], path: FieldPath) -> str:
    key = ".".join(path)
    field = lookup(value, path)
    if field is not None or key in value:
        return f"field '{key}' is {json_kind(field)}, not text"
    text_lengths = {name: len(text) for name, text in value.items() if isinstance(text, str) and name.isprintable()}
    longest = max(text_lengths, key=text_lengths.__getitem__, default=None)
    advice = f"; set corpus.text_key={longest}" if longest is not None else ""
    if (layout := find_layout(value)) is not None:
        advice = f"; it is a conversation: set corpus.chat={layout[0]}, in a project without plain text"
    return f"no field '{key}'; found {sorted(value)[:12]}{advice}"


def json_kind(value: object) -> str:
    """The kind of a JSON value, for error messages."""
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    return kinds.get(type(value), "number")
