"""Find the sources that `corpus.sources` names, split them into chunks, and read the records of a chunk.

An entry is a file, a folder, a pattern, an archive, a URL, `hf:NAME`, `mongo:FILE` or a bundled corpus, or a name for
several of them. Files are read by the module of their format in formats/.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module, resources
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from textmill.config import CorpusConfig, NamedSource
from textmill.corpus.accounts import format_count
from textmill.corpus.archives import find_members, member_state
from textmill.corpus.document import Document, SectionLimits, cut_into_sections, limits_of
from textmill.corpus.document_files import describe_unread_documents, format_from_content, read_document
from textmill.corpus.records import BadRecord, chunk_bytes_of
from textmill.corpus.source import (
    EXTENSIONS,
    PACKAGES_ADVICE,
    Source,
    SourceChunk,
    archive_kind,
    format_from_name,
    missing_package,
)
from textmill.corpus.split import SECTION
from textmill.corpus.streams import BrokenStream, is_plain_utf8, remote_state
from textmill.counters import uniform_from
from textmill.errors import TextmillError
from textmill.storage.files import format_path
from textmill.storage.progress import progress
from textmill.storage.remote_folders import ADVICE, first_line, is_url, open_filesystem

OWN_FILES = ("manifest.json", "made_from.json", "run.yaml", "metrics.jsonl", "trials.json", "trial-01.log")
"""Files by which a folder that textmill wrote is recognised."""
CARD_BYTES = 1 << 16
"""The beginning of a README.md that shows whether it is the card of a dataset."""
FILE_BYTES = 512
"""Opening a file takes as long as reading about so many bytes more."""
HUB_SECONDS = 5.0
"""Time for a connection to the Hugging Face hub."""
TRUE_VALUES = ("1", "ON", "YES", "TRUE")
"""Of the variable HF_HUB_OFFLINE."""
PIECE_BYTES = 1 << 16
MAX_PIECE_BYTES = 16 << 20
MAX_PIECES = 256
"""Size and number of the parts of a large file that are read for a sample of it; they are in memory."""
ROW_FORMATS = ("parquet", "mongo")
"""Formats of which any rows can be read."""
HUB_FORMATS = ("parquet", "jsonl", "csv")
"""Formats that are read as the package of the hub reads them, a record at a time."""
LINE_FORMATS = ("text", "jsonl", "csv")
"""Formats of which only a file that is longer than a chunk is split."""
PART_FORMATS = ("text", "jsonl", "csv", "arrow", "wiki", "mediawiki", "warc", "mail")
"""Formats whose beginning can be read without the rest."""
BAR_FILES = 256
"""Files found between two updates of the progress bar."""
SHOWN_SKIPPED = 5
"""Skipped files that are named for each reason, and scans."""
PATHS_OF_YAML = " (in a YAML file, paths are relative to that file)"
"""Ends an error about an absolute path, which may have been a relative one in a config of a project that was moved."""


def find_sources(
    entries: Sequence[str | NamedSource],
    skip: Iterable[Path] = (),
    encoding: str = "auto",
    skipped: list[str] | None = None,
    setting: str = "corpus.sources",
) -> list[Source]:
    """All sources that the entries name, each once, sorted by name.

    `skip`: folders that are not searched, such as textmill's own output.
    `encoding`: of the files, from `corpus.encoding`. `skipped`: gets the files of folders and archives that cannot be
    read. `setting`: where the user gave the entries, for messages.
    """
    if not entries:
        raise TextmillError(
            f"{setting} is empty; give files, globs or folders of {EXTENSIONS}, "
            f"or a bundled corpus: {', '.join(bundled_corpora())}"
        )
    skipped_folders = tuple(f"{os.path.realpath(folder)}/" for folder in skip)
    skipped_files = [] if skipped is None else skipped
    search = _Search(setting, skipped_folders, skipped_files)
    by_path: dict[str, Source] = {}
    with progress("find files", unit="files", is_short=True) as bar:
        for entry in entries:
            for number, (real_path, source) in enumerate(search.find(entry), 1):
                if number % BAR_FILES == 0:
                    bar.advance(BAR_FILES)
                if encoding != "auto":
                    source = source._replace(encoding=encoding)
                earlier = by_path.setdefault(real_path, source)
                if earlier is source:
                    continue
                if source.text_key != earlier.text_key:
                    raise TextmillError(
                        f"{source.name}: listed twice, with text_key '{source.text_key}' and '{earlier.text_key}'; "
                        f"remove one"
                    )
                if source.group != earlier.group:
                    raise TextmillError(
                        f"{source.name}: is in the sources '{source.group}' and '{earlier.group}' of {setting}; "
                        "leave it out of one of them"
                    )
                by_path[real_path] = min(source, earlier, key=lambda candidate: candidate.name)
    return sorted(by_path.values(), key=lambda source: reading_order(source, source.name))


def reading_order(source: Source, name: str) -> tuple[str, str, int]:
    """The order in which sources are read: by the name of their group, by their own, and inside a tar archive as they
    stand in it."""
    if not source.address.startswith("tar://"):
        return source.group, name, 0
    member = source.address.partition("://")[2].rpartition("::")[0]
    # A portable name may lack the archive, if everything is in it.
    return source.group, name.removesuffix(member) if name.endswith(member) else "", source.position


def _real_path(path: str) -> str:
    """The path of a file without links; most files of a folder are none, so its own path is looked up once."""
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, _, name = path.rpartition("/")
    if path.startswith("/"):
        return f"{_real_folder(folder)}/{name}"
    return f"{_real_folder(f'{os.getcwd()}/{folder}')}/{name}"


@lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


FoundSource = tuple[str, Source]
"""A source and its real path, or its address if it is no local file: entries that name it twice are found by it."""


@dataclass(frozen=True)
class _Search:
    """The search for the sources of some entries."""

    setting: str
    """Where the user gave the entries: `corpus.sources`, another setting, or an option of the command line."""
    skipped_folders: tuple[str, ...]
    """Real paths, each with a slash at its end."""
    skipped_files: list[str]
    """Gets the files of folders and archives that cannot be read."""

    def find(self, entry: str | NamedSource) -> Iterator[FoundSource]:
        """The sources of an entry."""
        if isinstance(entry, str):
            yield from self._find(entry)
            return
        for path in entry.path:
            for real_path, source in self._find(path, entry.is_sampled):
                named = source._replace(text_key=entry.text_key, group=entry.name, is_sampled=entry.is_sampled)
                yield real_path, named

    def _find(self, entry: str, is_sampled: bool = False) -> Iterator[FoundSource]:
        is_empty = True
        for found in self._find_local(entry) or (
            (source.address, source) for source in self._find_elsewhere(entry, is_sampled)
        ):
            is_empty = False
            yield found
        if is_empty:
            if (unread := describe_unread_documents(self.skipped_files)) is not None:
                raise TextmillError(f"{self.setting}: {unread}")
            raise TextmillError(f"{self.setting}: no file to read in '{entry}'; textmill reads {EXTENSIONS}")

    def _find_local(self, entry: str) -> Iterator[FoundSource] | None:
        """The sources of a file, a folder or a pattern; None if the entry is none of them."""
        if entry.startswith(("mongo:", "hf:")) or (is_url(entry) and not entry.startswith("file://")):
            return None
        path = os.path.expanduser(entry.removeprefix("file://"))
        if os.path.isdir(path):
            return self._walk_folder(path)
        if os.path.exists(path):
            return self._file_sources(path, _real_path(path))
        return self._match_pattern(entry, path) if glob.has_magic(path) else None

    def _find_elsewhere(self, entry: str, is_sampled: bool) -> Iterable[Source]:
        """The sources of a database, a dataset, a URL or a bundled corpus."""
        if entry.startswith("mongo:"):
            from textmill.corpus.formats import mongo  # needs pymongo

            return mongo.find(entry)
        if entry.startswith("hf:"):
            return _find_hf_sources(entry, self.setting, is_sampled)
        if is_url(entry):
            return _find_remote_sources(entry, self.setting, self.skipped_files)
        if entry in bundled_corpora():
            return [Source(entry, str(bundled_corpora()[entry]), "text")]
        raise TextmillError(f"{self.setting}: no file, folder or corpus '{entry}'; {self._advise(entry)}")

    def _match_pattern(self, entry: str, path: str) -> Iterator[FoundSource]:
        matches = glob.glob(path, recursive=True)
        if not matches:
            advice = f"check the pattern ('**' matches subfolders){self._describe_base(entry)}"
            raise TextmillError(f"{self.setting}: nothing matches '{entry}'; {advice}")
        for match in matches:
            real_path = _real_path(match)
            if os.path.isfile(match):
                if not self._is_skipped(real_path):
                    yield from self._file_sources(match, real_path)
            elif is_dangling(match):
                self.skipped_files.append(os.path.normpath(match))

    def _advise(self, entry: str) -> str:
        """What to do about an entry that names nothing."""
        if close_matches := difflib.get_close_matches(entry, bundled_corpora(), n=1, cutoff=0.5):
            return f"did you mean '{close_matches[0]}'?"
        return f"check the path{self._describe_base(entry)}; the bundled corpora: {', '.join(bundled_corpora())}"

    def _describe_base(self, entry: str) -> str:
        """A hint for an entry of a YAML file, whose path has become absolute."""
        return PATHS_OF_YAML if os.path.isabs(entry) and not self.setting.startswith("--") else ""

    def _walk_folder(self, folder: str) -> Iterator[FoundSource]:
        """The sources in a folder; folders behind links come last, and each folder is read once."""
        read: set[tuple[int, int]] = set()
        folders_to_read = [folder]
        linked: deque[str] = deque()
        while folders_to_read or linked:
            folder_path = folders_to_read.pop() if folders_to_read else linked.popleft()
            state = os.stat(folder_path)
            if (state.st_dev, state.st_ino) in read:  # a link to a folder around it, or a second link
                continue
            read.add((state.st_dev, state.st_ino))
            folders: list[tuple[str, bool]] = []
            files: list[tuple[str, bool]] = []
            try:
                with os.scandir(folder_path) as entries:
                    for entry in entries:
                        (folders if entry.is_dir() else files).append((entry.name, entry.is_symlink()))
            except PermissionError:
                self.skipped_files.append(os.path.normpath(folder_path))
                continue
            is_own = _is_written_by_textmill(folder_path, {name for name, _ in files})
            if is_own and folder_path != folder:
                continue
            yield from self._read_folder(folder_path, files, OWN_FILES if is_own else ())
            paths = [(os.path.join(folder_path, name), is_link) for name, is_link in sorted(folders) if name[0] != "."]
            kept = [(path, is_link) for path, is_link in paths if not self._is_skipped(_real_path(path))]
            linked += [path for path, is_link in kept if is_link]
            folders_to_read += [path for path, is_link in reversed(kept) if not is_link]

    def _read_folder(
        self, folder: str, files: list[tuple[str, bool]], own_files: Sequence[str]
    ) -> Iterator[FoundSource]:
        """The sources of the files that are directly in a folder, each with whether it is a link; there may be a
        million, so nothing is looked up that the listing has. `own_files`: those of an exported dataset."""
        # The JSON files of a folder that the datasets library saved hold no text.
        is_saved_dataset = {("state.json", False), ("dataset_info.json", False)} <= set(files)
        prefix = os.path.join(os.path.normpath(folder), "").removeprefix("./")
        real_folder = os.path.realpath(folder).removesuffix("/")
        for name, is_link in sorted(files):
            path = prefix + name
            file_format = format_from_name(name)
            if name.startswith(".") or name == "dataset_dict.json" or (is_saved_dataset and file_format != "arrow"):
                continue
            if name in own_files or (name == "README.md" and _is_dataset_card(path)):
                continue
            if is_link and is_dangling(path):
                self.skipped_files.append(path)
                continue
            real_path = os.path.realpath(path) if is_link else f"{real_folder}/{name}"
            if not file_format and archive_kind(name):
                yield from self._file_sources(path, real_path)
                continue
            if not file_format:
                file_format = format_from_content(path)
            if file_format and not missing_package(file_format):
                yield real_path, Source(path, path, file_format)
            else:
                self.skipped_files.append(path)

    def _file_sources(self, path: str, real_path: str) -> Iterator[FoundSource]:
        """The source of a file, or those of an archive."""
        if archive_kind(path) and os.access(path, os.R_OK):
            yield from ((source.address, source) for source in find_members(path, self.skipped_files))
            return
        name = os.path.normpath(path)
        file_format = format_from_name(name) or format_from_content(name)
        if file_format is not None and (missing := missing_package(file_format)):
            raise TextmillError(f"{name}: needs the package {missing}; run: {PACKAGES_ADVICE}")
        if file_format is None:
            extension = os.path.splitext(name)[1].lower()
            what = f"'{extension}'" if extension else "a file without an extension"
            raise TextmillError(f"{name}: cannot read {what}; textmill reads {EXTENSIONS}")
        if not os.access(name, os.R_OK):
            raise TextmillError(f"{name}: not readable; change its permissions or remove it from {self.setting}")
        yield real_path, Source(name, name, file_format)

    def _is_skipped(self, real_path: str) -> bool:
        return f"{real_path}/".startswith(self.skipped_folders)


def is_dangling(path: str) -> bool:
    """True for a link to a file that does not exist."""
    return os.path.islink(path) and not os.path.exists(path)


def describe_skipped(skipped: Sequence[str]) -> list[str]:
    """For each reason why files were not read, a line with their number and the first of them."""
    lines = []
    for reason, paths in group_skipped(skipped).items():
        files = "1 file has" if len(paths) == 1 else f"{len(paths):,} files have"
        lines.append(f"{files} {reason} and will be skipped: {_name_first(paths)}")
    return lines


def group_skipped(skipped: Sequence[str]) -> dict[str, list[str]]:
    """The files that were not read, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for path in skipped:
        by_reason.setdefault(_skip_reason(path), []).append(path)
    return dict(sorted(by_reason.items()))


