"""The command `prepare`: build the corpus folder from the sources.

    1. find the sources, split them into chunks (sources.py); stop here if the folder is up to date
    2. pass 1, each chunk in parallel: read, clean and filter the records, hash the documents (`clean_chunk`);
       then write quarantine.jsonl, and stop if too many records could not be read
    3. decide for all documents together: split, exact and near-duplicates (dedup/), contamination (decontamination.py)
    4. pass 2, each chunk in parallel: write the kept documents, a Parquet shard per split (`write_chunk`)
    5. write account.json and the manifest; remove intermediate files; rename the folder

The folder then has train-00000.parquet, train-00001.parquet ..., valid-00000.parquet ..., one per chunk and split.
chunk_task.py lists the intermediate files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.config import STAGE_FOLDERS, CorpusConfig, RunConfig
from textmill.corpus.accounts import Counts, build_account, format_account
from textmill.corpus.chunk_task import ChunkTask
from textmill.corpus.clean.cleaner import Cleaner, check_packages
from textmill.corpus.clean.sentences import SENTENCE_SPLITTERS
from textmill.corpus.conversations import turns_to_json
from textmill.corpus.decontamination import (
    EvaluationData,
    OpenData,
    describe_data,
    drop_contaminated,
    find_hits,
    open_text_data,
    write_index,
)
from textmill.corpus.dedup.decisions import decide_documents, write_decisions
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.dropped import FILTERED_SCHEMA, NAMES_FILE, list_dropped_files, write_dropped
from textmill.corpus.encodings import advise_encodings
from textmill.corpus.inspection import describe_layouts, find_older_encodings
from textmill.corpus.labelled import build_labelled
from textmill.corpus.records import ENCODING_HINT, NOT_UTF8, BadRecord
from textmill.corpus.shards import CHAT_SCHEMA, SCHEMA, ShardWriter, new_shard, open_shard, shard_name
from textmill.corpus.source import Source
from textmill.corpus.sources import find_sources, portable_names, read_records, source_state, split_into_chunks
from textmill.corpus.split import declared_splits, text_digest
from textmill.errors import TextmillError, failed_work
from textmill.runners import Runner, open_runner
from textmill.storage.files import (
    atomic_writer,
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
QUARANTINE = "quarantine.jsonl"
"""The file of the records that could not be read."""
CLEANED_SCHEMA = pa.schema(
    [("text", pa.string()), ("id", pa.string()), ("meta", pa.string()), ("messages", pa.string())]
)
BUFFER_CHARACTERS = 4 << 20
"""Characters collected before they are written."""
SHOWN_SKIPPED = 5
"""Skipped files that are named on the console."""
SHOWN_SOURCES = 5
"""Sources named in the error when they have no text."""


def prepare(config: RunConfig, force: Force = "no", open_data: OpenData = open_text_data) -> Path:
    """Build the corpus folder of this config; an existing, up-to-date folder is kept.

    `open_data` opens the files of `corpus.decontaminate`."""
    corpus = config.corpus
    folder = config.folder_of("corpus")
    check_packages(corpus)
    evaluation_data = [open_data(entry) for entry in corpus.decontaminate]
    runner = open_runner(config.runner)
    skipped: list[str] = []
    own_folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    sources = find_sources(
        corpus.sources,
        skip=[*own_folders, *(own.with_name(own.name + ".part") for own in own_folders)],
        corpora=corpus.corpora_file,
        read_original=corpus.mongo_write_back,
        encoding=corpus.encoding,
        skipped=skipped,
    )
    inputs = _inspect_inputs(sources, folder, force)
    _check_conversation_formats(corpus, inputs)
    made_from = _describe_inputs(config.results("corpus"), corpus, inputs, evaluation_data)
    stage = Stage("prepare", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"prepare: done already: {format_path(folder)} ({open_manifest(folder)['documents']:,} documents)")
    else:
        _export_to_mongo(corpus, folder, inputs, check=True)
        for line in [*_describe_skipped(skipped), *describe_layouts(sources, corpus)]:
            print(f"prepare: {line}")
        with stage.unfinished_folder() as unfinished, runner:
            ordered_sources = [item.source for item in inputs]
            counts, files = _build(corpus, runner, ordered_sources, unfinished, skipped, evaluation_data)
            _check_unchanged(inputs)
            _remove_intermediate_files(unfinished, files)
            manifest_fields = {"documents": counts["kept"], "mtimes": {item.name: item.mtime_ns for item in inputs}}
            stage.write_manifest(unfinished, files, manifest_fields)
        ratios = [0.0] * len(corpus.split) if corpus.labels else corpus.split
        print("\n".join(format_account(counts, folder, ratios)))
    _export_to_mongo(corpus, folder, inputs)
    return folder


def _build(
    config: CorpusConfig,
    runner: Runner,
    sources: list[Source],
    folder: Path,
    skipped: list[str],
    evaluation_data: list[EvaluationData],
) -> tuple[Counts, dict[str, Any]]:
    """Run both passes and the decisions between them; return the account and the manifest entry of every file."""
    if config.labels:
        return build_labelled(config, config.labels, sources, folder, skipped)
    (folder / "work").mkdir(exist_ok=True)
    run = partial(_run, runner)
    declared = declared_splits([source.name for source in sources], config.source_splits)
    tasks = [ChunkTask(chunk, config, folder) for chunk in split_into_chunks(sources, config.documents)]
    source_names = [task.chunk.source.name for task in tasks]
    index = write_index(evaluation_data, config, folder / "work") if evaluation_data else None

    read_counts = run(clean_chunk, tasks, "prepare: read and clean", "bytes")
    quarantine = write_bytes(folder / QUARANTINE, map(_quarantine_line, _read_bad_records(tasks)))
    _check_quarantine(config.max_unreadable, folder / QUARANTINE, tasks, read_counts)

    decisions = decide_documents(tasks, dict(zip(sources, declared, strict=True)), config, run)
    counts: Counts = {"skipped_files": skipped}
    if index:
        counts["contamination"] = drop_contaminated(tasks, decisions, evaluation_data, index, config)
    write_decisions(tasks, decisions)
    write_json(folder / "work" / NAMES_FILE, source_names)

    split_counts = run(write_chunk, tasks, "prepare: split and write", "bytes")
    counts |= build_account(source_names, read_counts, decisions.dropped, split_counts)
    if not counts["kept"]:
        raise TextmillError(_describe_nothing_kept(tasks, counts, config.min_chars))
    files = {"account.json": write_json(folder / "account.json", counts), QUARANTINE: quarantine}
    if config.dedup == "near":
        lines = map(_json_line, decisions.pairs)
        files["near_duplicates.jsonl"] = write_bytes(folder / "near_duplicates.jsonl", lines)
    files |= {path.name: manifest_entry(path) for path in list_dropped_files(folder)}
    for splits in split_counts:
        for split in splits.values():
            entry = dict(split["file"])
            files[entry.pop("name")] = entry
    return counts, files


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


# Pass 1


def clean_chunk(task: ChunkTask) -> dict[str, Any]:
    """Pass 1: clean a chunk's records and return their counts; documents, digests and bad records go to files."""
    if task.path("read.json").is_file():
        counts: dict[str, Any] = read_json(task.path("read.json"))
        return counts
    config = task.config
    cleaner = Cleaner(config)
    is_nfc = not {"unicode", "compatibility"}.isdisjoint(config.rules)
    amounts = Counter(records=0, quarantined=0, quarantined_bytes=0, characters=0)
    with ExitStack() as stack:
        bad_records = stack.enter_context(atomic_writer(task.path("bad")))
        digests = stack.enter_context(atomic_writer(task.path("digests")))
        cleaned = stack.enter_context(_new_table(task.path("parquet"), CLEANED_SCHEMA))
        filtered = (
            stack.enter_context(_new_table(task.path("filtered"), FILTERED_SCHEMA)) if config.keep_dropped else None
        )
        for record in read_records(task.chunk, config):
            amounts["records"] += 1
            if isinstance(record, BadRecord):
                amounts["quarantined"] += 1
                amounts["quarantined_bytes"] += max(record.bytes_lost, len(record.raw))
                bad_records.write(json.dumps([record.place, record.reason, record.raw.hex()]).encode() + b"\n")
                continue
            amounts["characters"] += len(record.text)
            text, messages = _clean(record, cleaner, config)
            if text is not None:
                # Two conversations with the same text are duplicates only if the roles are the same too.
                digests.write(text_digest(messages or text, is_nfc=is_nfc))
                size = len(text) + len(record.meta or "") + len(messages or "")
                cleaned.add((text, record.id, record.meta, messages), size)
            elif filtered is not None:
                filtered.add((record.text, record.id, cleaner.dropped_by), len(record.text))
    if config.decontaminate:
        find_hits(task)
    counts = {
        "records": amounts["records"],
        "changed": dict(sorted(cleaner.changed.items())),
        "dropped": dict(sorted(cleaner.dropped.items())),
        "quarantined": amounts["quarantined"],
        "quarantined_bytes": amounts["quarantined_bytes"],
        # a compressed file has more than it stores
        "bytes": max(task.size, amounts["characters"] + amounts["quarantined_bytes"]),
    }
    write_json(task.path("read.json"), counts)
    return counts


