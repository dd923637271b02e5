"""The command `prepare`: build the corpus folder from the sources.

    1. find the sources, split them into chunks (sources.py); stop here if the folder is up to date
    2. pass 1, each chunk in parallel: read, clean and filter the records, hash the documents (passes.clean_chunk)
    3. decide for all documents together: split, exact and near-duplicates (dedup/), contamination (decontamination/)
    4. pass 2, each chunk in parallel: write the kept documents, a Parquet shard per split (passes.write_chunk)
    5. write account.json, quarantine.jsonl and the manifest; remove intermediate files; rename the folder

The folder then has train-00000.parquet, train-00001.parquet ..., valid-00000.parquet ..., one per chunk and split.
"""

from __future__ import annotations

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
from textmill.corpus.accounts import Counts, build_account, format_account
from textmill.corpus.clean.cleaner import check_packages
from textmill.corpus.decontamination.decisions import drop_contaminated
from textmill.corpus.decontamination.evaluation_data import (
    EvaluationData,
    OpenData,
    describe_data,
    open_text_data,
    write_index,
)
from textmill.corpus.dedup.decisions import decide_documents, write_decisions
from textmill.corpus.dropped import NAMES_FILE, list_dropped_files
from textmill.corpus.inspection import describe_layouts, find_older_encodings
from textmill.corpus.labelled.build import build_labelled
from textmill.corpus.passes import ChunkTask, clean_chunk, write_chunk
from textmill.corpus.records import QUARANTINE, BadRecord, check_quarantine, json_line, write_quarantine
from textmill.corpus.source import Source
from textmill.corpus.sources import find_sources, portable_names, source_state, split_into_chunks
from textmill.corpus.split import declared_splits
from textmill.errors import TextmillError, failed_work
from textmill.runners import Runner, open_runner
from textmill.storage.files import (
    format_path,
    hash_file,
    manifest_entry,
    read_json,
    remove_folder,
    write_bytes,
    write_json,
)
from textmill.storage.progress import progress
from textmill.storage.stages import MADE_FROM, MANIFEST, Force, Stage, open_manifest

WITHOUT_CONVERSATIONS = ("text", "wiki", "mediawiki", "urls")
"""Formats that `corpus.chat` cannot read."""
SHOWN_SKIPPED = 5
"""Skipped files that are named on the console."""
SHOWN_SOURCES = 5
"""Sources named in the error when they have no text."""


def prepare(config: RunConfig, force: Force = "no", open_data: OpenData = open_text_data) -> Path:
    """Build the corpus folder of this config; an existing, up-to-date folder is kept.

    `open_data` opens the files of `corpus.decontaminate`."""
    folder = config.folder_of("corpus")
    check_packages(config.corpus)
    evaluation_data = [open_data(entry) for entry in config.corpus.decontaminate]
    runner = open_runner(config.runner)
    skipped: list[str] = []
    sources = _find_sources(config, skipped)
    inputs = _inspect_inputs(sources, folder, force)
    _check_conversation_formats(config, inputs)
    stage = Stage("prepare", folder, _describe_inputs(config, inputs, evaluation_data), config.to_yaml())
    if stage.is_done(force):
        print(f"prepare: done already: {format_path(folder)} ({open_manifest(folder)['documents']:,} documents)")
        return _export_to_mongo(config, folder, inputs)
    _export_to_mongo(config, folder, inputs, check=True)
    for line in [*_describe_skipped(skipped), *describe_layouts(sources, config.corpus)]:
        print(f"prepare: {line}")
    with stage.unfinished_folder() as unfinished, runner:
        counts, files = _build(config, runner, [item.source for item in inputs], unfinished, skipped, evaluation_data)
        _check_unchanged(inputs)
        _remove_intermediate_files(unfinished, files)
        manifest_fields = {"documents": counts["kept"], "mtimes": {item.name: item.mtime_ns for item in inputs}}
        stage.write_manifest(unfinished, files, manifest_fields)
    ratios = [0.0] * len(config.corpus.split) if config.corpus.labels else config.corpus.split
    print("\n".join(format_account(counts, folder, ratios)))
    return _export_to_mongo(config, folder, inputs)


@dataclass(frozen=True)
class _Input:
    """A source with its state at the start of the command."""

    source: Source
    name: str
    """A name that does not depend on the current folder."""
    bytes: int
    mtime_ns: int
    sha256: str
    """The SHA-256 of a local file, or the fingerprint of a remote source."""


