"""The command `prepare`: build the corpus folder from the sources.

    1. find the sources, split them into chunks (find_sources.py); stop here if the folder is up to date
    2. pass 1, each chunk in parallel: read, clean and filter the records, hash the documents (`clean_chunk`);
       then write quarantine.jsonl, and stop if too many records could not be read
    3. decide for all documents together: split, exact and near-duplicates (dedup/), contamination (decontamination.py)
    4. pass 2, each chunk in parallel: write the kept documents, a Parquet shard per split (`write_chunk`)
    5. write account.json and the manifest; remove intermediate files; rename the folder

The folder then has train-00000.parquet, train-00001.parquet ..., valid-00000.parquet ..., one per chunk and split.
chunk_task.py lists the intermediate files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.config import STAGE_FOLDERS, CorpusConfig, RunConfig
from textmill.config.own_files import open_own_file
from textmill.corpus.accounts import AMOUNTS, Counts, build_account, format_account
from textmill.corpus.chunk_task import DROPPED, ChunkTask
from textmill.corpus.clean.cleaner import Cleaner, check_packages
from textmill.corpus.clean.quality import MAX_SAMPLES, open_quality, save_quality, train_quality
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
from textmill.corpus.dropped import FILTERED_SCHEMA, write_dropped
from textmill.corpus.encodings import advise_encodings, is_garbled
from textmill.corpus.find_sources import (
    SourceState,
    describe_scans,
    describe_skipped,
    find_sources,
    group_chunks,
    group_skipped,
    portable_names,
    read_records,
    reading_order,
    sample_chunks,
    source_state,
    split_into_chunks,
)
from textmill.corpus.inspection import describe_layouts, find_older_encodings
from textmill.corpus.labelled import build_labelled
from textmill.corpus.records import ENCODING_HINT, NOT_UTF8, BadRecord, chunk_bytes_of
from textmill.corpus.shards import CHAT_SCHEMA, SCHEMA, list_shards, new_row_shard, new_shard, shard_name
from textmill.corpus.source import FIELD_FORMATS, ONE_TEXT_FORMATS, Damage, Source, SourceChunk
from textmill.corpus.split import SourceSplits, field_digest, is_new_record, split_sources, text_digest
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

QUALITY_FILE = "quality.npy"
"""The file of the trained quality filter, in the folder of intermediate files."""
QUARANTINE = "quarantine.jsonl"
"""The file of the records that could not be read."""
MAX_ENTRIES = 1000
"""Most sources that are recorded each by itself."""
BATCH_FILES = 256
"""Files that a thread hashes at a time."""
FILTER_FILE = "corpus.filter.py.txt"
"""The source of `corpus.filter`."""
CLEANED_SCHEMA = pa.schema(
    [("text", pa.string()), ("id", pa.string()), ("meta", pa.string()), ("messages", pa.string())]
)
SECTIONS_PER_FILE = 4
"""From so many documents of a file on, `prepare` reports that sections of one text are in several splits."""
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
        encoding=corpus.encoding,
        skipped=skipped,
    )
    is_made = force != "yes" and (folder / MANIFEST).is_file()
    inputs = inspect_inputs(sources, open_manifest(folder) if is_made else {})
    _check_conversation_formats(corpus, inputs.sources)
    made_from = _describe_inputs(config.results("corpus"), corpus, inputs, evaluation_data)
    stage = Stage("prepare", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"prepare: done already: {format_path(folder)} ({open_manifest(folder)['documents']:,} documents)")
    else:
        source_splits = split_sources([source.name for source in inputs.sources], inputs.names, corpus)
        for line in [*describe_skipped(skipped), *source_splits.notes, *describe_layouts(sources, corpus)]:
            print(f"prepare: {line}")
        with stage.unfinished_folder() as unfinished, runner:
            counts, files = _build(corpus, runner, inputs, source_splits, unfinished, skipped, evaluation_data)
            inputs.check_unchanged()
            if corpus.filter and open_own_file(corpus.filter, "corpus.filter").described != made_from["corpus.filter"]:
                stage.discard()
                raise TextmillError(f"corpus.filter: {corpus.filter} changed meanwhile; run the command again")
            _remove_intermediate_files(unfinished, files)
            manifest_fields = {"documents": counts["kept"], "mtimes": inputs.mtimes}
            stage.write_manifest(unfinished, files, manifest_fields)
        ratios = [0.0] * len(corpus.split) if corpus.labels or source_splits.names else corpus.split
        print("\n".join([*format_account(counts, folder, ratios), *_describe_split(corpus, counts, inputs.sources)]))
    return folder


def _build(
    config: CorpusConfig,
    runner: Runner,
    inputs: Inputs,
    source_splits: SourceSplits,
    folder: Path,
    skipped: list[str],
    evaluation_data: list[EvaluationData],
) -> tuple[Counts, dict[str, Any]]:
    """Run both passes and the decisions between them; return the account and the manifest entry of every file."""
    if config.labels:
        labelled, files = build_labelled(config, config.labels, inputs.sources, inputs.accounts, source_splits, folder)
        labelled |= _account_of_files(inputs, source_splits, skipped)
        return labelled, files | {"account.json": write_json(folder / "account.json", labelled)}
    (folder / "work").mkdir(exist_ok=True)
    run = partial(_run, runner)
    tasks = _plan_tasks(inputs, config, folder)
    index = write_index(evaluation_data, folder / "work") if evaluation_data else None
    quality = _train_quality(config, folder / "work" / QUALITY_FILE) if config.quality_good else None

    read_counts = run(clean_chunk, tasks, "prepare: read and clean", "bytes")
    quarantine = write_bytes(folder / QUARANTINE, map(_quarantine_line, _read_bad_records(tasks)))
    if scans := [bad.source for bad in _read_bad_records(tasks) if bad.is_scan]:
        print(f"prepare: {describe_scans(scans)}")
    _check_quarantine(config.max_unreadable, folder / QUARANTINE, tasks, read_counts)

    names = (source.name for source in inputs.sources)
    decisions = decide_documents(tasks, dict(zip(names, source_splits.ratios, strict=True)), config, run)
    counts: Counts = _account_of_files(inputs, source_splits, skipped)
    if quality:
        counts["quality"] = quality
    if index:
        counts["contamination"] = drop_contaminated(tasks, decisions, evaluation_data, index)
    write_decisions(tasks, decisions)

    split_counts = run(write_chunk, tasks, "prepare: split and write", "bytes")
    decided = map(_count_decisions, tasks, decisions.splits)
    counts |= build_account(inputs.accounts, chain((one["sources"] for one in read_counts), decided), split_counts)
    if by_name := _count_by_name(tasks, split_counts):
        counts["by_name"] = by_name
    if not counts["kept"]:
        raise TextmillError(_describe_nothing_kept(tasks, counts, config.min_chars))
    files = {"account.json": write_json(folder / "account.json", counts), QUARANTINE: quarantine}
    if config.filter:  # to be read; nothing executes it
        files[FILTER_FILE] = write_bytes(folder / FILTER_FILE, [Path(config.filter).read_bytes()])
    files |= {path.name: manifest_entry(path) for path in list_shards(folder, "dropped")}
    for splits in split_counts:
        for split in splits.values():
            entry = dict(split["file"])
            files[entry.pop("name")] = entry
    return counts, files


def _train_quality(config: CorpusConfig, path: Path) -> Counts:
    """Train the quality filter and write its weights for the workers; return how well it judges held-out samples."""
    good, bad = (_read_samples(sources, config) for sources in _find_quality_sources(config).values())
    weights, figures = train_quality(good, bad)
    save_quality(weights, path)
    print(f"prepare: quality filter: {figures}")
    return asdict(figures)


def _find_quality_sources(config: CorpusConfig) -> dict[str, list[Source]]:
    """The sources of good samples and of bad ones, by setting."""
    entries = {"quality_good": config.quality_good, "quality_bad": config.quality_bad}
    return {
        name: find_sources(some, encoding=config.encoding, setting=f"corpus.{name}") for name, some in entries.items()
    }


def _read_samples(sources: Sequence[Source], config: CorpusConfig) -> list[str]:
    """The first texts of sources, after the rules."""
    chunks = split_into_chunks(sources, config.documents)
    records = chain.from_iterable(read_records(chunk, config) for chunk in chunks)
    cleaner = Cleaner(CorpusConfig(rules=config.rules))
    texts = (cleaner.clean(record.text) for record in records if isinstance(record, Document))
    return list(islice((text for text in texts if text), MAX_SAMPLES))


def _plan_tasks(inputs: Inputs, config: CorpusConfig, folder: Path) -> list[ChunkTask]:
    sizes = [state.bytes for state in inputs.states]
    groups = group_chunks(_split_inputs(inputs.sources, sizes, config), sum(sizes))
    account_of = dict(zip((source.name for source in inputs.sources), inputs.accounts, strict=True))
    return [
        ChunkTask(number, tuple(group), tuple(account_of[chunk.source.name] for chunk in group), config, folder)
        for number, group in enumerate(groups)
    ]


def _split_inputs(sources: Sequence[Source], sizes: Sequence[int], config: CorpusConfig) -> list[SourceChunk]:
    """The chunks of all sources, of some of them only a sample; sources of a name follow each other."""
    chunks: list[SourceChunk] = []
    for name, members in itertools.groupby(zip(sources, sizes, strict=True), key=lambda pair: pair[0].group):
        group, group_sizes = zip(*members, strict=True)
        if name and (entry := config.named_sources[name]).is_sampled:
            chunks += sample_chunks(group, group_sizes, config.documents, entry.share_of(sum(group_sizes)))
        else:
            chunks += split_into_chunks(group, config.documents, group_sizes, chunk_bytes_of(sum(sizes)))
    return chunks


def _account_of_files(inputs: Inputs, source_splits: SourceSplits, skipped: list[str]) -> Counts:
    """The files that were not read, by reason, and those that belong to a split."""
    splits: dict[str, dict[str, None]] = {}
    for source, account in zip(inputs.sources, inputs.accounts, strict=True):
        if split := source_splits.names.get(source.name):
            splits.setdefault(account, {})[split] = None
    return {
        "skipped_files": group_skipped(skipped),
        "source_splits": {account: ", ".join(found) for account, found in splits.items()},
        "split_files": dict(Counter(source_splits.names.values())),
    }


def _count_by_name(tasks: Sequence[ChunkTask], split_counts: Sequence[Counts]) -> Counts:
    """By the names of `corpus.sources`: the numbers of their shards, and what each split has; without names nothing."""
    by_name: Counts = {}
    for task, splits in zip(tasks, split_counts, strict=True):
        if name := task.chunks[0].source.group:
            source = by_name.setdefault(name, {"shards": []} | {split: dict.fromkeys(AMOUNTS, 0) for split in SPLITS})
            source["shards"].append(task.number)
            for split, amounts in splits.items():
                for key in AMOUNTS:
                    source[split][key] += amounts[key]
    return by_name


def _count_decisions(task: ChunkTask, split_of_row: NDArray[np.int8]) -> dict[str, Counts]:
    """By the account of the sources: how many of the cleaned documents are kept, and how many each rule dropped."""
    accounts = list(dict.fromkeys(task.accounts))
    numbers = {account: number for number, account in enumerate(accounts)}
    account_of_row = np.repeat([numbers[account] for account in task.accounts], task.read_rows())

    def count(is_counted: NDArray[np.bool_]) -> list[int]:
        found: list[int] = np.bincount(account_of_row[is_counted], minlength=len(accounts)).tolist()
        return found

    kept = count(split_of_row >= 0)
    dropped = {rule: count(split_of_row == code) for rule, code in DROPPED.items()}
    return {
        account: {"kept": kept[number], "dropped": {rule: counts[number] for rule, counts in dropped.items()}}
        for account, number in numbers.items()
    }


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
    is_nfc = not {"unicode", "compatibility"}.isdisjoint(config.rules)
    quality = open_quality(task.folder / "work" / QUALITY_FILE) if config.quality_good else None
    by_account = {account: _SourceCounts(Cleaner(config, quality)) for account in task.accounts}
    rows = []
    damaged: dict[int, Damage] = {}
    by_position = config.split_by == "position"
    cuts = array("q")
    with ExitStack() as stack:
        bad_records = stack.enter_context(atomic_writer(task.path("bad")))
        digests = stack.enter_context(atomic_writer(task.path("digests")))
        cleaned = stack.enter_context(new_row_shard(task.path("parquet"), CLEANED_SCHEMA, "lz4"))
        filtered = (
            stack.enter_context(new_row_shard(task.path("filtered"), FILTERED_SCHEMA, "lz4"))
            if config.keep_dropped
            else None
        )
        fields = stack.enter_context(atomic_writer(task.path("fields"))) if ":" in config.split_by else None
        for number, (chunk, account) in enumerate(zip(task.chunks, task.accounts, strict=True)):
            amounts = by_account[account]
            rows.append(0)
            before = ""
            records = misfits = 0
            for record in read_records(chunk, config):
                amounts.records += 1
                records += 1
                if isinstance(record, BadRecord):
                    misfits += record.reason.startswith(NOT_UTF8)
                    if record.damage and not chunk.source.damage:
                        damaged[number] = record.damage
                    amounts.quarantined += 1
                    amounts.quarantined_bytes += max(record.bytes_lost, len(record.raw))
                    line = json.dumps([number, record.place, record.reason, record.raw.hex()])
                    bad_records.write(line.encode() + b"\n")
                    continue
                amounts.characters += len(record.text)
                text, messages = _clean(record, amounts.cleaner, config)
                if text is not None:
                    # Two conversations with the same text are duplicates only if the roles are the same too.
                    digest = text_digest(messages or text, is_nfc=is_nfc)
                    digests.write(digest)
                    if fields:
                        fields.write(field_digest(record.meta, config.split_by) or digest)
                    if by_position:
                        begins = is_new_record(chunk, record.id, before, rows[-1] == 0)
                        before = record.id
                        cuts.append(-len(text) if begins else len(text))
                    size = len(text) + len(record.meta or "") + len(messages or "")
                    cleaned.add((text, record.id, record.meta, messages), size)
                    rows[-1] += 1
                    amounts.garbled += is_garbled(record.text)
                elif filtered is not None:
                    filtered.add((record.text, record.id, number, amounts.cleaner.dropped_by), len(record.text))
            # In an older encoding most bytes are characters: where some are not, the others are wrong ones.
            is_older = not chunk.source.encoding.startswith(("auto", "utf", "ascii"))
            if is_older and not chunk.source.damage and misfits > config.max_unreadable * records:
                share = f"{misfits:,} of {records:,} records"
                reason = f"the file is not in corpus.encoding={chunk.source.encoding}: {share} have other bytes"
                damaged[number] = Damage(0, chunk.stop - chunk.start, f"{reason}; convert it to UTF-8")
    if damaged:  # what was read before the damage was found may be wrong
        return clean_chunk(task.without_damage(damaged))
    write_bytes(task.path("rows"), [np.array(rows, np.int64).tobytes()])
    if by_position:
        write_bytes(task.path("cuts"), [cuts.tobytes()])
    if config.decontaminate:
        find_hits(task)
    text_bytes = sum(amounts.characters + amounts.quarantined_bytes for amounts in by_account.values())
    counts = {
        "bytes": max(task.size, text_bytes),  # a compressed file has more than it stores
        "sources": {account: amounts.to_json() for account, amounts in by_account.items()},
    }
    write_json(task.path("read.json"), counts)
    return counts


@dataclass
class _SourceCounts:
    """What happened in pass 1 to the records of a source, or of the sources of a folder."""

    cleaner: Cleaner
    records: int = 0
    quarantined: int = 0
    quarantined_bytes: int = 0
    characters: int = 0
    garbled: int = 0

    def to_json(self) -> Counts:
        return {
            "records": self.records,
            "changed": dict(sorted(self.cleaner.changed.items())),
            "dropped": dict(sorted(self.cleaner.dropped.items())),
            "quarantined": self.quarantined,
            "quarantined_bytes": self.quarantined_bytes,
            "garbled": self.garbled,
        }


def _clean(record: Document, cleaner: Cleaner, config: CorpusConfig) -> tuple[str | None, str | None]:
    """The cleaned text, and the turns of a conversation as JSON; None and None if a filter drops it."""
    if record.turns is not None:
        turns = cleaner.clean_turns(record.turns, record.url, record.meta)
        return (None, None) if turns is None else ("\n".join(text for _, text in turns), turns_to_json(turns))
    text = cleaner.clean(record.text, record.url, record.meta)
    split_lines = SENTENCE_SPLITTERS.get(config.sentences)
    return split_lines(text) if split_lines and text is not None else text, None


# Records that could not be read


def _read_bad_records(tasks: list[ChunkTask]) -> Iterator[BadRecord]:
    return chain.from_iterable(task.read_bad_records() for task in tasks)


def _quarantine_line(bad: BadRecord) -> bytes:
    raw = bad.raw.decode(errors="backslashreplace")
    row = {"file": bad.source, "place": bad.place, "reason": bad.reason, "raw": raw}
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _check_quarantine(
    max_unreadable: float, path: Path, tasks: list[ChunkTask], counts_by_chunk: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse to go on if too large a part of the records, or of the bytes, is unreadable; `path`: where they are."""
    names = ("records", "quarantined", "quarantined_bytes")
    sources = [counts for chunk in counts_by_chunk for counts in chunk["sources"].values()]
    total = {name: sum(counts[name] for counts in sources) for name in names}
    total["bytes"] = sum(chunk["bytes"] for chunk in counts_by_chunk)
    if total["quarantined"] > max_unreadable * total["records"]:
        amount = f"{total['quarantined']:,} of {total['records']:,} records"
    elif total["quarantined_bytes"] > max_unreadable * total["bytes"]:
        amount = f"{total['quarantined_bytes']:,} of {total['bytes']:,} bytes"
    else:
        return
    first = str(next(_read_bad_records(tasks), ""))
    # A guess from all files is surer than one from a record.
    if NOT_UTF8 in first and (
        encodings := find_older_encodings([chunk.source for task in tasks for chunk in task.chunks])
    ):
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
    split_of_row = task.read_splits()
    present = {split: index for index, split in enumerate(SPLITS) if (split_of_row == index).any()}
    splits = {split: dict.fromkeys(AMOUNTS, 0) for split in present}
    names = {split: shard_name(split, task.number) for split in present}
    source_names = pa.array(task.source_names, pa.string())
    source_of_row = task.sources_of_rows()
    schema = CHAT_SCHEMA if task.config.chat else SCHEMA
    with ExitStack() as stack:
        shards = {split: stack.enter_context(new_shard(task.folder / name, schema)) for split, name in names.items()}
        for first_row, table in task.read_cleaned():
            split_of_document = split_of_row[first_row : first_row + table.num_rows]
            source = source_names.take(pa.array(source_of_row[first_row : first_row + table.num_rows]))
            table = table.append_column("source", source)
            for split, index in present.items():
                documents = table.filter(pa.array(split_of_document == index))
                texts = documents.column("text")
                splits[split]["documents"] += len(texts)
                splits[split]["bytes"] += pc.sum(pc.binary_length(texts)).as_py() or 0
                splits[split]["characters"] += pc.sum(pc.utf8_length(texts)).as_py() or 0
                shards[split].add(documents.select(schema.names))
    for split, name in names.items():
        splits[split]["file"] = {"name": name, **manifest_entry(task.folder / name)}
    if task.config.keep_dropped:
        write_dropped(task)
    write_json(task.path("written.json"), splits)
    return splits


