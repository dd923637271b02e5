"""From the words of `corpus.sources` to files, and from files to the pieces that are read one at a time."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from textmill.corpus.named_corpora import Named, open_corpora
from textmill.corpus.source import EXTENSIONS, Piece, Range, Source, format_named
from textmill.corpus.streams import is_plain, is_remote
from textmill.errors import TextmillError

PIECE = 64 << 20
"""Bytes of a file of lines that are read at a time; the output's shards follow it, whatever the number of workers."""
BLOCK = 1 << 20


def find_sources(
    words: Sequence[str], skip: Iterable[Path] = (), corpora: str | None = None, raw: bool = False
) -> list[Source]:
    """Every file that the words name, each once, sorted by name; folders in `skip` (our own output) are not looked into.

    `corpora` is a file of named corpora; `raw`: read MongoDB's documents as they were before any cleaning."""
    if not words:
        raise TextmillError(
            f"corpus.sources: nothing there; name files, globs or folders of {EXTENSIONS}, "
            f"or a corpus that comes with textmill: {', '.join(shipped())}"
        )
    skipped, named = [os.path.realpath(folder) for folder in skip], open_corpora(corpora)
    found: dict[str, Source] = {}
    for word in words:
        sources = sorted(_named_sources(word, skipped, named), key=lambda source: source.name)
        if not sources:
            raise TextmillError(f"corpus.sources: no file to read in '{word}'; textmill reads {EXTENSIONS}")
        for source in sources:
            source = replace(source, raw=raw and source.format == "mongo")
            real = source.address if is_remote(source.address) else os.path.realpath(source.address)
            other = found.get(real, source)
            if source.text_key != other.text_key:
                raise TextmillError(
                    f"{source.name}: named twice, with the text in '{source.text_key}' and in '{other.text_key}'; take one out"
                )
            found[real] = min(source, other, key=lambda one: one.name)
    return sorted(found.values(), key=lambda source: source.name)


def shipped() -> dict[str, Path]:
    """The corpora that come with textmill, by name."""
    folder = Path(str(resources.files("textmill"))) / "corpora"
    return {path.stem: path for path in sorted(folder.glob("*.txt"))}


def names_wherever(sources: Sequence[Source]) -> list[str]:
    """Names that stay the same when the whole project, or the user, stands in another folder."""
    full = {
        source: os.path.abspath(source.path)
        for source in sources
        if source.name == source.address and not is_remote(source.address)
    }
    common = os.path.commonpath([os.path.dirname(path) for path in full.values()]) if full else ""
    return [os.path.relpath(full[source], common) if source in full else source.name for source in sources]


def format_of(source: Source) -> Any:
    """The module that reads a source's format."""
    return import_module(f"textmill.corpus.formats.{source.format}")


@dataclass(frozen=True)
class State:
    """What tells that a source has changed; a `mark` stands in for the checksum of what is not on this machine."""

    bytes: int
    mtime_ns: int
    mark: str | None


def state_of(source: Source) -> State:
    """A file's length and time; a URL's size and ETag or date; a Mongo index's positions and a mark of some documents."""
    if source.format == "mongo":
        size, mark = format_of(source).state_of(source)
        return State(size, 0, mark)
    if is_remote(source.address):
        size, mark = import_module("textmill.corpus.remote_files").state_of(source.address)
        return State(size, 0, mark)
    state = source.path.stat()
    return State(state.st_size, state.st_mtime_ns, None)


def pieces_of(sources: Sequence[Source], documents: str) -> list[Piece]:
    """All pieces in canonical order; where a format cannot be cut, a piece is a whole file."""
    pieces: list[Piece] = []
    for source in sources:
        cut = getattr(format_of(source), "ranges", None)
        found = cut(source, documents) if cut else None
        ranges = list(found) if found is not None else [(0, state_of(source).bytes, 1)]
        for start, stop, first in ranges:
            pieces.append(Piece(len(pieces), source, start, stop, first, whole=len(ranges) == 1))
    return pieces


def _named_sources(word: str, skipped: list[str], named: dict[str, Named]) -> Iterator[Source]:
    if word not in named:
        yield from _files_of(word, skipped, list(named))
        return
    for inner in named[word].sources:
        for source in _files_of(inner, skipped, []):
            yield replace(source, text_key=named[word].text_key)


def _files_of(word: str, skipped: list[str], named: list[str]) -> Iterable[Source]:
    if word.startswith("mongo:"):
        return import_module("textmill.corpus.formats.mongo").sources_of(word)  # type: ignore[no-any-return]
    if word.startswith("hf:"):
        return import_module("textmill.corpus.hf_datasets").sources_of(word)  # type: ignore[no-any-return]
    if is_remote(word) and not word.startswith("file://"):
        return import_module("textmill.corpus.remote_files").sources_of(word)  # type: ignore[no-any-return]
    path = os.path.expanduser(word.removeprefix("file://"))
    if os.path.isdir(path):
        return _files_in(path, skipped)
    if os.path.exists(path):
        return [_source(path)]
    if glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
        if not matches:
            raise TextmillError(
                f"corpus.sources: nothing matches '{word}'; check the pattern ('**' reaches folders below)"
            )
        return [_source(match) for match in matches if os.path.isfile(match) and not _inside(match, skipped)]
    if word in shipped():
        return [Source(word, str(shipped()[word]), "text")]
    names = [*named, *shipped()]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    own = f"your corpora: {', '.join(named)}; " if named else ""
    advice = (
        f"did you mean '{near[0]}'?" if near else f"{own}the corpora that come with textmill: {', '.join(shipped())}"
    )
    raise TextmillError(f"corpus.sources: no file, folder or corpus '{word}'; {advice}")


def _files_in(folder: str, skipped: list[str]) -> Iterator[Source]:
    for place, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _inside(os.path.join(place, name), skipped)
        ]
        saved = (
            "state.json" in files and "dataset_info.json" in files
        )  # by the datasets library: its JSON files hold no text
        for name in files:
            found = format_named(name)
            if found and not name.startswith(".") and (found == "arrow" if saved else name != "dataset_dict.json"):
                yield _source(os.path.join(place, name))


def _inside(path: str, folders: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def _source(path: str) -> Source:
    name = os.path.normpath(path)
    if (found := format_named(name)) is None:
        extension = os.path.splitext(name)[1].lower()
        raise TextmillError(
            f"{name}: cannot read '{extension or 'a file without extension'}'; textmill reads {EXTENSIONS}"
        )
    if not os.access(name, os.R_OK):
        raise TextmillError(f"{name}: not readable; change its permissions or take it out of corpus.sources")
    return Source(name, name, found)


def line_ranges(source: Source) -> Iterator[Range] | None:
    """Whole lines, about PIECE bytes each; None: the file can only be read from its beginning."""
    return _line_ranges(source.path, source.path.stat().st_size) if is_plain(source.address) else None


def _line_ranges(path: Path, size: int) -> Iterator[Range]:
    """Cut a file of lines about every PIECE bytes, at a line's end: (start, stop, number of its first line)."""
    if size <= PIECE:
        yield 0, size, 1
        return
    with open(path, "rb") as stream:
        start, first = 0, 1
        while start < size:
            lines = 0
            while stream.tell() < min(start + PIECE, size) and (
                block := stream.read(min(BLOCK, start + PIECE - stream.tell()))
            ):
                lines += block.count(b"\n")
            while (rest := stream.readline(BLOCK)) and not rest.endswith(b"\n"):
                pass
            stop = min(stream.tell(), size)
            if stop <= start:
                return
            yield start, stop, first
            start, first = stop, first + lines + rest.endswith(b"\n")
