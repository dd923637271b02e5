"""The two passes over all chunks: clean and hash the documents, then write those that are kept to their split.

Between the passes, prepare decides about all documents together. The files of chunk 12 in the folder `work`:

    00012.parquet         pass 1: the cleaned documents
    00012.digests         pass 1: 16 bytes per document, for exact duplicates and the split
    00012.bad             pass 1: records that could not be read
    00012.filtered        pass 1, with corpus.keep_dropped: documents that a filter dropped
    00012.hits            pass 1, with corpus.decontaminate: documents and the n-grams of evaluation data in them
    00012.read.json       the counts of pass 1, written last
    00012.splits          a byte per document: the index of its split, -1 if it is dropped
    00012.repeats         with corpus.keep_dropped: which document each duplicate repeats
    00012.contaminated    with corpus.decontaminate: the rows of contaminated documents
    00012.written.json    the counts of pass 2, written last
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.clean import Cleaner
from textmill.corpus.conversations import turns_to_json
from textmill.corpus.decontamination.evaluation_data import open_index
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.dropped import FILTERED_SCHEMA, REPEAT_DTYPE, dropped_name, write_dropped
from textmill.corpus.records import BadRecord, read_records
from textmill.corpus.sentences import keep_lines, split_sentences
from textmill.corpus.shards import CHAT_SCHEMA, SCHEMA, ShardWriter, new_shard, open_shard, shard_name
from textmill.corpus.source import SourceChunk
from textmill.corpus.split import DIGEST_BYTES, text_digest
from textmill.storage.files import atomic_writer, manifest_entry, read_json, write_json

CLEANED_SCHEMA = pa.schema(
    [("text", pa.string()), ("id", pa.string()), ("meta", pa.string()), ("messages", pa.string())]
)
SENTENCE_SPLITTERS = {"split": split_sentences, "lines": keep_lines}
FILTERED_ROWS = 1024
"""Documents that filters dropped, collected before they are written."""
BUFFER_CHARACTERS = 4 << 20
"""Characters collected before they are written."""


@dataclass(frozen=True)
class ChunkTask:
    """One source chunk with the paths of its intermediate files.

    The JSON file of a pass is written last; its presence means that the pass is finished.
    """

    chunk: SourceChunk
    config: CorpusConfig
    folder: Path

    def __repr__(self) -> str:
        return repr(self.chunk)

    @property
    def size(self) -> int:
        """Bytes of input; used for the progress bar."""
        return self.chunk.stop - self.chunk.start

    def path(self, kind: str) -> Path:
        """The path of an intermediate file of this chunk."""
        return self.folder / "work" / f"{self.chunk.number:05d}.{kind}"

    def read_digests(self) -> NDArray[np.uint8]:
        """The 16-byte digests of the cleaned documents, one row each."""
        return np.fromfile(self.path("digests"), dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def read_contaminated(self) -> NDArray[np.int64]:
        """The rows of the cleaned documents that share n-grams with evaluation data."""
        return np.fromfile(self.path("contaminated"), np.int64)

    def read_bad_records(self) -> Iterator[BadRecord]:
        """The bad records of this chunk, with the current name of the source."""
        with open(self.path("bad"), encoding="utf-8") as stream:
            for line in stream:
                place, reason, raw = json.loads(line)
                yield BadRecord(self.chunk.source.name, place, reason, bytes.fromhex(raw))


@dataclass
class DocumentBuffer:
    """Collects cleaned documents and writes them to a shard in blocks."""

    writer: ShardWriter
    digests: BinaryIO
    is_nfc: bool
    find_hits: Callable[[list[str]], None] | None = None
    """Records which texts share an n-gram with evaluation data."""
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    metas: list[str | None] = field(default_factory=list)
    messages: list[str | None] = field(default_factory=list)
    buffered_characters: int = 0

    def add(self, text: str, place: str, meta: str | None, messages: str | None = None) -> None:
        self.texts.append(text)
        self.places.append(place)
        self.metas.append(meta)
        self.messages.append(messages)
        # Two conversations with the same text are duplicates only if the roles are the same too.
        self.digests.write(text_digest(messages or text, is_nfc=self.is_nfc))
        self.buffered_characters += len(text) + len(meta or "") + len(messages or "")
        if self.buffered_characters >= BUFFER_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if self.find_hits is not None:
            self.find_hits(self.texts)
        columns = [pa.array(column, pa.string()) for column in (self.texts, self.places, self.metas, self.messages)]
        self.writer.add(pa.table(columns, schema=CLEANED_SCHEMA))
        self.texts = []
        self.places = []
        self.metas = []
        self.messages = []
        self.buffered_characters = 0


@dataclass
class BadRecordFile:
    """Writes records that could not be read, and counts them."""

    stream: BinaryIO
    count: int = 0
    bytes_lost: int = 0

    def add(self, record: BadRecord) -> None:
        self.count += 1
        self.bytes_lost += max(record.bytes_lost, len(record.raw))
        self.stream.write(json.dumps([record.place, record.reason, record.raw.hex()]).encode() + b"\n")


def clean_chunk(task: ChunkTask) -> dict[str, Any]:
    """Pass 1: clean a chunk's records and return their counts; documents, digests and bad records go to files."""
    if task.path("read.json").is_file():
        counts: dict[str, Any] = read_json(task.path("read.json"))
        return counts
    cleaner = Cleaner(task.config)
    records = 0
    characters = 0
    with (
        atomic_writer(task.path("bad")) as bad_stream,
        _cleaned_documents(task) as cleaned,
        _filtered_documents(task, cleaner) as add_filtered,
    ):
        bad = BadRecordFile(bad_stream)
        for record in read_records(task.chunk, task.config):
            records += 1
            if isinstance(record, BadRecord):
                bad.add(record)
                continue
            characters += len(record.text)
            if not _add_cleaned(record, cleaner, cleaned, task.config):
                add_filtered(record)
    counts = {
        "records": records,
        "changed": dict(sorted(cleaner.changed.items())),
        "dropped": dict(sorted(cleaner.dropped.items())),
        "quarantined": bad.count,
        "quarantined_bytes": bad.bytes_lost,
        "bytes": max(task.size, characters + bad.bytes_lost),  # a compressed file has more than it stores
    }
    write_json(task.path("read.json"), counts)
    return counts


