"""The two passes over the pieces: read, clean and hash; then keep, split and write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.clean import Cleaner
from textmill.corpus.conversations import canonical
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.records import Bad, read_records
from textmill.corpus.sentences import keep_lines, split_sentences
from textmill.corpus.shards import CHAT_SCHEMA, SCHEMA, ShardWriter, new_shard, open_shard, shard_name
from textmill.corpus.source import Piece
from textmill.corpus.split import DIGEST, digest_of
from textmill.storage.files import account_of, read_json, write_json, writing

CLEANED = pa.schema([("text", pa.string()), ("id", pa.string()), ("meta", pa.string()), ("messages", pa.string())])
SENTENCES = {"split": split_sentences, "lines": keep_lines}
HELD = 4 << 20
"""Characters that are gathered before they are written."""


@dataclass(frozen=True)
class Work:
    """One piece and where its intermediate files stand; the JSON files are written last and say that a pass is through."""

    piece: Piece
    config: CorpusConfig
    folder: Path

    def __repr__(self) -> str:
        return repr(self.piece)

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.piece.stop - self.piece.start

    def path(self, kind: str) -> Path:
        """An intermediate file of this piece."""
        return self.folder / "work" / f"{self.piece.number:05d}.{kind}"

    def digests(self) -> NDArray[np.uint8]:
        """A row of 16 bytes for each cleaned document."""
        return np.fromfile(self.path("digests"), dtype=np.uint8).reshape(-1, DIGEST)

    def bad_rows(self) -> Iterator[Bad]:
        """What could not be read, under the name that the source has now."""
        with open(self.path("bad"), encoding="utf-8") as stream:
            for line in stream:
                place, reason, raw = json.loads(line)
                yield Bad(self.piece.source.name, place, reason, bytes.fromhex(raw))


@dataclass
class Gatherer:
    """Cleaned documents on their way to a shard."""

    writer: ShardWriter
    digests: BinaryIO
    composed: bool
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    metas: list[str | None] = field(default_factory=list)
    messages: list[str | None] = field(default_factory=list)
    held: int = 0

    def add(self, text: str, place: str, meta: str | None, messages: str | None = None) -> None:
        self.texts.append(text)
        self.places.append(place)
        self.metas.append(meta)
        self.messages.append(messages)
        # Two conversations of the same words are the same only if the same ones say them.
        self.digests.write(digest_of(messages or text, composed=self.composed))
        self.held += len(text) + len(meta or "") + len(messages or "")
        if self.held >= HELD:
            self.flush()

    def flush(self) -> None:
        columns = [pa.array(column, pa.string()) for column in (self.texts, self.places, self.metas, self.messages)]
        self.writer.add(pa.table(columns, schema=CLEANED))
        self.texts, self.places, self.metas, self.messages, self.held = [], [], [], [], 0


def read_piece(work: Work) -> dict[str, Any]:
    """Pass 1: records, changed and dropped by rule, and quarantined of a piece; documents, digests and bad rows go to files."""
    if work.path("read.json").is_file():
        counts: dict[str, Any] = read_json(work.path("read.json"))
        return counts
    cleaner, into_lines = Cleaner(work.config), SENTENCES.get(work.config.sentences)
    records = quarantined = 0
    files = writing(work.path("bad")), writing(work.path("digests")), new_shard(work.path("parquet"), CLEANED, "lz4")
    with files[0] as bad, files[1] as digests, files[2] as shard:
        kept = Gatherer(shard, digests, composed=not {"unicode", "compatibility"}.isdisjoint(work.config.rules))
        for record in read_records(work.piece, work.config):
            records += 1
            if isinstance(record, Bad):
                quarantined += 1
                bad.write(json.dumps([record.place, record.reason, record.raw.hex()]).encode() + b"\n")
                continue
            if record.turns is not None:
                _add_turns(kept, cleaner, record)
                continue
            text = cleaner.clean(record.text, record.url)
            if text is not None:
                kept.add(into_lines(text) if into_lines else text, record.id, record.meta)
        kept.flush()
    changed, dropped = dict(sorted(cleaner.changed.items())), dict(sorted(cleaner.dropped.items()))
    counts = {"records": records, "changed": changed, "dropped": dropped, "quarantined": quarantined}
    write_json(work.path("read.json"), counts)
    return counts


def _add_turns(kept: Gatherer, cleaner: Cleaner, record: Document) -> None:
    turns = cleaner.clean_turns(record.turns or (), record.url)
    if turns is not None:
        kept.add("\n".join(text for _, text in turns), record.id, record.meta, canonical(turns))


def write_piece(work: Work) -> dict[str, Any]:
    """Pass 2: for each split of a piece its documents, bytes and characters, and the account of its file."""
    if work.path("written.json").is_file():
        splits: dict[str, Any] = read_json(work.path("written.json"))
        return splits
    sides = np.fromfile(work.path("sides"), dtype=np.int8)
    present = [(side, split) for side, split in enumerate(SPLITS) if (sides == side).any()]
    splits = {split: {"documents": 0, "bytes": 0, "characters": 0} for _, split in present}
    with ExitStack() as stack, open_shard(work.path("parquet")) as cleaned:
        schema = CHAT_SCHEMA if work.config.chat else SCHEMA
        paths = {split: work.folder / shard_name(split, work.piece.number) for _, split in present}
        writers = {split: stack.enter_context(new_shard(path, schema)) for split, path in paths.items()}
        done = 0
        for group in range(cleaned.num_row_groups):
            table = cleaned.read_row_group(group, use_threads=False)
            here = sides[done : done + table.num_rows]
            done += table.num_rows
            for side, split in present:
                part = table.filter(pa.array(here == side))
                _count(splits[split], part.column("text"))
                source = pa.array([work.piece.source.name] * part.num_rows, pa.string())
                writers[split].add(part.append_column("source", source).select(schema.names))
    for _, split in present:
        name = shard_name(split, work.piece.number)
        splits[split]["file"] = {"name": name, **account_of(work.folder / name)}
    write_json(work.path("written.json"), splits)
    return splits


def _count(counts: dict[str, Any], texts: pa.ChunkedArray) -> None:
    counts["documents"] += len(texts)
    counts["bytes"] += pc.sum(pc.binary_length(texts)).as_py() or 0
    counts["characters"] += pc.sum(pc.utf8_length(texts)).as_py() or 0
