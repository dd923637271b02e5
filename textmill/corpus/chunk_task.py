"""ChunkTask: the work on one chunk of a source, whose steps communicate by files in the folder `work`.

The files of chunk 12 in the folder `work`:

    00012.parquet         pass 1: the cleaned documents
    00012.digests         pass 1: 16 bytes per document, for exact duplicates and the split
    00012.bad             pass 1: records that could not be read
    00012.filtered        pass 1, with corpus.keep_dropped: documents that a filter dropped
    00012.hits            pass 1, with corpus.decontaminate: documents and the n-grams of evaluation data in them
    00012.read.json       the counts of pass 1, written last
    00012.exact           with corpus.dedup=near: a byte per document, 0 if it is an exact duplicate
    00012.bands           ... the MinHash band hashes of the others, band by band
    00012.lengths         ... the lengths of their texts, written after the band hashes
    00012.sets            ... the shingle sets of those in a candidate pair
    00012.ends            ... where each set ends, written last
    00012.splits          a byte per document: the index of its split, -1 if it is dropped
    00012.repeats         with corpus.keep_dropped: which document each duplicate repeats
    00012.contaminated    with corpus.decontaminate: the rows of contaminated documents
    00012.written.json    the counts of pass 2, written last
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.records import BadRecord
from textmill.corpus.source import SourceChunk
from textmill.corpus.split import DIGEST_BYTES


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
