"""The sources as they are when the command starts: their states and checksums, which show later whether they changed.

Each source is recorded by itself, in the manifest and in account.json. If there are many, a folder of them is one
entry, such as `texts/a/*`: a million files make no manifest of a million lines.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.corpus.find_sources import SourceState, portable_names, reading_order, source_state
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.storage.files import hash_file
from textmill.storage.progress import progress

MAX_ENTRIES = 1000
"""Most sources that are recorded each by itself."""
BATCH_FILES = 256
"""Files that a thread hashes at a time."""


@dataclass(frozen=True)
class Inputs:
    """The sources in the order of their portable names, with their states at the start of the command."""

    sources: list[Source]
    names: list[str]
    """The portable names: they do not depend on the current folder."""
    entries: list[str]
    """For each source the portable name of its entry: its own, or that of a folder."""
    states: list[SourceState]
    checksums: dict[str, dict[str, Any]]
    """By entry: the bytes, and the SHA-256 of a local file or the fingerprint of a remote one; of a folder, the number
    of its files and a hash of theirs."""
    mtimes: dict[str, int | str]
    """By entry: the modification time of a local file; of a folder, a hash of those of its files."""

    @property
    def accounts(self) -> list[str]:
        """For each source its entry in account.json, which names it as the user does."""
        labels: dict[str, str] = {}
        for source, name, entry in zip(self.sources, self.names, self.entries, strict=True):
            if entry not in labels:
                inner = name.removeprefix(entry.removesuffix("*"))
                labels[entry] = source.name if entry == name else source.name.removesuffix(inner) + "*"
        return [labels[entry] for entry in self.entries]

    def describe(self) -> dict[str, Any]:
        """The checksums, and the fields with the text that named corpora set: what decides the result."""
        keys = {f"{entry}.text_key": source.text_key for entry, source in zip(self.entries, self.sources, strict=True)}
        return self.checksums | {name: key for name, key in keys.items() if key}

    def check_unchanged(self) -> None:
        """Refuse a result if a source changed while it was read."""
        for source, before in zip(self.sources, self.states, strict=True):
            if source_state(source) != before:
                raise TextmillError(
                    f"{source.name}: changed while it was read; run prepare again when nothing writes to it"
                )


def inspect_inputs(found: Sequence[Source], manifest: dict[str, Any]) -> Inputs:
    """Size, modification time and checksum of each source; a checksum is taken from an earlier manifest where size and
    modification time are unchanged."""
    # Sorted by the portable name, so that an interrupted run can be resumed from another folder.
    ordered = sorted(zip(portable_names(found), found, strict=True), key=lambda item: reading_order(item[1], item[0]))
    names = [name for name, _ in ordered]
    sources = [source for _, source in ordered]
    entries = name_entries(names)
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        numbers.setdefault(entry, []).append(number)
    states: list[SourceState] = []
    with progress("check files", total=len(sources), unit="files", is_short=True) as bar:
        for start in range(0, len(sources), BATCH_FILES):
            states += map(source_state, sources[start : start + BATCH_FILES])
            bar.advance(BATCH_FILES)
    are_folders = len(names) > MAX_ENTRIES
    mtimes: dict[str, int | str] = {}
    checksums: dict[str, dict[str, Any]] = {}
    new: list[int] = []
    for entry, members in numbers.items():
        checksums[entry] = {"bytes": sum(states[number].bytes for number in members)}
        if are_folders:
            checksums[entry]["files"] = len(members)
            mtimes[entry] = _hash_lines(
                f"{names[number]} {states[number].bytes} {states[number].fingerprint or states[number].mtime_ns}"
                for number in members
            )
        else:
            mtimes[entry] = states[members[0]].mtime_ns
        recorded = manifest.get("made_from", {}).get(f"inputs.{entry}", {})
        is_dated = are_folders or states[members[0]].fingerprint is None
        is_same_size = checksums[entry] == {name: recorded.get(name) for name in checksums[entry]}
        if is_dated and is_same_size and manifest["mtimes"].get(entry) == mtimes[entry]:
            checksums[entry]["sha256"] = recorded["sha256"]
        else:
            new += members
    hashes = _hash_sources([sources[number] for number in new], [states[number] for number in new])
    for entry, group in itertools.groupby(zip(new, hashes, strict=True), key=lambda item: entries[item[0]]):
        if are_folders:
            checksums[entry]["sha256"] = _hash_lines(
                f"{names[number]} {sources[number].text_key} {found_hash}" for number, found_hash in group
            )
        else:
            checksums[entry]["sha256"] = next(group)[1]
    return Inputs(sources, names, entries, states, checksums, mtimes)


def name_entries(names: Sequence[str]) -> list[str]:
    """The entry of each source: its own name, or if there are many that of a folder: `texts/a/*`.

    `names`: without the folders that all have in common. The entries are the deepest folders of which there are at most
    MAX_ENTRIES.
    """
    if len(names) <= MAX_ENTRIES:
        return list(names)
    folder_of = [name.rpartition("/")[0] for name in names]
    parents = dict.fromkeys(folder_of, "")
    for depth in itertools.count(1):
        deeper = {folder: "/".join(folder.split("/", depth)[:depth]) for folder in parents}
        if deeper == parents or len(set(deeper.values())) > MAX_ENTRIES:
            break
        parents = deeper
    entry_of = {folder: f"{parent}/*" if parent else "*" for folder, parent in parents.items()}
    return [entry_of[folder] for folder in folder_of]


def _hash_sources(sources: Sequence[Source], states: Sequence[SourceState]) -> Iterator[str]:
    """The fingerprint of each source, or its SHA-256 if it has none."""
    pairs = list(zip(sources, states, strict=True))
    size = BATCH_FILES if len(pairs) > MAX_ENTRIES else 1
    batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    with (
        progress("check content", total=sum(state.bytes for state in states), unit="bytes", is_short=True) as bar,
        ThreadPoolExecutor(os.cpu_count()) as threads,  # hashing releases the GIL
    ):
        for batch, hashes in zip(batches, threads.map(_hash_batch, batches), strict=True):
            yield from hashes
            bar.advance(sum(state.bytes for _, state in batch))


def _hash_batch(batch: Sequence[tuple[Source, SourceState]]) -> list[str]:
    return [
        hash_file(Path(source.address)) if state.fingerprint is None else state.fingerprint for source, state in batch
    ]


def _hash_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()
