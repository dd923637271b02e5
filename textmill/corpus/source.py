"""Describe sources and the chunks they are read in, and find a file's format from its name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".xml": "mediawiki",
    ".conll": "text",
    ".urls": "urls",
}
ARCHIVES = {".zip": "zip", ".tar": "tar", ".tgz": "tar", **{f".tar{end}": "tar" for end in COMPRESSIONS[:3]}}
"""Archives of files, by the end of their name."""
EXTENSIONS = (
    f"{', '.join(FORMATS)}, WikiExtractor files, all of these with {', '.join(COMPRESSIONS)}, and .zip and .tar "
    "archives of them"
)
SELF_COMPRESSED = ("parquet", "arrow")
"""Formats with built-in compression; files of these formats have no second extension such as .gz."""
NOT_TEXT = (*SELF_COMPRESSED, "mongo")
"""Formats that have no encoding and no lines."""
WIKI_FILE = re.compile(r"wiki_\d+")
"""WikiExtractor output files have no extension."""


ChunkRange = tuple[int, int, int]
"""Start, stop, and the number of the first record."""


@dataclass(frozen=True)
class Source:
    """One input: a file, a URL, a file of a dataset, or a set of MongoDB collections."""

    name: str
    """The name the user gave it."""
    address: str
    """The path or URL of the data."""
    format: str
    text_key: str | None = None
    """Overrides `corpus.text_key`, if the source's named corpus sets one."""
    encoding: str = "auto"
    """The encoding of the file, from `corpus.encoding`."""
    in_archive: bool = False
    """True for a file inside a local archive; its name is the archive's path and its own."""
    snapshot: Any = None
    """What a format that is no file recorded when the source was found: MongoDB the ranges of its collections."""

    @property
    def path(self) -> Path:
        """The local path; only for files on this machine."""
        return Path(self.address)


@dataclass(frozen=True)
class SourceChunk:
    """The part of a source that one worker reads: all of it, or a range of lines, row groups or documents."""

    number: int
    source: Source
    start: int
    stop: int
    first_record: int = 1
    """The number of its first line, row or document."""
    is_entire_source: bool = True
    """True if the chunk is all of the source."""

    def __repr__(self) -> str:
        return f"{self.source.name} (bytes {self.start:,} to {self.stop:,})"


def archive_kind(name: str) -> str | None:
    """zip or tar, judged by the name of a file; None if it is not an archive."""
    return next((kind for end, kind in ARCHIVES.items() if name.lower().endswith(end)), None)


def format_from_name(name: str) -> str | None:
    """The format of a file, judged by its name; None if textmill cannot read it."""
    file_name = os.path.basename(name).lower()
    compression = next((end for end in COMPRESSIONS if file_name.endswith(end)), "")
    uncompressed_name = file_name.removesuffix(compression)
    if WIKI_FILE.fullmatch(uncompressed_name):
        return "wiki"
    file_format = FORMATS.get(os.path.splitext(uncompressed_name)[1])
    return None if compression and file_format in SELF_COMPRESSED else file_format