def _add_cleaned(record: Document, cleaner: Cleaner, cleaned: DocumentBuffer, config: CorpusConfig) -> bool:
    """Clean a text or a conversation and keep it; False if a filter drops it."""
    if record.turns is not None:
        turns = cleaner.clean_turns(record.turns, record.url)
        if turns is not None:
            cleaned.add("\n".join(text for _, text in turns), record.id, record.meta, turns_to_json(turns))
        return turns is not None
    text = cleaner.clean(record.text, record.url)
    if text is not None:
        split_lines = SENTENCE_SPLITTERS.get(config.sentences)
        cleaned.add(split_lines(text) if split_lines else text, record.id, record.meta)
    return text is not None


@contextmanager
def _cleaned_documents(task: ChunkTask) -> Iterator[DocumentBuffer]:
    """The files of cleaned documents: a shard, their digests and, with `corpus.decontaminate`, their n-grams."""
    is_nfc = not {"unicode", "compatibility"}.isdisjoint(task.config.rules)
    with ExitStack() as stack:
        digests = stack.enter_context(atomic_writer(task.path("digests")))
        shard = stack.enter_context(new_shard(task.path("parquet"), CLEANED_SCHEMA, "lz4"))
        find_hits = stack.enter_context(_contaminated_documents(task)) if task.config.decontaminate else None
        buffer = DocumentBuffer(shard, digests, is_nfc, find_hits)
        yield buffer
        buffer.flush()


@contextmanager
def _filtered_documents(task: ChunkTask, cleaner: Cleaner) -> Iterator[Callable[[Document], None]]:
    """A function that records a document which a filter dropped, as it was read; it does nothing by default."""
    if not task.config.keep_dropped:
        yield lambda record: None
        return
    rows: list[tuple[str, str, str]] = []
    with new_shard(task.path("filtered"), FILTERED_SCHEMA, "lz4") as shard:

        def flush() -> None:
            columns = zip(*rows, strict=True) if rows else ((), (), ())
            shard.add(pa.table([pa.array(column, pa.string()) for column in columns], schema=FILTERED_SCHEMA))
            rows.clear()

        def add(record: Document) -> None:
            rows.append((record.text, record.id, cleaner.dropped_by))
            if len(rows) >= FILTERED_ROWS:
                flush()

        yield add
        flush()