def describe_scans(scans: Sequence[str]) -> str:
    """The number of scanned documents, and the first of them."""
    return f"{format_count(len(scans), 'scan')} without a text layer: {_name_first(scans)}; recognise the text (OCR)"


def _name_first(paths: Sequence[str]) -> str:
    first = ", ".join(map(format_path, map(Path, paths[:SHOWN_SKIPPED])))
    return first + (f" and {len(paths) - SHOWN_SKIPPED:,} more" if len(paths) > SHOWN_SKIPPED else "")


def _skip_reason(path: str) -> str:
    if is_dangling(path):
        return "a link to nothing"
    if os.path.isdir(path):
        return "permissions that forbid reading it"
    if missing_package(format_from_name(path)):
        return f"a format that needs {PACKAGES_ADVICE}"
    return "no format that textmill reads"


def bundled_corpora() -> dict[str, Path]:
    """The corpora that are shipped with textmill, by name."""
    folder = Path(str(resources.files("textmill"))) / "corpora"
    return {path.stem: path for path in sorted(folder.glob("*.txt"))}


def _is_dataset_card(path: str) -> bool:
    """Whether a README.md describes a dataset of the Hugging Face hub: its head names the files of the splits."""
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(CARD_BYTES).partition(b"\n---")[0]
        return head.startswith(b"---") and re.search(rb"^(?:configs|dataset_info):", head, re.MULTILINE) is not None
    return False


