"""The command tokenize: encodes every document of the corpus as token ids, one token store per split.

The corpus is Parquet shards. A task encodes some row groups of one shard into a small token store (encoding.py);
a runner maps tasks over processes; at the end the small stores of a split are joined in order. There are two encoders
(vocabulary/encoders.py): a fast one, and the reference, which is used if they differ on a sample of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig, TokensConfig, TrainConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.shards import count_group_bytes, list_shards, read_groups, shard_number
from textmill.errors import TextmillError, failed_work, warn
from textmill.runners import Runner, open_runner
from textmill.storage.files import format_path, manifest_entry, read_json, remove_folder, write_bytes
from textmill.storage.progress import progress
from textmill.storage.stages import Force, Stage, open_manifest
from textmill.tokens.batches.features import FeatureFile, plan_feature_files
from textmill.tokens.bert_examples import EXAMPLE_SPANS, ExampleFile, plan_example_files
from textmill.tokens.encoding import COLUMNS, COUNT_NAMES, DocumentFormat, EncodingTask, encode_task, format_counts
from textmill.tokens.existing_tokens import tokenize_existing
from textmill.tokens.labelled import tokenize_labelled
from textmill.tokens.lineage import lineage_path, new_lineage
from textmill.tokens.store import IndexFormat, StoreWriter, dtype_for, open_store
from textmill.tokens.vocabulary.encoders import (
    FAST,
    REFERENCE,
    Encoder,
    NamedText,
    ReferenceEncoder,
    first_difference,
    open_encoder_in,
    why_not_fast,
)
from textmill.tokens.vocabulary.fitting import require_tokenizer
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, TurnTemplates, open_tokenizer

PARTS = "parts"
TASK_BYTES = 32 << 20
"""About how many bytes of the corpus one task has: small, so that workers finish at nearly the same time."""
SUFFIXES = ("bin", "idx", "lineage.parquet")
CHAT_SUFFIXES = (*SUFFIXES, "mask")
SAMPLED = (256 << 10, 4 << 20)
"""Least and most bytes of the corpus on which the encoders are compared; in between, a thousandth of the corpus."""
WINDOW = 2000
"""Characters compared per document: many short texts find more differences than one long text."""
ROWS = 16
"""Consecutive documents compared at each sampled place of the corpus."""

Counts = dict[str, int]
Tasks = dict[Split, list[EncodingTask]]


def tokenize(config: RunConfig, force: Force = "no") -> Path:
    """Write the token stores of all splits; return their folder."""
    if config.tokens.use:
        return tokenize_existing(config, force)
    if config.corpus.labels:
        return tokenize_labelled(config, config.corpus.labels, force)
    folder = config.folder_of("tokens")
    corpus = config.folder_of("corpus")
    source = open_manifest(corpus, "prepare")
    if config.tokens.level == "sentence" and source["made_from"].get("corpus.sentences", "none") == "none":
        raise TextmillError(
            f"tokens.level=sentence: the corpus in {format_path(corpus)} does not have one sentence per line; "
            "prepare it again with corpus.sentences=split (or lines, if it already has), or set tokens.level=document"
        )
    if config.tokens.kind == "tfrecord" and config.train.length is None:
        raise TextmillError(
            "train.length: is not set, and tokens.kind=tfrecord writes samples of it; set it, such as 128"
        )
    chat = bool(source["made_from"].get("corpus.chat"))
    manifest = require_tokenizer(config)
    tokenizer_folder = config.folder_of("tokenizer")
    tokenizer = open_tokenizer(tokenizer_folder)
    made_from = {**config.results("tokens"), "corpus": source["fingerprint"], "tokenizer": manifest["tokenizer"]}
    if config.tokens.kind == "tfrecord":
        masked = {name: value for name, value in config.results("train").items() if name.startswith("train.masked.")}
        made_from |= {"train.length": config.train.length, "train.seed": config.train.seed, **masked}
    if chat:
        made_from["chat"] = dict(_require_chat_template(config.tokens, tokenizer, tokenizer_folder).turns)
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({format_counts(open_manifest(folder)['splits'])})")
        return folder
    # A tokenizer without a begin token, such as GPT-2's, uses the end-of-text token.
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    document_format = DocumentFormat(
        level=config.tokens.level,
        bos_id=begin if config.tokens.prepend_begin and not chat else None,
        eos_id=tokenizer.eos_id if config.tokens.append_end and not chat else None,
        dtype=dtype_for(tokenizer.vocab).name,
        chat=tokenizer.turn_tokens if chat else None,
    )
    runner = open_runner(config.runner)
    with stage.unfinished_folder() as part:
        tasks, counts = _encode_all(corpus, tokenizer_folder, tokenizer, document_format, part / PARTS, runner)
        splits: dict[str, Counts] = {split: _sum([counts[task] for task in tasks[split]]) for split in SPLITS}
        quarantine = write_bytes(part / "quarantine.jsonl", _quarantine_lines(counts))
        _check_quarantine(splits, config.corpus.max_unreadable, part / "quarantine.jsonl")
        _join(part, tasks, dtype_for(tokenizer.vocab), config.tokens.index_format, chat)
        suffixes = CHAT_SUFFIXES if chat else SUFFIXES
        names = [f"{split}.{suffix}" for split in SPLITS for suffix in suffixes]
        files = {name: manifest_entry(part / name) for name in names}
        if config.tokens.kind != "store":
            files |= _write_rows(config.tokens, config.train, tokenizer_folder, tokenizer.eos_id, part, runner)
        shared: dict[str, Any] = {name: manifest[name] for name in ("tokenizer", "vocab", "eos_id")}
        if by_name := read_json(corpus / "account.json").get("by_name"):
            shared["sources"] = _count_sources(by_name, tasks, counts)
        remove_folder(part / PARTS)
        stage.write_manifest(part, {**files, "quarantine.jsonl": quarantine}, {**shared, "splits": splits})
    print(f"tokenize: {format_path(folder)}: {format_counts(splits)}")
    return folder


def _count_sources(
    by_name: dict[str, Any], tasks: Tasks, counts: dict[EncodingTask, Counts]
) -> dict[str, dict[Split, Counts]]:
    """By the names of `corpus.sources` what each split has of them; its documents are in the order of the names."""
    return {
        name: {
            split: _sum([counts[task] for task in tasks[split] if shard_number(task.shard) in set(source["shards"])])
            for split in SPLITS
        }
        for name, source in by_name.items()
    }


def _require_chat_template(tokens: TokensConfig, tokenizer: TextTokenizer, folder: Path) -> TurnTemplates:
    """The chat template of the tokenizer; raises an error if conversations cannot be encoded with it."""
    if tokens.level == "sentence" or tokens.kind != "store":
        key = "level" if tokens.level == "sentence" else "kind"
        raise TextmillError(f"tokens.{key}: is for plain text, but the corpus has conversations; remove it")
    if tokenizer.chat is not None:
        return tokenizer.chat
    problem = "is missing"
    if tokenizer.jinja is not None:
        problem = "was not written by textmill"
        if "add_generation_prompt" not in tokenizer.jinja:
            problem += " and has no generation prompt"
    raise TextmillError(
        f"{format_path(folder)}: the corpus has conversations, but this tokenizer's chat template {problem}; "
        f"set tokenizer.chat=default or write tokenizer.chat_turns, then run: textmill fit-tokenizer WHERE --force"
    )


def _encode_all(
    corpus: Path,
    tokenizer_folder: Path,
    tokenizer: TextTokenizer,
    document_format: DocumentFormat,
    folder: Path,
    runner: Runner,
) -> tuple[Tasks, dict[EncodingTask, Counts]]:
    """Encode with the fast encoder, unless it gives other ids than the reference on a sample."""
    shards = {split: list_shards(corpus, split) for split in SPLITS}
    total = sum(split["bytes"] for split in read_json(corpus / "account.json")["by_split"].values())

    reference = ReferenceEncoder(tokenizer)
    encoder = REFERENCE
    if reason := why_not_fast(tokenizer):
        print(f"tokenize: using {reference.name}, which is slower than {FAST}: {reason}")
    elif difference := _compare(tokenizer_folder, reference, [*chain(*shards.values())]):
        warn(f"{difference}; falling back to {reference.name}, which takes longer")
    else:
        encoder = FAST
    tasks = _plan_tasks(shards, folder, tokenizer_folder, tokenizer.fingerprint, encoder, document_format)
    return tasks, _run(tasks, total, runner)


def _compare(folder: Path, reference: Encoder, shards: list[Path]) -> str | None:
    """Compare the encoders on hard texts and on a sample of this corpus; None: no difference was found."""
    try:
        fast = open_encoder_in(folder, FAST)
    except (ImportError, ValueError) as error:
        return f"{FAST} cannot open this tokenizer ({error})"
    other = first_difference(fast, reference, _sample_texts(shards))
    return None if other is None else f"{fast.name} encodes {other.name} differently from {reference.name}"


def _plan_tasks(
    shards: dict[Split, list[Path]],
    folder: Path,
    tokenizer: Path,
    fingerprint: str,
    encoder: str,
    document_format: DocumentFormat,
) -> Tasks:
    """Divide the corpus into tasks of about TASK_BYTES, in order; each encoder has its own folder for the results."""
    parts = folder / f"{encoder}-{metadata.version(encoder)}"
    parts.mkdir(parents=True, exist_ok=True)
    tasks: Tasks = {split: [] for split in SPLITS}
    for split in SPLITS:
        for shard in shards[split]:
            for groups in _group_ranges(count_group_bytes(shard)):
                prefix = parts / f"{shard.stem}-{groups.start:05d}"
                tasks[split].append(
                    EncodingTask(shard, groups, prefix, tokenizer, fingerprint, encoder, document_format)
                )
    return tasks


def _group_ranges(sizes: list[int]) -> Iterator[range]:
    """Ranges of row groups that have about TASK_BYTES together, from the bytes of each row group."""
    start = total = 0
    for group, size in enumerate(sizes):
        if total and total + size > TASK_BYTES:
            yield range(start, group)
            start = group
            total = 0
        total += size
    if sizes:
        yield range(start, len(sizes))


def _sample_texts(shards: list[Path]) -> Iterator[NamedText]:
    """Parts of documents from evenly spaced places of the corpus; the same in every run."""
    places = [(shard, group) for shard in shards for group in range(len(count_group_bytes(shard)))]
    least, most = SAMPLED
    sample_bytes = min(max(sum(shard.stat().st_size for shard in shards) // 1000, least), most)
    count = min(len(places), max(1, sample_bytes // (ROWS * WINDOW)))
    for number in range(count):
        shard, group = places[number * len(places) // count]
        (table,) = read_groups(shard, [group], COLUMNS, max_rows=ROWS)
        for row, (text, source, name) in enumerate(zip(*(column.to_pylist() for column in table.columns), strict=True)):
            start = (len(text) - WINDOW) * row // ROWS if len(text) > WINDOW else 0
            yield NamedText(f"{source}, {name},", text[start : start + WINDOW])


def _run(tasks: Tasks, total: int, runner: Runner) -> dict[EncodingTask, Counts]:
    """Run all tasks on the runner; return the counts of each."""
    counts: dict[EncodingTask, Counts] = {}
    todo = [task for split in tasks.values() for task in split]
    try:
        with progress("tokenize", total=total, unit="bytes", second_unit="tokens") as bar:
            for task, result in zip(todo, runner.map(encode_task, todo), strict=True):
                counts[task] = result
                bar.advance(result["bytes"], result["tokens"])
    except OSError as error:  # a full disk, a deleted file
        raise failed_work(f"tokenize: {error}; fix that and run it again: finished work is kept", error) from None
    return counts


def _sum(counts: list[Counts]) -> Counts:
    return {name: sum(task_counts[name] for task_counts in counts) for name in COUNT_NAMES}


def _quarantine_lines(counts: dict[EncodingTask, Counts]) -> Iterator[bytes]:
    for task, task_counts in counts.items():
        if task_counts["quarantined"]:
            yield task.path("quarantine.jsonl").read_bytes()


def _check_quarantine(splits: dict[str, Counts], max_unreadable: float, path: Path) -> None:
    bad, good = (sum(counts[name] for counts in splits.values()) for name in ("quarantined", "documents"))
    if bad > max_unreadable * (bad + good):
        with open(path, encoding="utf-8") as lines:
            first = next(lines).strip()
        raise TextmillError(
            f"tokenize: {bad:,} of {bad + good:,} documents cannot be encoded, more than corpus.max_unreadable="
            f"{max_unreadable:g}; the first: {first}; see {path}; "
            f"use another tokenizer, or raise corpus.max_unreadable"
        )


def _join(part: Path, tasks: Tasks, dtype: np.dtype[Any], index_format: IndexFormat, chat: bool) -> None:
    """Join the results of each split, in the order of the corpus, into one store and one lineage file."""
    for split, split_tasks in tasks.items():
        with (
            StoreWriter(part / split, dtype, index_format, has_loss_mask=chat) as store,
            new_lineage(lineage_path(part / split)) as lineage,
        ):
            for task in split_tasks:
                store.add_store(open_store(task.prefix))
                lineage.add_file(lineage_path(task.prefix))


def _write_rows(
    tokens: TokensConfig, train: TrainConfig, tokenizer: Path, special: int, part: Path, runner: Runner
) -> dict[str, dict[str, Any]]:
    """With tokens.kind=features or tfrecord, write rows of the stores too; return length and checksum of each file."""
    folder = part / tokens.kind
    folder.mkdir(exist_ok=True)
    tasks: list[FeatureFile | ExampleFile] = []
    for split in SPLITS:
        if tokens.kind == "features":
            tasks += plan_feature_files(folder, part / split, tokens.features, tokens.append_end, special)
        else:
            tasks += plan_example_files(folder, part / split, tokenizer, train, tokens.tfrecord_epochs)
    what, length = ("rows", tokens.features.max_length) if tokens.kind == "features" else ("examples", train.length)
    rows = 0
    with progress(f"tokenize: {what}", total=len(tasks), unit="files") as bar:
        for count in runner.map(write_row_file, tasks):
            rows += count
            bar.advance(1)
    print(f"tokenize: {rows:,} {what} of {length} tokens in {len(tasks)} files of {folder.name}/")
    remove_folder(part / EXAMPLE_SPANS)
    return {f"{folder.name}/{task.path.name}": manifest_entry(task.path) for task in tasks}


def write_row_file(task: FeatureFile | ExampleFile) -> int:
    """Write the file of a task unless it exists already; return its number of rows."""
    return task.write()