@contextmanager
def _contaminated_documents(task: ChunkTask) -> Iterator[Callable[[list[str]], None]]:
    """A function that records the n-grams of evaluation data in the next texts: the row of each and the n-gram."""
    index = open_index(task.folder / "work")
    rows = 0
    with atomic_writer(task.path("hits")) as stream:

        def find(texts: list[str]) -> None:
            nonlocal rows
            text_numbers, keys = index.find(texts)
            stream.write(np.stack([text_numbers + rows, keys], axis=1).tobytes())
            rows += len(texts)

        yield find


def write_chunk(task: ChunkTask) -> dict[str, Any]:
    """Pass 2: write a chunk's kept documents; return the counts and the shard's checksum for each split."""
    if task.path("written.json").is_file():
        splits: dict[str, Any] = read_json(task.path("written.json"))
        return splits
    split_of_row = np.fromfile(task.path("splits"), dtype=np.int8)
    present = {split: index for index, split in enumerate(SPLITS) if (split_of_row == index).any()}
    splits = {split: {"documents": 0, "bytes": 0, "characters": 0} for split in present}
    names = {split: shard_name(split, task.chunk.number) for split in present}
    schema = CHAT_SCHEMA if task.config.chat else SCHEMA
    with ExitStack() as stack:
        shards = {split: stack.enter_context(new_shard(task.folder / name, schema)) for split, name in names.items()}
        for first_row, table in _read_cleaned(task):
            split_of_document = split_of_row[first_row : first_row + table.num_rows]
            for split, index in present.items():
                documents = table.filter(pa.array(split_of_document == index))
                _count(splits[split], documents.column("text"))
                source = pa.array([task.chunk.source.name] * documents.num_rows, pa.string())
                shards[split].add(documents.append_column("source", source).select(schema.names))
    for split, name in names.items():
        splits[split]["file"] = {"name": name, **manifest_entry(task.folder / name)}
    if task.config.keep_dropped:
        _write_dropped(task)
    write_json(task.path("written.json"), splits)
    return splits


def _read_cleaned(task: ChunkTask) -> Iterator[tuple[int, pa.Table]]:
    """Blocks of cleaned documents, each with the number of its first row; contaminated ones are marked if wanted."""
    is_marking = task.config.decontaminate and task.config.decontaminate_action == "mark"
    first_row = 0
    with open_shard(task.path("parquet")) as cleaned:
        for group in range(cleaned.num_row_groups):
            table = cleaned.read_row_group(group, use_threads=False)
            yield first_row, _mark(table, task.read_contaminated() - first_row) if is_marking else table
            first_row += table.num_rows


def _write_dropped(task: ChunkTask) -> None:
    """Write the documents that are not kept, for `corpus.keep_dropped`."""
    is_dropping = task.config.decontaminate and task.config.decontaminate_action == "drop"
    contaminated = task.read_contaminated() if is_dropping else np.zeros(0, np.int64)
    repeats = np.fromfile(task.path("repeats"), REPEAT_DTYPE)
    path = task.folder / dropped_name(task.chunk.number)
    write_dropped(path, task.folder / "work", task.chunk.number, repeats, contaminated)


def _mark(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """The table with a mark in the field `meta` of some rows."""
    metas = table.column("meta").to_pylist()
    for row in rows[(rows >= 0) & (rows < table.num_rows)].tolist():
        metas[row] = json.dumps({**json.loads(metas[row] or "{}"), "contaminated": True}, ensure_ascii=False)
    return table.set_column(table.schema.get_field_index("meta"), "meta", pa.array(metas, pa.string()))


def _count(counts: dict[str, Any], texts: pa.ChunkedArray) -> None:
    counts["documents"] += len(texts)
    counts["bytes"] += pc.sum(pc.binary_length(texts)).as_py() or 0
    counts["characters"] += pc.sum(pc.utf8_length(texts)).as_py() or 0
