"""The two passes over all chunks: clean and hash the documents, then write those that are kept to their split.

Between the passes, prepare decides about all documents together. The files of chunk 12 in the folder `work`:

    00012.parquet         pass 1: the cleaned documents
    00012.digests         pass 1: 16 bytes per document, for exact duplicates and the split
    00012.bad             pass 1: records that could not be read
    00012.filtered        pass 1, with corpus.keep_dropped: documents that a filter dropped
    00012.hits            pass 1, with corpus.decontaminate: documents and the n-grams of evaluation data in them
    00012.read.json       the counts of pass 1, written last
    00012.sides           a byte per document: the index of its split, -1 if it is dropped
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
        self.texts, self.places, self.metas, self.messages, self.buffered_characters = [], [], [], [], 0


def clean_chunk(task: ChunkTask) -> dict[str, Any]:
    """Pass 1: clean a chunk's records and return their counts; documents, digests and bad records go to files."""
    if task.path("read.json").is_file():
        counts: dict[str, Any] = read_json(task.path("read.json"))
        return counts
    cleaner, split_lines = Cleaner(task.config), SENTENCE_SPLITTERS.get(task.config.sentences)
    records = quarantined = bytes_lost = characters = 0
    with ExitStack() as stack:
        bad, digests = (stack.enter_context(atomic_writer(task.path(kind))) for kind in ("bad", "digests"))
        shard = stack.enter_context(new_shard(task.path("parquet"), CLEANED_SCHEMA, "lz4"))
        filtered = stack.enter_context(_filtered_documents(task, cleaner))
        is_nfc = not {"unicode", "compatibility"}.isdisjoint(task.config.rules)
        find_hits = stack.enter_context(_contaminated_documents(task)) if task.config.decontaminate else None
        buffer = DocumentBuffer(shard, digests, is_nfc, find_hits)
        for record in read_records(task.chunk, task.config):
            records += 1
            if isinstance(record, BadRecord):
                quarantined += 1
                bytes_lost += max(record.bytes_lost, len(record.raw))
                bad.write(json.dumps([record.place, record.reason, record.raw.hex()]).encode() + b"\n")
                continue
            characters += len(record.text)
            if record.turns is not None:
                is_kept = _add_turns(buffer, cleaner, record)
            else:
                text = cleaner.clean(record.text, record.url)
                is_kept = text is not None
                if text is not None:
                    buffer.add(split_lines(text) if split_lines else text, record.id, record.meta)
            if not is_kept:
                filtered(record)
        buffer.flush()
    changed, dropped = dict(sorted(cleaner.changed.items())), dict(sorted(cleaner.dropped.items()))
    counts = {
        "records": records,
        "changed": changed,
        "dropped": dropped,
        "quarantined": quarantined,
        "quarantined_bytes": bytes_lost,
        "bytes": max(task.size, characters + bytes_lost),  # a compressed file has more than it stores
    }
    write_json(task.path("read.json"), counts)
    return counts


def _add_turns(buffer: DocumentBuffer, cleaner: Cleaner, record: Document) -> bool:
    turns = cleaner.clean_turns(record.turns or (), record.url)
    if turns is not None:
        buffer.add("\n".join(text for _, text in turns), record.id, record.meta, turns_to_json(turns))
    return turns is not None


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
    index, rows = open_index(task.folder / "work"), 0
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
    split_indexes = np.fromfile(task.path("sides"), dtype=np.int8)
    present_splits = [
        (split_index, split) for split_index, split in enumerate(SPLITS) if (split_indexes == split_index).any()
    ]
    splits = {split: {"documents": 0, "bytes": 0, "characters": 0} for _, split in present_splits}
    with ExitStack() as stack, open_shard(task.path("parquet")) as cleaned:
        schema = CHAT_SCHEMA if task.config.chat else SCHEMA
        paths = {split: task.folder / shard_name(split, task.chunk.number) for _, split in present_splits}
        writers = {split: stack.enter_context(new_shard(path, schema)) for split, path in paths.items()}
        rows_read = 0
        for group in range(cleaned.num_row_groups):
            table = cleaned.read_row_group(group, use_threads=False)
            group_indexes = split_indexes[rows_read : rows_read + table.num_rows]
            if task.config.decontaminate and task.config.decontaminate_action == "mark":
                table = _mark(table, task.read_contaminated() - rows_read)
            rows_read += table.num_rows
            for split_index, split in present_splits:
                documents = table.filter(pa.array(group_indexes == split_index))
                _count(splits[split], documents.column("text"))
                source = pa.array([task.chunk.source.name] * documents.num_rows, pa.string())
                writers[split].add(documents.append_column("source", source).select(schema.names))
    for _, split in present_splits:
        name = shard_name(split, task.chunk.number)
        splits[split]["file"] = {"name": name, **manifest_entry(task.folder / name)}
    if task.config.keep_dropped:
        path = task.folder / dropped_name(task.chunk.number)
        repeats = np.fromfile(task.path("repeats"), REPEAT_DTYPE)
        drops_contaminated = task.config.decontaminate and task.config.decontaminate_action == "drop"
        contaminated = task.read_contaminated() if drops_contaminated else np.zeros(0, np.int64)
        write_dropped(path, task.folder / "work", task.chunk.number, repeats, contaminated)
    write_json(task.path("written.json"), splits)
    return splits


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