def _find_sources(config: RunConfig, skipped: list[str]) -> list[Source]:
    corpus = config.corpus
    return find_sources(
        corpus.sources,
        skip=_own_folders(config),
        corpora=corpus.corpora_file,
        read_original=corpus.mongo_write_back,
        encoding=corpus.encoding,
        skipped=skipped,
    )


def _check_conversation_formats(config: RunConfig, inputs: Sequence[_Input]) -> None:
    plain_sources = [item.source.name for item in inputs if item.source.format in WITHOUT_CONVERSATIONS]
    if config.corpus.chat and plain_sources:
        raise TextmillError(
            f"corpus.chat: {plain_sources[0]} has no fields that could hold a conversation; "
            f"use JSON, CSV, Parquet or Arrow files or MongoDB, or remove corpus.chat"
        )


def _export_to_mongo(config: RunConfig, folder: Path, inputs: Sequence[_Input], check: bool = False) -> Path:
    """Write the finished corpus to MongoDB, if configured; `check`: only check that this is possible."""
    if config.corpus.mongo_write_back or config.corpus.mongo_load:
        mongo = import_module("textmill.corpus.mongo.export")
        sources = [item.source for item in inputs]
        mongo.check_export(config.corpus, sources) if check else mongo.export_to_mongo(config.corpus, folder, sources)
    return folder


def _inspect_inputs(sources: list[Source], folder: Path, force: Force) -> list[_Input]:
    """Size, modification time and checksum of each source.

    The recorded checksum is used for a file whose size and modification time are unchanged.
    """
    manifest = read_json(folder / MANIFEST) if force != "yes" and (folder / MANIFEST).is_file() else {}
    mtimes = manifest.get("mtimes", {})
    made_from = manifest.get("made_from", {})

    def inspect(source: Source, name: str) -> _Input:
        state = source_state(source)
        if state.fingerprint is not None:
            return _Input(source, name, state.bytes, 0, state.fingerprint)
        recorded = made_from.get(f"inputs.{name}", {})
        is_unchanged = recorded.get("bytes") == state.bytes and mtimes.get(name) == state.mtime_ns
        return _Input(
            source, name, state.bytes, state.mtime_ns, recorded["sha256"] if is_unchanged else hash_file(source.path)
        )

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing releases the GIL
        inputs = list(threads.map(inspect, sources, portable_names(sources)))
    # Sorted by the portable name, so that an interrupted run can be resumed from another folder.
    return sorted(inputs, key=lambda item: item.name)


def _describe_inputs(
    config: RunConfig, inputs: Sequence[_Input], evaluation_data: Sequence[EvaluationData]
) -> dict[str, Any]:
    """The settings and input checksums that decide the result; the manifest records them."""
    settings = config.results("corpus")
    del settings["corpus.sources"]  # the files matter, not how they are written
    if config.corpus.dedup != "near":
        settings = {key: value for key, value in settings.items() if not key.startswith("corpus.dedup_")}
    settings["corpus.decontaminate"] = describe_data(evaluation_data)
    if not evaluation_data:
        settings = {key: value for key, value in settings.items() if not key.startswith("corpus.decontaminate")}
    settings["corpus.rules"] = sorted(config.corpus.rules)  # rules always run in the same order
    checksums = {f"inputs.{item.name}": {"bytes": item.bytes, "sha256": item.sha256} for item in inputs}
    keys = {f"inputs.{item.name}.text_key": item.source.text_key for item in inputs if item.source.text_key}
    return settings | checksums | keys


def _own_folders(config: RunConfig) -> list[Path]:
    """The folders that textmill writes; they are never sources."""
    folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    return folders + [folder.with_name(folder.name + ".part") for folder in folders]


def _describe_skipped(skipped: list[str]) -> list[str]:
    """One line that names the first files that were not read; nothing if there are none."""
    if not skipped:
        return []
    names = ", ".join(map(format_path, map(Path, skipped[:SHOWN_SKIPPED])))
    more = f" and {len(skipped) - SHOWN_SKIPPED:,} more, listed in account.json" if len(skipped) > SHOWN_SKIPPED else ""
    files = "1 file has" if len(skipped) == 1 else f"{len(skipped):,} files have"
    return [f"{files} no format that textmill reads and will be skipped: {names}{more}"]


