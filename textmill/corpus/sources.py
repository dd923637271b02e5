"""Find the sources that `corpus.sources` names and split them into chunks."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from textmill.corpus.archives import find_members, member_state
from textmill.corpus.named_corpora import NamedCorpus, read_corpora_file
from textmill.corpus.source import EXTENSIONS, ChunkRange, Source, SourceChunk, archive_kind, format_from_name
from textmill.corpus.streams import is_remote, is_splittable
from textmill.errors import TextmillError

CHUNK_BYTES = 64 << 20
"""Size of a chunk of a line-based file. It decides where output shards end, so it does not depend on the workers."""
READ_BYTES = 1 << 20
OWN_FILES = ("manifest.json", "made_from.json", "run.yaml", "metrics.jsonl", "trials.json", "trial-01.log")
"""Files by which a folder that textmill wrote is recognised."""
PATHS_OF_YAML = " (in a YAML file, paths are relative to that file)"
"""Ends an error about an absolute path, which may have been a relative one in a config of a project that was moved."""


def find_sources(
    entries: Sequence[str],
    skip: Iterable[Path] = (),
    corpora: str | None = None,
    read_original: bool = False,
    encoding: str = "auto",
    skipped: list[str] | None = None,
    setting: str = "corpus.sources",
) -> list[Source]:
    """All sources that the entries name, each once, sorted by name.

    `skip`: folders that are not searched, such as textmill's own output. `corpora`: a file of named corpora.
    `read_original`: read the MongoDB text from before any cleaning.
    `encoding`: of the files, from `corpus.encoding`. `skipped`: gets the files of folders and archives that cannot be
    read. `setting`: where the user gave the entries, for messages.
    """
    if not entries:
        raise TextmillError(
            f"{setting} is empty; give files, globs or folders of {EXTENSIONS}, "
            f"or a bundled corpus: {', '.join(bundled_corpora())}"
        )
    skipped_folders = [os.path.realpath(folder) for folder in skip]
    skipped_files = [] if skipped is None else skipped
    search = _Search(setting, skipped_folders, read_corpora_file(corpora), skipped_files)
    by_path: dict[str, Source] = {}
    for entry in entries:
        for source in search.find(entry):
            source = replace(source, read_original=read_original and source.format == "mongo", encoding=encoding)
            real_path = source.address if is_remote(source.address) else os.path.realpath(source.address)
            earlier = by_path.get(real_path, source)
            if source.text_key != earlier.text_key:
                raise TextmillError(
                    f"{source.name}: listed twice, with text_key '{source.text_key}' and '{earlier.text_key}'; "
                    f"remove one"
                )
            by_path[real_path] = min(source, earlier, key=lambda candidate: candidate.name)
    return sorted(by_path.values(), key=lambda source: source.name)


def bundled_corpora() -> dict[str, Path]:
    """The corpora that are shipped with textmill, by name."""
    folder = Path(str(resources.files("textmill"))) / "corpora"
    return {path.stem: path for path in sorted(folder.glob("*.txt"))}


def portable_names(sources: Sequence[Source]) -> list[str]:
    """Source names that do not depend on the current folder or on where the project is stored."""
    full_paths = {
        source: os.path.abspath(source.name)
        for source in sources
        if source.in_archive or (source.name == source.address and not is_remote(source.address))
    }
    common = os.path.commonpath([os.path.dirname(path) for path in full_paths.values()]) if full_paths else ""
    return [os.path.relpath(full_paths[source], common) if source in full_paths else source.name for source in sources]


def format_module(source: Source) -> Any:
    """The module of textmill.corpus.formats that reads a source."""
    return import_module(f"textmill.corpus.formats.{source.format}")


@dataclass(frozen=True)
class SourceState:
    """What shows whether a source has changed.

    A remote source has a fingerprint, which replaces the checksum of a local file.
    """

    bytes: int
    mtime_ns: int
    fingerprint: str | None


def source_state(source: Source) -> SourceState:
    """The size and modification time of a file; the size and fingerprint of a remote source."""
    if source.format == "mongo":
        size, fingerprint = format_module(source).collection_state(source)
        return SourceState(size, 0, fingerprint)
    if source.in_archive:
        size, fingerprint = member_state(source.address)
        return SourceState(size, 0, fingerprint)
    if is_remote(source.address):
        size, fingerprint = import_module("textmill.corpus.remote_files").remote_state(source.address)
        return SourceState(size, 0, fingerprint)
    state = source.path.stat()
    return SourceState(state.st_size, state.st_mtime_ns, None)


def split_into_chunks(sources: Sequence[Source], document_unit: str) -> list[SourceChunk]:
    """All chunks, in order; a source that cannot be split is one chunk."""
    chunks: list[SourceChunk] = []
    for source in sources:
        find_ranges = getattr(format_module(source), "ranges", None)
        format_ranges = find_ranges(source, document_unit) if find_ranges else None
        if format_ranges is None:  # the format, or this file, cannot be split
            ranges = [(0, source_state(source).bytes, 1)]
        else:
            ranges = list(format_ranges)
        for start, stop, first_record in ranges:
            is_entire_source = len(ranges) == 1
            chunks.append(SourceChunk(len(chunks), source, start, stop, first_record, is_entire_source))
    return chunks


@dataclass(frozen=True)
class _Search:
    """The search for the sources of some entries."""

    setting: str
    """Where the user gave the entries: `corpus.sources`, another setting, or an option of the command line."""
    skipped_folders: list[str]
    corpora: dict[str, NamedCorpus]
    skipped_files: list[str]
    """Gets the files of folders and archives that cannot be read."""

    def find(self, entry: str) -> list[Source]:
        """The sources of an entry, sorted by name."""
        if entry in self.corpora:
            corpus = self.corpora[entry]
            inner = [source for one in corpus.sources for source in self._find_files(one, [])]
            found = [replace(source, text_key=corpus.text_key) for source in inner]
        else:
            found = list(self._find_files(entry, list(self.corpora)))
        if not found:
            raise TextmillError(f"{self.setting}: no file to read in '{entry}'; textmill reads {EXTENSIONS}")
        return sorted(found, key=lambda source: source.name)

    def _find_files(self, entry: str, corpora: list[str]) -> Iterable[Source]:
        """The sources of an entry that is not a named corpus; `corpora`: names that might be meant."""
        found: Iterable[Source]
        if entry.startswith("mongo:"):
            found = import_module("textmill.corpus.formats.mongo").find_mongo_sources(entry)
            return found
        if entry.startswith("hf:"):
            found = import_module("textmill.corpus.hf_datasets").find_hf_sources(entry, self.setting)
            return found
        if is_remote(entry) and not entry.startswith("file://"):
            remote_files = import_module("textmill.corpus.remote_files")
            found = remote_files.find_remote_sources(entry, self.setting, self.skipped_files)
            return found
        path = os.path.expanduser(entry.removeprefix("file://"))
        if os.path.isdir(path):
            return self._walk_folder(path)
        if os.path.exists(path):
            return self._file_sources(path)
        if glob.has_magic(path):
            matches = glob.glob(path, recursive=True)
            if not matches:
                advice = f"check the pattern ('**' matches subfolders){self._describe_base(entry)}"
                raise TextmillError(f"{self.setting}: nothing matches '{entry}'; {advice}")
            files = [match for match in matches if os.path.isfile(match) and not self._is_skipped(match)]
            return [source for file in files for source in self._file_sources(file)]
        if entry in bundled_corpora():
            return [Source(entry, str(bundled_corpora()[entry]), "text")]
        raise TextmillError(f"{self.setting}: no file, folder or corpus '{entry}'; {self._advise(entry, corpora)}")

    def _advise(self, entry: str, corpora: list[str]) -> str:
        """What to do about an entry that names nothing."""
        if close_matches := difflib.get_close_matches(entry, [*corpora, *bundled_corpora()], n=1, cutoff=0.5):
            return f"did you mean '{close_matches[0]}'?"
        yours = f"your corpora: {', '.join(corpora)}; " if corpora else ""
        bundled = f"the bundled corpora: {', '.join(bundled_corpora())}"
        return f"check the path{self._describe_base(entry)}; {yours}{bundled}"

    def _describe_base(self, entry: str) -> str:
        """A hint for an entry of a YAML file, whose path has become absolute."""
        return PATHS_OF_YAML if os.path.isabs(entry) and not self.setting.startswith("--") else ""

    def _walk_folder(self, folder: str) -> Iterator[Source]:
        for folder_path, folders, files in os.walk(folder, followlinks=False):
            paths = {name: os.path.join(folder_path, name) for name in folders if not name.startswith(".")}
            folders[:] = [
                name for name, path in paths.items() if not self._is_skipped(path) and not _is_written_by_textmill(path)
            ]
            # The JSON files of a folder that the datasets library saved hold no text.
            is_saved_dataset = "state.json" in files and "dataset_info.json" in files
            for name in sorted(files):
                file_format = format_from_name(name)
                path = os.path.join(folder_path, name)
                if name.startswith(".") or name == "dataset_dict.json" or (is_saved_dataset and file_format != "arrow"):
                    continue
                if file_format or archive_kind(name):
                    yield from self._file_sources(path)
                else:
                    self.skipped_files.append(os.path.normpath(path))

    def _file_sources(self, path: str) -> Iterable[Source]:
        """The source of a file, or those of an archive."""
        if archive_kind(path) and os.access(path, os.R_OK):
            return find_members(path, self.skipped_files)
        name = os.path.normpath(path)
        file_format = format_from_name(name)
        if file_format is None:
            extension = os.path.splitext(name)[1].lower()
            what = f"'{extension}'" if extension else "a file without an extension"
            raise TextmillError(f"{name}: cannot read {what}; textmill reads {EXTENSIONS}")
        if not os.access(name, os.R_OK):
            raise TextmillError(f"{name}: not readable; change its permissions or remove it from {self.setting}")
        return [Source(name, name, file_format)]

    def _is_skipped(self, path: str) -> bool:
        real = os.path.realpath(path)
        return any(real == folder or real.startswith(folder + os.sep) for folder in self.skipped_folders)


def _is_written_by_textmill(folder: str) -> bool:
    """Whether a folder is a stage, a run, trials or an exported model of any project: it has no text of the user."""
    has = {name for name in OWN_FILES if os.path.isfile(os.path.join(folder, name))}
    if "manifest.json" in has:
        with suppress(OSError), open(os.path.join(folder, "manifest.json"), "rb") as file:
            return b'"verb"' in file.read(40)
    is_unfinished = folder.endswith(".part") and "made_from.json" in has
    return is_unfinished or {"run.yaml", "metrics.jsonl"} <= has or {"trials.json", "trial-01.log"} <= has


def line_ranges(source: Source) -> Iterator[ChunkRange] | None:
    """Ranges of complete lines, about CHUNK_BYTES each; None if the file cannot be split."""
    return _line_ranges(source.path, source.path.stat().st_size) if is_splittable(source) else None


def _line_ranges(path: Path, size: int) -> Iterator[ChunkRange]:
    """Yield (start, stop, number of the first line), cut at the first line end after CHUNK_BYTES bytes."""
    if size <= CHUNK_BYTES:
        yield 0, size, 1
        return
    with open(path, "rb") as stream:
        start = 0
        first = 1
        while start < size:
            lines = 0
            while stream.tell() < min(start + CHUNK_BYTES, size) and (
                block := stream.read(min(READ_BYTES, start + CHUNK_BYTES - stream.tell()))
            ):
                lines += block.count(b"\n")
            while (rest := stream.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                pass
            stop = min(stream.tell(), size)
            if stop <= start:
                return
            yield start, stop, first
            start = stop
            first = first + lines + rest.endswith(b"\n")