# What decides the result, and whether it changed


def _describe_inputs(
    settings: dict[str, Any], config: CorpusConfig, inputs: Inputs, evaluation_data: Sequence[EvaluationData]
) -> dict[str, Any]:
    """The settings and input checksums that decide the result; the manifest records them."""
    # Of files their content matters, not how they are named.
    left_out: tuple[str, ...] = ("corpus.sources", "corpus.decontaminate", "corpus.quality_")
    if config.dedup != "near":
        left_out += ("corpus.dedup_",)
    settings = {key: value for key, value in settings.items() if not key.startswith(left_out)}
    if evaluation_data:
        settings["corpus.decontaminate"] = describe_data(evaluation_data)
    for key, sources in _find_quality_sources(config).items() if config.quality_good else ():
        settings |= {f"{key}.{name}": value for name, value in inspect_inputs(sources, {}).describe().items()}
    if config.filter:
        settings["corpus.filter"] = open_own_file(config.filter, "corpus.filter", "keep").described
    for name, entry in config.named_sources.items():
        settings |= {f"corpus.sources.{name}.sample": [entry.sample, entry.limit]} if entry.is_sampled else {}
    settings["corpus.rules"] = sorted(config.rules)  # rules always run in the same order
    return settings | {f"inputs.{name}": value for name, value in inputs.describe().items()}