def _build(
    config: RunConfig,
    runner: Runner,
    sources: list[Source],
    folder: Path,
    skipped: list[str],
    evaluation_data: list[EvaluationData],
) -> tuple[Counts, dict[str, Any]]:
    """Run both passes and the decisions between them; return the account and the manifest entry of every file."""
    if config.corpus.labels:
        return build_labelled(config.corpus, config.corpus.labels, sources, folder, skipped)
    (folder / "work").mkdir(exist_ok=True)
    run = partial(_run, runner)
    declared = declared_splits([source.name for source in sources], config.corpus.source_splits)
    tasks = [ChunkTask(chunk, config.corpus, folder) for chunk in split_into_chunks(sources, config.corpus.documents)]
    source_names = [task.chunk.source.name for task in tasks]
    index = write_index(evaluation_data, config.corpus, folder / "work") if evaluation_data else None

    read_counts = run(clean_chunk, tasks, "prepare: read and clean", "bytes")
    quarantine = write_quarantine(folder / QUARANTINE, _read_bad_records(tasks))
    limit = config.corpus.max_unreadable
    check_quarantine(
        folder / QUARANTINE, _read_bad_records(tasks), read_counts, limit, lambda: find_older_encodings(sources)
    )

    decisions = decide_documents(tasks, dict(zip(sources, declared, strict=True)), config.corpus, run)
    counts: Counts = {"skipped_files": skipped}
    if index:
        counts["contamination"] = drop_contaminated(tasks, decisions, evaluation_data, index, config.corpus)
    write_decisions(tasks, decisions)
    write_json(folder / "work" / NAMES_FILE, source_names)

    split_counts = run(write_chunk, tasks, "prepare: split and write", "bytes")
    counts |= build_account(source_names, read_counts, decisions.dropped, split_counts)
    if not counts["kept"]:
        raise TextmillError(_describe_nothing_kept(tasks, counts, config.corpus.min_chars))
    files = {"account.json": write_json(folder / "account.json", counts), QUARANTINE: quarantine}
    if config.corpus.dedup == "near":
        lines = map(json_line, decisions.pairs)
        files["near_duplicates.jsonl"] = write_bytes(folder / "near_duplicates.jsonl", lines)
    files |= {path.name: manifest_entry(path) for path in list_dropped_files(folder)}
    return counts, files | _list_shards(split_counts)


def _list_shards(split_counts: list[dict[str, Counts]]) -> dict[str, Any]:
    """The manifest entry of each Parquet file that `write_chunk` wrote, by name."""
    files = [dict(split["file"]) for splits in split_counts for split in splits.values()]
    return {file.pop("name"): file for file in files}


def _describe_nothing_kept(tasks: list[ChunkTask], counts: Counts, min_chars: int) -> str:
    if not counts["records"]:
        files = ", ".join(islice(counts["by_source"], SHOWN_SOURCES))
        return f"corpus.sources: no text found in {files}; check the files"
    dropped = ", ".join(f"{number:,} by {rule}" for rule, number in counts["dropped"].items()) or "none"
    first = next(_read_bad_records(tasks), None)
    return (
        f"corpus.sources: none of {counts['records']:,} records was kept (dropped: {dropped}; quarantined: "
        f"{counts['quarantined']:,}{f', the first: {first}' if first else ''}); check the files, corpus.text_key and "
        f"corpus.min_chars={min_chars}"
    )


def _run(runner: Runner, function: Callable[[Any], Any], shards: Sequence[Any], name: str, unit: str) -> list[Any]:
    results = []
    try:
        with progress(name, total=sum(shard.size for shard in shards), unit=unit) as bar:
            for shard, result in zip(shards, runner.map(function, shards), strict=True):
                results.append(result)
                bar.advance(shard.size)
    except OSError as error:  # a full disk, or a file that was deleted
        reason = f"{name}: {error}; fix that and run the command again: finished chunks are kept"
        raise failed_work(reason, error) from None
    return results


def _read_bad_records(tasks: list[ChunkTask]) -> Iterator[BadRecord]:
    return chain.from_iterable(task.read_bad_records() for task in tasks)


def _check_unchanged(inputs: Sequence[_Input]) -> None:
    for item in inputs:
        state = source_state(item.source)
        if (state.bytes, state.mtime_ns) != (item.bytes, item.mtime_ns) or state.fingerprint not in (None, item.sha256):
            raise TextmillError(
                f"{item.source.name}: changed while it was read; run prepare again when nothing writes to it"
            )


def _remove_intermediate_files(folder: Path, files: dict[str, Any]) -> None:
    """Delete the intermediate files and unfinished files of a killed run."""
    for path in sorted(folder.iterdir()):
        if path.name not in files and path.name != MADE_FROM:  # also removes what an interrupted removal left
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