def _is_written_by_textmill(folder: str, files: Set[str]) -> bool:
    """Whether a folder with these files is a stage, a run, trials or an exported model of any project: it has no text
    of the user."""
    if "manifest.json" in files:
        with suppress(OSError), open(os.path.join(folder, "manifest.json"), "rb") as file:
            return b'"verb"' in file.read(40)
    is_unfinished = folder.endswith(".part") and "made_from.json" in files
    return is_unfinished or {"run.yaml", "metrics.jsonl"} <= files or {"trials.json", "trial-01.log"} <= files


def _find_hf_sources(entry: str, setting: str, is_sampled: bool) -> Iterator[Source]:
    """Download `hf:NAME[:CONFIG][:SPLIT]`, all splits if none is given: the Arrow files of its cache. For a sample the
    files on the hub, if parts of them can be read."""
    name, _, rest = entry.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    where = f"{setting}: '{entry}'"
    if not name or not re.fullmatch(r"[\w.-]*", split):
        raise TextmillError(
            f"{where} is not valid; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (a split without slicing)"
        )
    if find_spec("datasets") is None:
        raise TextmillError(f"{where} needs datasets; run: pip install 'textmill[hf]'")
    unreachable = None if os.path.exists(name) else _hub_unreachable()
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each of its retries; the error says enough
    files: dict[str, list[str]] = {}
    try:
        if is_sampled:
            builder = datasets.load_dataset_builder(name, config or None)
            files = {str(one): list(paths) for one, paths in (builder.config.data_files or {}).items()}
            files = {one: paths for one, paths in files.items() if split in ("", one)}
        if not files or any(format_from_name(path) not in HUB_FORMATS for path in chain(*files.values())):
            found = datasets.load_dataset(name, config or None, split=split or None)
            loaded = {split: found} if split else dict(found)
            files = {one: [file["filename"] for file in dataset.cache_files] for one, dataset in loaded.items()}
    except Exception as error:  # offline, unknown, gated, a script: each raises its own exception
        reason = unreachable or first_line(error)
        raise TextmillError(f"{where}: download failed ({reason}); check the name, config, split and network") from None
    for split_name, paths in sorted(files.items()):
        for number, path in enumerate(paths):
            source_name = f"hf:{name}:{config}:{split_name}" + (f":{number}" if len(paths) > 1 else "")
            address = path if is_url(path) else os.path.abspath(path)
            yield Source(source_name, address, format_from_name(path) or "arrow")