def _clean(record: Document, cleaner: Cleaner, config: CorpusConfig) -> tuple[str | None, str | None]:
    """The cleaned text, and the turns of a conversation as JSON; None and None if a filter drops it."""
    if record.turns is not None:
        turns = cleaner.clean_turns(record.turns, record.url)
        return (None, None) if turns is None else ("\n".join(text for _, text in turns), turns_to_json(turns))
    text = cleaner.clean(record.text, record.url)
    split_lines = SENTENCE_SPLITTERS.get(config.sentences)
    return split_lines(text) if split_lines and text is not None else text, None


@dataclass
class _TableWriter:
    """Collects rows of texts, and writes them to a shard a few megabytes at a time."""

    shard: ShardWriter
    schema: pa.Schema
    rows: list[tuple[str | None, ...]] = field(default_factory=list)
    characters: int = 0

    def add(self, row: tuple[str | None, ...], characters: int) -> None:
        self.rows.append(row)
        self.characters += characters
        if self.characters >= BUFFER_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.schema)
        self.shard.add(pa.table([pa.array(column, pa.string()) for column in columns], schema=self.schema))
        self.rows = []
        self.characters = 0


@contextmanager
def _new_table(path: Path, schema: pa.Schema) -> Iterator[_TableWriter]:
    with new_shard(path, schema, "lz4") as shard:
        writer = _TableWriter(shard, schema)
        yield writer
        writer.flush()