def may_have_conversations(source: Source) -> bool:
    """Whether `corpus.chat` can read a source."""
    return source.format in (*FIELD_FORMATS, "mongo")


def _check_conversation_formats(config: CorpusConfig, sources: Sequence[Source]) -> None:
    plain_sources = [source.name for source in sources if not may_have_conversations(source)]
    if config.chat and plain_sources:
        raise TextmillError(
            f"corpus.chat: {plain_sources[0]} has no fields that could hold a conversation; "
            f"use JSON, CSV, Parquet or Arrow files or MongoDB, or remove corpus.chat"
        )


def _remove_intermediate_files(folder: Path, files: dict[str, Any]) -> None:
    """Delete the intermediate files and unfinished files of a killed run."""
    for path in sorted(folder.iterdir()):
        if path.name not in files and path.name != MADE_FROM:  # also removes what an interrupted removal left
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)


# The sources as they are when the command starts: their states and checksums, which show later whether they changed.
# Each is recorded by itself, in the manifest and in account.json. If there are many, a folder of them is one entry,
# such as `texts/a/*`: a million files make no manifest of a million lines.


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

    @cached_property
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
        pairs = list(zip(self.entries, self.sources, strict=True))
        keys = {f"{entry}.text_key": source.text_key for entry, source in pairs if source.text_key}
        return self.checksums | keys | {f"{entry}.name": source.group for entry, source in pairs if source.group}

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
    for entry, group in groupby(zip(new, hashes, strict=True), key=lambda item: entries[item[0]]):
        if are_folders:
            checksums[entry]["sha256"] = _hash_lines(
                f"{names[number]} {_settings_of(sources[number])} {found_hash}" for number, found_hash in group
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
    for depth in count(1):
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
    return [hash_file(source.address) if state.fingerprint is None else state.fingerprint for source, state in batch]


def _settings_of(source: Source) -> str:
    """What its entry of `corpus.sources` says: the field with its text, and its name if it has one."""
    return f"{source.text_key} {source.group}".rstrip()


def _hash_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


# Messages


def _describe_split(config: CorpusConfig, counts: Counts, sources: Sequence[Source]) -> list[str]:
    """A line if documents are sections of longer texts, and their hashes mix the splits."""
    is_cut = config.cut_records or (
        config.documents == "section" and all(one.format in ONE_TEXT_FORMATS for one in sources)
    )
    if config.split_by != "document" or not is_cut or counts["source_splits"] or not any(config.split[1:]):
        return []
    if counts["kept"] < SECTIONS_PER_FILE * counts["files"]:
        return []
    return [
        "split: valid and test have sections from between those of train, so their loss looks better than that of "
        "other text; set corpus.split_by=position (or file, if there are many files)"
    ]


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