def _hub_unreachable() -> str | None:
    """Why the hub, or the proxy before it, cannot be reached, if so; its package then uses its cache, instead of half a
    minute of retries."""
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE_VALUES or not url.hostname:
        return None
    try:
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), HUB_SECONDS).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the package is imported
        return f"{url.hostname} cannot be reached: {error.strerror or error}"
    return None


def _find_remote_sources(url: str, setting: str, skipped: list[str]) -> list[Source]:
    """The files at a URL, matching a URL pattern, or in the folder at a URL; those that cannot be read are added to
    `skipped`. `setting`: where the user gave the URL."""
    files, path = open_filesystem(url, f"{setting}: ")
    try:
        if any(character in path for character in "*["):  # in a URL a '?' starts the query
            found = files.glob(path)
        else:
            is_file = format_from_name(path.partition("?")[0])  # asking a web server for a folder downloads the file
            found = [path] if is_file or not files.isdir(path) else files.find(path)
        if found == [path]:
            files.info(path)
    except FileNotFoundError:
        found = []
    except Exception as error:  # each protocol raises its own exceptions
        raise TextmillError(f"{setting}: {url}: cannot be reached ({first_line(error)}); {ADVICE}") from None
    if not found:
        raise TextmillError(f"{setting}: nothing at '{url}'; check the address")
    sources = []
    for one in sorted(found):
        address = one if "://" in one else files.unstrip_protocol(one)
        if (file_format := format_from_name(one.partition("?")[0])) is not None:
            sources.append(Source(address, address, file_format))
        elif len(found) == 1:
            raise TextmillError(f"{url}: unknown format; textmill reads {EXTENSIONS}")
        else:
            skipped.append(address)
    return sources


