"""The verb `prepare`: sources in, a folder of cleaned, deduplicated, split shards out, every record accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

from textmill.config import STAGE_FOLDERS, RunConfig
from textmill.corpus.accounts import Counts, account, describe
from textmill.corpus.clean.cleaner import check_needs
from textmill.corpus.dedup.decisions import decide_fates
from textmill.corpus.passes import Work, read_piece, write_piece
from textmill.corpus.records import Bad
from textmill.corpus.source import Source
from textmill.corpus.sources import find_sources, names_wherever, pieces_of, state_of
from textmill.corpus.split import declared_sides
from textmill.errors import TextmillError
from textmill.runners import Runner, open_runner
from textmill.storage.files import hash_file, read_json, remove_folder, shown, write_bytes, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import MADE_FROM, MANIFEST, Force, Stage, open_manifest

PLAIN = ("text", "wiki", "mediawiki", "mongo")
"""Formats in which no conversation is looked for."""
SHOWN = 5
"""Bad records in the message when there are too many."""


def prepare(config: RunConfig, force: Force = "no") -> Path:
    """Make the corpus folder that `config` asks for; done already: say so."""
    folder = config.folder_of("corpus")
    check_needs(config.corpus)
    runner = open_runner(config.runner)
    inputs = _look_at(_find(config), folder, force)
    _check_records(config, inputs)
    stage = Stage("prepare", folder, _made_from(config, inputs), config.to_yaml())
    if stage.done(force):
        print(f"prepare: done already: {shown(folder)} ({open_manifest(folder)['documents']:,} documents)")
        return _deliver(config, folder, inputs)
    _deliver(config, folder, inputs, check=True)
    with stage.building() as part, runner:
        counts, files = _build(config, runner, [one.source for one in inputs], part)
        _check_unchanged(inputs)
        _sweep(part, files)
        facts = {"documents": counts["kept"], "mtimes": {one.name: one.mtime_ns for one in inputs}}
        stage.finish(part, files, facts)
    print("\n".join(describe(counts, folder, config.corpus.split)))
    return _deliver(config, folder, inputs)


@dataclass(frozen=True)
class _Input:
    """A source as it was when we looked."""

    source: Source
    name: str
    bytes: int
    mtime_ns: int
    sha256: str
    """The checksum of a file; of what is not on this machine, its mark."""


def _find(config: RunConfig) -> list[Source]:
    corpus = config.corpus
    return find_sources(corpus.sources, skip=_own_folders(config), corpora=corpus.corpora, raw=corpus.mongo_write_back)


def _check_records(config: RunConfig, inputs: Sequence[_Input]) -> None:
    plain = [one.source.name for one in inputs if one.source.format in PLAIN]
    if config.corpus.chat and plain:
        raise TextmillError(
            f"corpus.chat: {plain[0]} has no records with fields to find a conversation in; give JSON, CSV, Parquet or Arrow files, "
            f"or take corpus.chat out"
        )


def _deliver(config: RunConfig, folder: Path, inputs: Sequence[_Input], check: bool = False) -> Path:
    """Bring the finished corpus to MongoDB, where that is asked; `check`: only refuse what cannot be."""
    if config.corpus.mongo_write_back or config.corpus.mongo_load:
        deliveries, sources = import_module("textmill.corpus.mongo.export"), [one.source for one in inputs]
        deliveries.check_deliveries(config.corpus, sources) if check else deliveries.deliver(
            config.corpus, folder, sources
        )
    return folder


def _look_at(sources: list[Source], folder: Path, force: Force) -> list[_Input]:
    """Length, time and checksum of each source; a file with the recorded length and time is not read again."""
    manifest = read_json(folder / MANIFEST) if force != "yes" and (folder / MANIFEST).is_file() else {}
    mtimes, made_from = manifest.get("mtimes", {}), manifest.get("made_from", {})

    def look(source: Source, name: str) -> _Input:
        state = state_of(source)
        if state.mark is not None:
            return _Input(source, name, state.bytes, 0, state.mark)
        known = made_from.get(f"inputs.{name}", {})
        same = known.get("bytes") == state.bytes and mtimes.get(name) == state.mtime_ns
        return _Input(source, name, state.bytes, state.mtime_ns, known["sha256"] if same else hash_file(source.path))

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing leaves the interpreter's lock
        inputs = list(threads.map(look, sources, names_wherever(sources)))
    # By the name that is the same everywhere: a half-made folder may be gone on with from another place.
    return sorted(inputs, key=lambda one: one.name)


def _made_from(config: RunConfig, inputs: Sequence[_Input]) -> dict[str, Any]:
    settings = config.results("corpus")
    del settings["corpus.sources"]  # the files count, not their spelling
    if config.corpus.dedup != "near":
        settings = {key: value for key, value in settings.items() if not key.startswith("corpus.dedup_")}
    settings["corpus.rules"] = sorted(config.corpus.rules)  # they run in one order, however they are named
    facts = {f"inputs.{one.name}": {"bytes": one.bytes, "sha256": one.sha256} for one in inputs}
    keys = {f"inputs.{one.name}.text_key": one.source.text_key for one in inputs if one.source.text_key}
    return settings | facts | keys


def _own_folders(config: RunConfig) -> list[Path]:
    """Where textmill itself writes: never a source, even if a source folder holds it."""
    folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    return folders + [folder.with_name(folder.name + ".part") for folder in folders]


def _build(config: RunConfig, runner: Runner, sources: list[Source], part: Path) -> tuple[Counts, dict[str, Any]]:
    """Both passes and what lies between them; the account, and the length and checksum of every file made."""
    (part / "work").mkdir(exist_ok=True)
    run = partial(_run, runner)
    declared = declared_sides([source.name for source in sources], config.corpus.sides)
    works = [Work(piece, config.corpus, part) for piece in pieces_of(sources, config.corpus.documents)]
    read = run(read_piece, works, "prepare: read and clean", "bytes")
    quarantine = write_bytes(part / "quarantine.jsonl", _quarantine_lines(works))
    _check_quarantine(works, read, config.corpus.stop_at, part)
    fates = decide_fates(works, dict(zip(sources, declared, strict=True)), config.corpus, run)
    for work, sides in zip(works, fates.sides, strict=True):
        write_bytes(work.path("sides"), [sides.tobytes()])
    written = run(write_piece, works, "prepare: split and write", "bytes")
    counts = account([work.piece.source.name for work in works], read, fates.dropped, written)
    if not counts["kept"]:
        raise TextmillError(
            f"corpus.sources: nothing is left of {counts['records']:,} records (dropped: {counts['dropped']}, "
            f"quarantined: {counts['quarantined']}); look at the files, corpus.min_chars={config.corpus.min_chars} and corpus.text_key"
        )
    shards = [dict(split["file"]) for splits in written for split in splits.values()]
    files = {"account.json": write_json(part / "account.json", counts), "quarantine.jsonl": quarantine}
    if config.corpus.dedup == "near":
        files["near_duplicates.jsonl"] = write_bytes(part / "near_duplicates.jsonl", map(_line, fates.pairs))
    return counts, files | {shard.pop("name"): shard for shard in shards}


def _run(runner: Runner, function: Callable[[Any], Any], shards: Sequence[Any], name: str, unit: str) -> list[Any]:
    results = []
    try:
        with progress(name, total=sum(shard.size for shard in shards), unit=unit) as bar:
            for shard, result in zip(shards, runner.map(function, shards), strict=True):
                results.append(result)
                bar.advance(shard.size)
    except OSError as error:  # a full disk, a file that went away
        raise TextmillError(f"{name}: {error}; mend that and run it again: what is finished is kept") from None
    return results


def _quarantine_lines(works: list[Work]) -> Iterator[bytes]:
    for bad in _bad_rows(works):
        row = {
            "file": bad.source,
            "place": bad.place,
            "reason": bad.reason,
            "raw": bad.raw.decode(errors="backslashreplace"),
        }
        yield _line(row)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _bad_rows(works: list[Work]) -> Iterator[Bad]:
    return chain.from_iterable(work.bad_rows() for work in works)


def _check_quarantine(works: list[Work], read: list[Counts], stop_at: float, part: Path) -> None:
    records, bad = sum(one["records"] for one in read), sum(one["quarantined"] for one in read)
    if bad > stop_at * records:
        first = "\n".join(f"  {row}" for row in islice(_bad_rows(works), SHOWN))
        raise TextmillError(
            f"corpus.sources: {bad:,} of {records:,} records are unreadable, above corpus.stop_at={stop_at:g}:\n{first}\n"
            f"all of them stand in {part / 'quarantine.jsonl'}; mend the files or the setting, or go on without them: raise corpus.stop_at"
        )


def _check_unchanged(inputs: Sequence[_Input]) -> None:
    for one in inputs:
        state = state_of(one.source)
        if (state.bytes, state.mtime_ns) != (one.bytes, one.mtime_ns) or state.mark not in (None, one.sha256):
            raise TextmillError(
                f"{one.source.name}: changed while it was read; run prepare again when nothing writes to it"
            )


def _sweep(part: Path, files: dict[str, Any]) -> None:
    """Take out the intermediate files and what a killed run left half written."""
    for path in sorted(part.iterdir()):
        if path.name not in files and path.name != MADE_FROM:  # with a folder goes what an earlier removal of it left
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
