"""ChunkTask: the work on one chunk of the corpus, whose steps communicate by files in the folder `work`.

A chunk is a part of a large source, or many small sources. The files of chunk 12 in the folder `work`:

    00012.parquet         pass 1: the cleaned documents
    00012.rows            pass 1: how many of them are from each of the sources
    00012.digests         pass 1: 16 bytes per document, for exact duplicates and the split
    00012.fields          pass 1, with corpus.split_by=field: the hash of each document's value
    00012.cuts            pass 1, with corpus.split_by=position: the length of each document, negative if it begins
                          a record
    00012.bad             pass 1: records that could not be read
    00012.filtered        pass 1, with corpus.keep_dropped: documents that a filter dropped
    00012.hits            pass 1, with corpus.decontaminate: documents and the n-grams of evaluation data in them
    00012.read.json       the counts of pass 1, written last
    00012.exact           with corpus.dedup=near: a byte per document, 0 if it is an exact duplicate
    00012.bands           ... the MinHash band hashes of the others, band by band
    00012.lengths         ... the lengths of their texts, written after the band hashes
    00012.marks           ... a byte for each, 1 if it is in a candidate pair
    00012.sets            ... the shingle sets of those in a candidate pair
    00012.ends            ... where each set ends, written last
    00012.splits          a byte per document: the index of its split, or why it is dropped (see DROPPED)
    00012.repeats         with corpus.keep_dropped: which document each duplicate repeats
    00012.names           with corpus.keep_dropped: the names of the sources
    00012.written.json    the counts of pass 2, written last
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import open_shard
from textmill.corpus.source import Damage, SourceChunk
from textmill.corpus.split import DIGEST_BYTES

DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near_duplicate"
CONTAMINATED = "contaminated"
GAP = "gap"
DROPPED = {DUPLICATE: -1, NEAR_DUPLICATE: -2, CONTAMINATED: -3, GAP: -4}
"""The rules that drop documents after pass 1, and what stands for each in place of the index of a split."""


def chunk_file(folder: Path, number: int, kind: str) -> Path:
    """The path of an intermediate file of a chunk; `folder`: that of the corpus."""
    return folder / "work" / f"{number:05d}.{kind}"


@dataclass(frozen=True)
class ChunkTask:
    """One chunk of the corpus with the paths of its intermediate files.

    The JSON file of a pass is written last; its presence means that the pass is finished.
    """

    number: int
    chunks: tuple[SourceChunk, ...]
    """A part of one source, or several whole sources."""
    accounts: tuple[str, ...]
    """The name in account.json of each of their sources."""
    config: CorpusConfig
    folder: Path

    def __repr__(self) -> str:
        others = f" and {len(self.chunks) - 1:,} more" if len(self.chunks) > 1 else ""
        return f"{self.chunks[0]!r}{others}"

    @property
    def size(self) -> int:
        """Bytes of input; used for the progress bar."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def source_names(self) -> list[str]:
        """The names of the sources."""
        return [chunk.source.name for chunk in self.chunks]

    def path(self, kind: str) -> Path:
        """The path of an intermediate file of this chunk."""
        return chunk_file(self.folder, self.number, kind)

    def without_damage(self, damaged: Mapping[int, Damage]) -> ChunkTask:
        """The same work, but of the sources with these numbers only what is before their damage is read."""
        chunks = list(self.chunks)
        for number, damage in damaged.items():
            chunks[number] = chunks[number]._replace(source=chunks[number].source._replace(damage=damage))
        return replace(self, chunks=tuple(chunks))

    def read_rows(self) -> NDArray[np.int64]:
        """The number of cleaned documents of each source."""
        return np.fromfile(self.path("rows"), np.int64)

    def sources_of_rows(self) -> NDArray[np.int64]:
        """For each cleaned document, which of the sources it is from."""
        return np.repeat(np.arange(len(self.chunks)), self.read_rows())

    def read_cleaned(self, columns: list[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Blocks of cleaned documents, with all columns or some, each with the number of its first row."""
        first_row = 0
        with open_shard(self.path("parquet")) as cleaned:
            for group in range(cleaned.num_row_groups):
                table = cleaned.read_row_group(group, columns, use_threads=False)
                yield first_row, table
                first_row += table.num_rows

    def read_digests(self) -> NDArray[np.uint8]:
        """The 16-byte digests of the cleaned documents, one row each."""
        return np.fromfile(self.path("digests"), dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def read_splits(self) -> NDArray[np.int8]:
        """For each cleaned document the index of its split, or why it is dropped (see DROPPED)."""
        return np.fromfile(self.path("splits"), np.int8)

    def read_bad_records(self) -> Iterator[BadRecord]:
        """The bad records of this chunk, with the current name of the source."""
        with open(self.path("bad"), encoding="utf-8") as stream:
            for line in stream:
                source, place, reason, raw = json.loads(line)
                yield BadRecord(self.chunks[source].source.name, place, reason, bytes.fromhex(raw))