def portable_names(sources: Sequence[Source]) -> list[str]:
    """Source names that do not depend on the current folder or on where the project is stored."""
    is_file = [
        source.in_archive or (source.name == source.address and not is_url(source.address)) for source in sources
    ]
    here = os.getcwd() if any(is_file) else ""
    # Names are normalised, so that joining is enough; there may be millions.
    full_paths = [
        os.path.join(here, source.name) if file else "" for source, file in zip(sources, is_file, strict=True)
    ]
    folders = {os.path.normpath(path.rpartition("/")[0]) for path in full_paths if path}
    common = os.path.commonpath(folders) if folders else ""

    @cache
    def relative(folder: str) -> str:
        return "" if (found := os.path.relpath(folder, common)) == "." else found + "/"

    return [
        relative(path.rpartition("/")[0]) + path.rpartition("/")[2] if path else source.name
        for source, path in zip(sources, full_paths, strict=True)
    ]


class SourceState(NamedTuple):
    """What shows whether a source has changed.

    A remote source has a fingerprint, which replaces the checksum of a local file.
    """

    bytes: int
    fingerprint: str | None
    mtime_ns: int = 0


def source_state(source: Source) -> SourceState:
    """The size and modification time of a file; the size and fingerprint of a remote source."""
    if source.snapshot is not None:
        return SourceState(*format_module(source).state(source))
    if source.in_archive:
        return SourceState(*member_state(source.address))
    if is_url(source.address):
        return SourceState(*remote_state(source.address))
    state = os.stat(source.address)
    date = f"mtime {state.st_mtime_ns}, {state.st_size} bytes" if source.is_sampled else None
    return SourceState(state.st_size, date, state.st_mtime_ns)


