"""Source and Piece: a file to read, and a range of it; which file names are of which format."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".xml": "mediawiki",
}  # fmt: skip
EXTENSIONS = f"{', '.join(FORMATS)}, the files of WikiExtractor, and these with {', '.join(COMPRESSIONS)}"
SELF_COMPRESSED = ("parquet", "arrow")
"""Formats that are compressed inside, and not from outside."""
WIKI_FILE = re.compile(r"wiki_\d+")
"""WikiExtractor's own names, which have no extension."""


ChunkRange = tuple[int, int, int]
"""Start, stop, and the number of the first record."""


@dataclass(frozen=True)
class Source:
    """One file, or whatever else can be read in pieces."""

    name: str
    """As the user named it."""
    address: str
    """The path or URL of its bytes."""
    format: str
    text_key: str | None = None
    """Its own `corpus.text_key`, where a named corpus says one."""
    collection_ranges: tuple[Any, ...] = ()
    """Of a MongoDB index: where each collection began and ended when it was looked at."""
    read_original: bool = False
    """Of a MongoDB index: cleaned text goes back there, so what an earlier cleaning left is not read."""

    @property
    def path(self) -> Path:
        """Where it stands on this machine, if it does."""
        return Path(self.address)


@dataclass(frozen=True)
class SourceChunk:
    """A stretch of one source: the whole file, or whole lines, row groups or documents of it."""

    number: int
    source: Source
    start: int
    stop: int
    first_record: int = 1
    """The number of its first line or row."""
    is_entire_source: bool = True
    """Whether it is all of the source."""

    def __repr__(self) -> str:
        return f"{self.source.name} (bytes {self.start:,} to {self.stop:,})"


def format_from_name(name: str) -> str | None:
    """The format that a file's name tells; None: not one that is read."""
    stem = os.path.basename(name).lower()
    plain = next((stem.removesuffix(end) for end in COMPRESSIONS if stem.endswith(end)), stem)
    found = "wiki" if WIKI_FILE.fullmatch(plain) else FORMATS.get(os.path.splitext(plain)[1])
    return None if found in SELF_COMPRESSED and plain != stem else found