# Records that could not be read


def _read_bad_records(tasks: list[ChunkTask]) -> Iterator[BadRecord]:
    return chain.from_iterable(task.read_bad_records() for task in tasks)


def _quarantine_line(bad: BadRecord) -> bytes:
    raw = bad.raw.decode(errors="backslashreplace")
    return _json_line({"file": bad.source, "place": bad.place, "reason": bad.reason, "raw": raw})


def _json_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _check_quarantine(
    max_unreadable: float, path: Path, tasks: list[ChunkTask], counts_by_chunk: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse to go on if too large a part of the records, or of the bytes, is unreadable; `path`: where they are."""
    names = ("records", "quarantined", "bytes", "quarantined_bytes")
    total = {name: sum(counts[name] for counts in counts_by_chunk) for name in names}
    if total["quarantined"] > max_unreadable * total["records"]:
        amount = f"{total['quarantined']:,} of {total['records']:,} records"
    elif total["quarantined_bytes"] > max_unreadable * total["bytes"]:
        amount = f"{total['quarantined_bytes']:,} of {total['bytes']:,} bytes"
    else:
        return
    first = str(next(_read_bad_records(tasks), ""))
    sources = list(dict.fromkeys(task.chunk.source for task in tasks))
    # A guess from all files is surer than one from a record.
    if NOT_UTF8 in first and (encodings := find_older_encodings(sources)):
        first = f"{first.partition(ENCODING_HINT)[0]}; {advise_encodings(encodings)}"
    some = "corpus.text_key=" in first and total["quarantined"] < total["records"]
    advice = (
        " (corpus.text_key=text+body reads files with the field text and files with the field body)" if some else ""
    )
    raise TextmillError(
        f"corpus.sources: {amount} are unreadable, more than corpus.max_unreadable={max_unreadable:g}; "
        f"the first: {first}; all of them are in {format_path(path)}; fix the files or the setting{advice}, "
        f"or raise corpus.max_unreadable to continue without them"
    )


# Pass 2


def write_chunk(task: ChunkTask) -> dict[str, Any]:
    """Pass 2: write a chunk's kept documents; return the counts and the shard's checksum for each split."""
    if task.path("written.json").is_file():
        splits: dict[str, Any] = read_json(task.path("written.json"))
        return splits
    split_of_row = np.fromfile(task.path("splits"), dtype=np.int8)
    present = {split: index for index, split in enumerate(SPLITS) if (split_of_row == index).any()}
    splits = {split: {"documents": 0, "bytes": 0, "characters": 0} for split in present}
    names = {split: shard_name(split, task.chunk.number) for split in present}
    schema = CHAT_SCHEMA if task.config.chat else SCHEMA
    with ExitStack() as stack:
        shards = {split: stack.enter_context(new_shard(task.folder / name, schema)) for split, name in names.items()}
        for first_row, table in _read_cleaned(task):
            split_of_document = split_of_row[first_row : first_row + table.num_rows]
            for split, index in present.items():
                documents = table.filter(pa.array(split_of_document == index))
                texts = documents.column("text")
                splits[split]["documents"] += len(texts)
                splits[split]["bytes"] += pc.sum(pc.binary_length(texts)).as_py() or 0
                splits[split]["characters"] += pc.sum(pc.utf8_length(texts)).as_py() or 0
                source = pa.array([task.chunk.source.name] * documents.num_rows, pa.string())
                shards[split].add(documents.append_column("source", source).select(schema.names))
    for split, name in names.items():
        splits[split]["file"] = {"name": name, **manifest_entry(task.folder / name)}
    if task.config.keep_dropped:
        write_dropped(task)
    write_json(task.path("written.json"), splits)
    return splits


def _read_cleaned(task: ChunkTask) -> Iterator[tuple[int, pa.Table]]:
    """Blocks of cleaned documents, each with the number of its first row; contaminated ones are marked if wanted."""
    is_marking = task.config.decontaminate and task.config.decontaminate_action == "mark"
    first_row = 0
    with open_shard(task.path("parquet")) as cleaned:
        for group in range(cleaned.num_row_groups):
            table = cleaned.read_row_group(group, use_threads=False)
            yield first_row, _mark(table, task.read_contaminated() - first_row) if is_marking else table
            first_row += table.num_rows


def _mark(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """The table with a mark in the field `meta` of some rows."""
    metas = table.column("meta").to_pylist()
    for row in rows[(rows >= 0) & (rows < table.num_rows)].tolist():
        metas[row] = json.dumps({**json.loads(metas[row] or "{}"), "contaminated": True}, ensure_ascii=False)
    return table.set_column(table.schema.get_field_index("meta"), "meta", pa.array(metas, pa.string()))


# What decides the result, and whether it changed


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
        sha256 = recorded["sha256"] if is_unchanged else hash_file(source.path)
        return _Input(source, name, state.bytes, state.mtime_ns, sha256)

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing releases the GIL
        inputs = list(threads.map(inspect, sources, portable_names(sources)))
    # Sorted by the portable name, so that an interrupted run can be resumed from another folder.
    return sorted(inputs, key=lambda item: item.name)


def _describe_inputs(
    settings: dict[str, Any], config: CorpusConfig, inputs: Sequence[_Input], evaluation_data: Sequence[EvaluationData]
) -> dict[str, Any]:
    """The settings and input checksums that decide the result; the manifest records them."""
    del settings["corpus.sources"]  # the files matter, not how they are written
    if config.dedup != "near":
        settings = {key: value for key, value in settings.items() if not key.startswith("corpus.dedup_")}
    settings["corpus.decontaminate"] = describe_data(evaluation_data)
    if not evaluation_data:
        settings = {key: value for key, value in settings.items() if not key.startswith("corpus.decontaminate")}
    settings["corpus.rules"] = sorted(config.rules)  # rules always run in the same order
    checksums = {f"inputs.{item.name}": {"bytes": item.bytes, "sha256": item.sha256} for item in inputs}
    keys = {f"inputs.{item.name}.text_key": item.source.text_key for item in inputs if item.source.text_key}
    return settings | checksums | keys


def _check_unchanged(inputs: Sequence[_Input]) -> None:
    for item in inputs:
        state = source_state(item.source)
        if (state.bytes, state.mtime_ns) != (item.bytes, item.mtime_ns) or state.fingerprint not in (None, item.sha256):
            raise TextmillError(
                f"{item.source.name}: changed while it was read; run prepare again when nothing writes to it"
            )


def _check_conversation_formats(config: CorpusConfig, inputs: Sequence[_Input]) -> None:
    plain_sources = [item.source.name for item in inputs if item.source.format in WITHOUT_CONVERSATIONS]
    if config.chat and plain_sources:
        raise TextmillError(
            f"corpus.chat: {plain_sources[0]} has no fields that could hold a conversation; "
            f"use JSON, CSV, Parquet or Arrow files or MongoDB, or remove corpus.chat"
        )


def _export_to_mongo(config: CorpusConfig, folder: Path, inputs: Sequence[_Input], check: bool = False) -> None:
    """Write the finished corpus to MongoDB, if configured; `check`: only check that this is possible."""
    if config.mongo_write_back or config.mongo_load:
        from textmill.corpus import mongo_export  # needs pymongo

        sources = [item.source for item in inputs]
        if check:
            mongo_export.check_export(config, sources)
        else:
            mongo_export.export_to_mongo(config, folder, sources)


def _remove_intermediate_files(folder: Path, files: dict[str, Any]) -> None:
    """Delete the intermediate files and unfinished files of a killed run."""
    for path in sorted(folder.iterdir()):
        if path.name not in files and path.name != MADE_FROM:  # also removes what an interrupted removal left
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)


# Messages


def _describe_skipped(skipped: list[str]) -> list[str]:
    """One line that names the first files that were not read; nothing if there are none."""
    if not skipped:
        return []
    names = ", ".join(map(format_path, map(Path, skipped[:SHOWN_SKIPPED])))
    more = f" and {len(skipped) - SHOWN_SKIPPED:,} more, listed in account.json" if len(skipped) > SHOWN_SKIPPED else ""
    files = "1 file has" if len(skipped) == 1 else f"{len(skipped):,} files have"
    return [f"{files} no format that textmill reads and will be skipped: {names}{more}"]


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