def format_module(source: Source) -> Any:
    """The module of textmill.corpus.formats that reads a source."""
    return _import_format(source.format)


@cache
def _import_format(name: str) -> Any:
    return import_module(f"textmill.corpus.formats.{name}")


def split_into_chunks(
    sources: Sequence[Source], document_unit: str, sizes: Sequence[int] | None = None, chunk_bytes: int | None = None
) -> list[SourceChunk]:
    """All chunks, in order; a source that cannot be split is one chunk. `sizes`: their bytes, if they are known."""
    sizes = [source_state(source).bytes for source in sources] if sizes is None else sizes
    chunk_bytes = chunk_bytes or chunk_bytes_of(sum(sizes))
    chunks: list[SourceChunk] = []
    for source, size in zip(sources, sizes, strict=True):
        is_small = size <= chunk_bytes and source.format in LINE_FORMATS
        find_ranges = None if is_small else getattr(format_module(source), "ranges", None)
        format_ranges = find_ranges(source, document_unit, chunk_bytes) if find_ranges else None
        # None: the format, or this file, cannot be split.
        ranges = [(0, size, 1)] if format_ranges is None else list(format_ranges)
        for start, stop, first_record in ranges:
            chunks.append(SourceChunk(source, start, stop, first_record, is_entire_source=len(ranges) == 1))
    return chunks


