"""From the words of `corpus.sources` to files, and from files to the pieces that are read one at a time."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from textmill.errors import TextmillError

Format = Literal["text", "jsonl"]
FORMATS: dict[str, Format] = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"}
EXTENSIONS = ", ".join(FORMATS)
PIECE = 64 << 20
"""Bytes of a file of lines that are read at a time; the output's shards follow it, whatever the number of workers."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file to read."""

    name: str
    """As the user named it."""
    path: Path
    format: Format


@dataclass(frozen=True)
class Piece:
    """A stretch of one source: the whole file, or whole lines of it."""

    number: int
    source: Source
    start: int
    stop: int
    first: int = 1
    """The number of its first line."""

    def __repr__(self) -> str:
        return f"{self.source.name} (bytes {self.start:,} to {self.stop:,})"


def find_sources(words: Sequence[str], skip: Iterable[Path] = ()) -> list[Source]:
    """Every file that the words name, each once, sorted by name; folders in `skip` (our own output) are not looked into."""
    if not words:
        raise TextmillError(
            f"corpus.sources: nothing there; name files, globs or folders of {EXTENSIONS}, "
            f"or a corpus that comes with textmill: {', '.join(shipped())}"
        )
    skipped = [os.path.realpath(folder) for folder in skip]
    found: dict[str, Source] = {}
    for word in words:
        sources = sorted(_files_of(word, skipped), key=lambda source: source.name)
        if not sources:
            raise TextmillError(f"corpus.sources: no file to read in '{word}'; textmill reads {EXTENSIONS}")
        for source in sources:
            real = os.path.realpath(source.path)
            if real not in found or source.name < found[real].name:
                found[real] = source
    return sorted(found.values(), key=lambda source: source.name)


def shipped() -> dict[str, Path]:
    """The corpora that come with textmill, by name."""
    folder = Path(str(resources.files("textmill"))) / "corpora"
    return {path.stem: path for path in sorted(folder.glob("*.txt"))}


def names_wherever(sources: Sequence[Source]) -> list[str]:
    """Names that stay the same when the whole project, or the user, stands in another folder."""
    ours = set(shipped().values())
    full = {source: os.path.abspath(source.path) for source in sources if source.path not in ours}
    common = os.path.commonpath([os.path.dirname(path) for path in full.values()]) if full else ""
    return [os.path.relpath(full[source], common) if source in full else source.name for source in sources]


def pieces_of(sources: Sequence[Source], documents: str) -> list[Piece]:
    """All pieces in canonical order; only where a record is a line may a file be cut."""
    pieces: list[Piece] = []
    for source in sources:
        size = source.path.stat().st_size
        by_line = source.format == "jsonl" or documents == "line"
        for start, stop, first in _line_ranges(source.path, size) if by_line else [(0, size, 1)]:
            pieces.append(Piece(len(pieces), source, start, stop, first))
    return pieces


def _files_of(word: str, skipped: list[str]) -> Iterator[Source]:
    path = os.path.expanduser(word)
    if os.path.isdir(path):
        yield from _files_in(path, skipped)
    elif os.path.exists(path):
        yield _source(path)
    elif glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
        if not matches:
            raise TextmillError(f"corpus.sources: nothing matches '{word}'; check the pattern ('**' reaches folders below)")
        yield from (_source(match) for match in matches if os.path.isfile(match) and not _inside(match, skipped))
    elif word in shipped():
        yield Source(word, shipped()[word], "text")
    else:
        names = list(shipped())
        near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
        advice = f"did you mean '{near[0]}'?" if near else f"the corpora that come with textmill: {', '.join(names)}"
        raise TextmillError(f"corpus.sources: no file, folder or corpus '{word}'; {advice}")


def _files_in(folder: str, skipped: list[str]) -> Iterator[Source]:
    for place, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and not _inside(os.path.join(place, name), skipped)]
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in FORMATS:
                yield _source(os.path.join(place, name))


def _inside(path: str, folders: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def _source(path: str) -> Source:
    name = os.path.normpath(path)
    extension = os.path.splitext(name)[1].lower()
    if extension not in FORMATS:
        raise TextmillError(f"{name}: cannot read '{extension or 'a file without extension'}'; textmill reads {EXTENSIONS}")
    if not os.access(name, os.R_OK):
        raise TextmillError(f"{name}: not readable; change its permissions or take it out of corpus.sources")
    return Source(name, Path(name), FORMATS[extension])


def _line_ranges(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut a file of lines about every PIECE bytes, at a line's end: (start, stop, number of its first line)."""
    if size <= PIECE:
        yield 0, size, 1
        return
    with open(path, "rb") as stream:
        start, first = 0, 1
        while start < size:
            lines = 0
            while stream.tell() < min(start + PIECE, size) and (block := stream.read(min(BLOCK, start + PIECE - stream.tell()))):
                lines += block.count(b"\n")
            while (rest := stream.readline(BLOCK)) and not rest.endswith(b"\n"):
                pass
            stop = min(stream.tell(), size)
            if stop <= start:
                return
            yield start, stop, first
            start, first = stop, first + lines + rest.endswith(b"\n")
