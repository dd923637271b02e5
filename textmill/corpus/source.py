"""Describe sources and the chunks they are read in, and find a file's format from its name."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".tokens": "text",  # WikiText's wiki.train.tokens
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
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".pdf": "pdf",
    **dict.fromkeys((".docx", ".docm", ".odt"), "office"),
    ".epub": "epub",
    ".rtf": "rtf",
    **dict.fromkeys((".tex", ".latex"), "latex"),
    **dict.fromkeys((".srt", ".vtt"), "subtitles"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
    **dict.fromkeys((".mbox", ".eml"), "mail"),
}
CODE = {
    **dict.fromkeys((".c", ".h"), "C"),
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".hh", ".hpp"), "C++"),
    **dict.fromkeys((".js", ".jsx", ".mjs"), "JavaScript"),
    **dict.fromkeys((".ts", ".tsx"), "TypeScript"),
    **dict.fromkeys((".sh", ".bash"), "Shell"),
    **dict.fromkeys((".ml", ".mli"), "OCaml"),
    **dict.fromkeys((".f90", ".f95"), "Fortran"),
    **dict.fromkeys((".ex", ".exs"), "Elixir"),
    **{".py": "Python", ".java": "Java", ".go": "Go", ".rs": "Rust", ".rb": "Ruby", ".php": "PHP", ".cs": "C#"},
    **{".swift": "Swift", ".kt": "Kotlin", ".scala": "Scala", ".r": "R", ".jl": "Julia", ".lua": "Lua", ".pl": "Perl"},
    **{
        ".sql": "SQL",
        ".zig": "Zig",
        ".dart": "Dart",
        ".cu": "CUDA",
        ".clj": "Clojure",
        ".lean": "Lean",
        ".hs": "Haskell",
    },
}
"""The languages of source code, by the end of a file's name."""
ARCHIVES = {".zip": "zip", ".tar": "tar", ".tgz": "tar", **{f".tar{end}": "tar" for end in COMPRESSIONS[:3]}}
"""Archives of files, by the end of their name."""
EXTENSIONS = (
    f"{', '.join(FORMATS)}, source code, WikiExtractor files, all of these with {', '.join(COMPRESSIONS)}, and .zip "
    "and .tar archives of them"
)
SELF_COMPRESSED = ("parquet", "arrow")
"""Formats with built-in compression; files of these formats have no second extension such as .gz."""
BINARY_DOCUMENTS = ("pdf", "office", "epub", "rtf", "html")
DOCUMENT_FORMATS = (*BINARY_DOCUMENTS, "latex", "subtitles", "code", "mail", "warc")
"""Formats of documents that people write and read, and those of them that name their own encoding."""
ONE_TEXT_FORMATS = ("text", *BINARY_DOCUMENTS, "latex", "subtitles", "code")
"""Formats of which a file is one text, which `corpus.documents` cuts."""
FIELD_FORMATS = ("jsonl", "json", "csv", "parquet", "arrow")
"""Formats whose records have fields that their author chose: conversations and labels can be in them."""
NOT_TEXT = (*SELF_COMPRESSED, "mongo", *BINARY_DOCUMENTS, "mail", "warc")
"""Formats that have no encoding and no lines, or in which each part names its own encoding."""
PACKAGES = {"pdf": "pypdfium2", "html": "resiliparse", "epub": "resiliparse", "warc": "resiliparse", "rtf": "striprtf"}
"""The package of the extra `documents` that a format needs, if it needs one."""
PACKAGES_ADVICE = "pip install 'textmill[documents]'"
"""What installs them."""
WIKI_FILE = re.compile(r"wiki_\d+")
"""WikiExtractor output files have no extension."""


ChunkRange = tuple[int, int, int]
"""Start, stop, and the number of the first record."""


class Damage(NamedTuple):
    """Damage of a compressed file, found where a checksum or the decompression failed; it may begin long before."""

    intact_bytes: int
    """Decompressed bytes that are certainly before it."""
    lost_bytes: int
    """Decompressed bytes after them that may be wrong."""
    reason: str


class Source(NamedTuple):  # a dataclass takes several times as long to make and to send, and there may be millions
    """One input: a file, a URL, a file of a dataset, or a set of MongoDB collections."""

    name: str
    """The name the user gave it."""
    address: str
    """The path or URL of the data."""
    format: str
    text_key: str | None = None
    """Overrides `corpus.text_key`, if its entry of `corpus.sources` has one."""
    group: str = ""
    """The name of its entry of `corpus.sources`, if it has one."""
    encoding: str = "auto"
    """The encoding of the file, from `corpus.encoding`."""
    position: int = 0
    """Where it stands in its archive, from 1: in a zip its byte, in a tar its number. Files of a tar are read in this
    order, since a compressed archive can only be read from its beginning."""
    damage: Damage | None = None
    """What an earlier attempt to read it found; only what is before it is read."""
    is_sampled: bool = False
    """True if only some parts are read: then its content is not hashed, which would read all of it."""
    part: tuple[int, int] | None = None
    """Only the complete lines between these stored bytes are read; from 0 on, as much as these bytes give."""
    snapshot: Any = None
    """What a format that is no file recorded when the source was found: MongoDB the ranges of its collections."""

    @property
    def in_archive(self) -> bool:
        """True for a file inside a local archive; its name is the archive's path and its own."""
        return is_member(self.address)

    @property
    def path(self) -> Path:
        """The local path; only for files on this machine."""
        return Path(self.address)


class SourceChunk(NamedTuple):
    """The part of a source that one worker reads: all of it, or a range of lines, row groups or documents."""

    source: Source
    start: int
    stop: int
    first_record: int = 1
    """The number of its first line, row or document."""
    is_entire_source: bool = True
    """True if the chunk is all of the source."""

    def __repr__(self) -> str:
        return f"{self.source.name} (bytes {self.start:,} to {self.stop:,})"


def is_member(address: str) -> bool:
    """True if an address is that of a file inside a local archive."""
    return address.startswith(("zip://", "tar://")) and "::/" in address


def archive_kind(name: str) -> str | None:
    """zip or tar, judged by the name of a file; None if it is not an archive."""
    return next((kind for end, kind in ARCHIVES.items() if name.lower().endswith(end)), None)


@cache
def missing_package(file_format: str | None) -> str | None:
    """The package that a format needs and that is not installed."""
    package = PACKAGES.get(file_format or "")
    return package if package and find_spec(package) is None else None


def format_from_name(name: str) -> str | None:
    """The format of a file, judged by its name; None if textmill cannot read it."""
    file_name = name.rpartition("/")[2].lower()
    if found := FORMATS.get(file_name[file_name.rfind(".") :]):
        return found
    compression = next((end for end in COMPRESSIONS if file_name.endswith(end)), "")
    uncompressed_name = file_name.removesuffix(compression)
    if WIKI_FILE.fullmatch(uncompressed_name):
        return "wiki"
    extension = os.path.splitext(uncompressed_name)[1]
    file_format = FORMATS.get(extension, "code" if extension in CODE else None)
    return None if compression and file_format in SELF_COMPRESSED else file_format