def sample_chunks(sources: Sequence[Source], sizes: Sequence[int], unit: str, share: float) -> list[SourceChunk]:
    """Chunks that have about a `share` of the bytes of sources, each time the same.

    Of a large file of lines they are at random places, of Parquet random row groups, of other large files the
    beginning; small files, and those that are one document, are read or not.
    """
    chunks: list[SourceChunk] = []
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        wanted = max(share * size, min(size, PIECE_BYTES))
        if source.format in ROW_FORMATS and (ranges := list(format_module(source).ranges(source, unit, 1) or ())):
            count = max(1, round(share * len(ranges)))
            spread = [int((place + uniform_from(number, place)) * len(ranges) / count) for place in range(count)]
            chosen = (ranges[place] for place in spread)
            chunks += [SourceChunk(source, start, stop, first, False) for start, stop, first in chosen]
        elif size <= wanted or source.format not in PART_FORMATS:
            if uniform_from(number, 0) < share:
                chunks.append(SourceChunk(source, 0, size))
        else:
            chunks += [
                SourceChunk(source._replace(part=part), 0, part[1] - part[0])
                for part in _parts_of(source, size, wanted, number)
            ]
    if not chunks and sources:  # all are small
        return [SourceChunk(sources[0], 0, sizes[0])]
    return chunks


def _parts_of(source: Source, size: int, wanted: float, seed: int) -> list[tuple[int, int]]:
    """The parts of a large file that are read, `wanted` bytes together: one in each of as many equal stretches."""
    if source.format not in ("text", "jsonl") or source.in_archive or not is_plain_utf8(source):
        return [(0, int(wanted))]
    count = max(1, min(int(wanted / PIECE_BYTES), MAX_PIECES), int(wanted / MAX_PIECE_BYTES))
    length = wanted / count
    starts = [int((place + uniform_from(seed, place)) * (size - length) / count) for place in range(count)]
    return [(start, min(size, int(start + length))) for start in starts]


def group_chunks(chunks: Sequence[SourceChunk], total: int) -> Iterator[Sequence[SourceChunk]]:
    """The chunks that one worker reads: a part of a source, or whole sources that follow each other until they are
    large enough, of one group; `total`: the bytes of all sources."""
    chunk_bytes = chunk_bytes_of(total)
    start = size = 0
    for number, chunk in enumerate(chunks):
        weight = chunk.stop - chunk.start + FILE_BYTES
        is_other = chunk.source.group != chunks[start].source.group
        if number > start and (is_other or not chunk.is_entire_source or size + weight > chunk_bytes):
            yield chunks[start:number]
            start = number
            size = 0
        size += weight if chunk.is_entire_source else chunk_bytes
    if chunks:
        yield chunks[start:]


def read_records(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """The records of a chunk, in order.

    A blank record is a document without text. If the stream is damaged, the last item is a bad record. With
    `corpus.cut_records` the text of each record is cut into sections, as plain text is when it is read.
    """
    place = ""
    try:
        read = getattr(format_module(chunk.source), "read", read_document)  # without: a document that is one text
        for record in read(chunk, config):
            if chunk.source.part and chunk.source.part[0]:
                record = _place_in_part(record, chunk.source.part[0])
            place = record.place if isinstance(record, BadRecord) else record.id
            if config.cut_records and isinstance(record, Document):
                yield from _cut_record(record, limits_of("section", config.section_chars))
            else:
                yield record
    except BrokenStream as error:
        if chunk.source.part:  # what follows is not read
            return
        where = f"after {place}" if place else "beginning"
        damage = chunk.source.damage or error.damage
        lost = damage.lost_bytes if damage else 0
        yield BadRecord(chunk.source.name, where, str(error), b"", lost, error.damage)


def _place_in_part(record: Document | BadRecord, start: int) -> Document | BadRecord:
    """A record of a part of a file: its lines are counted from there."""
    if isinstance(record, BadRecord):
        return replace(record, place=f"{record.place} after byte {start}")
    return replace(record, id=f"{record.id} after byte {start}")


def _cut_record(record: Document, limits: SectionLimits) -> Iterator[Document]:
    """The sections of a record; a short record is its only section."""
    sections = cut_into_sections(record.text, limits)
    if len(sections) < 2:
        yield record
        return
    for number, text in enumerate(sections, 1):
        yield replace(record, text=text, id=f"{record.id}{SECTION}{number}")
