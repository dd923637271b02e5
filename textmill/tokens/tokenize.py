"""The command tokenize: encodes every document of the corpus as token ids, one token store per split.

The corpus is Parquet shards. A task encodes some row groups of one shard into a small token store (encoding.py);
a runner maps tasks over processes; at the end the small stores of a split are joined in order. There are two encoders
(vocabulary/encoders.py): a fast one, and the reference, which is used if they differ on a sample of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.shards import count_group_bytes, list_shards, read_groups
from textmill.errors import TextmillError, failed_work, warn
from textmill.runners import open_runner
from textmill.storage.files import format_path, manifest_entry, read_json, remove_folder, write_bytes
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.batches.features import plan_feature_files, write_feature_file
from textmill.tokens.bert_examples import EXAMPLE_SPANS, plan_example_files, write_example_file
from textmill.tokens.encoding import COLUMNS, COUNT_NAMES, DocumentFormat, EncodingTask, encode_task
from textmill.tokens.existing_tokens import tokenize_existing
from textmill.tokens.labelled import tokenize_labelled
from textmill.tokens.lineage import LineageWriter, lineage_path
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
from textmill.tokens.vocabulary.fitting import check_fitted, fit_tokenizer
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
    _check_sentences(config, source)
    if config.tokens.kind == "tfrecord" and config.train.length is None:
        raise TextmillError(
            "train.length: is not set, and tokens.kind=tfrecord writes samples of it; set it, such as 128"
        )
    chat = bool(source["made_from"].get("corpus.chat"))
    if not (config.folder_of("tokenizer") / MANIFEST).is_file():
        print("tokenize: no tokenizer yet; fitting one first")
        fit_tokenizer(config)
    check_fitted(config)
    tokenizer = open_manifest(config.folder_of("tokenizer"), "fit-tokenizer")
    made_from = {**config.results("tokens"), "corpus": source["fingerprint"], "tokenizer": tokenizer["tokenizer"]}
    if config.tokens.kind == "tfrecord":
        masked = {name: value for name, value in config.results("train").items() if name.startswith("train.masked.")}
        made_from |= {"train.length": config.train.length, "train.seed": config.train.seed, **masked}
    if chat:
        made_from["chat"] = dict(require_chat_template(config).turns)
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({_format_counts(open_manifest(folder)['splits'])})")
        return folder
    with stage.unfinished_folder() as part:
        tasks, counts = _encode_all(config, part / PARTS)
        splits: dict[str, Counts] = {split: _sum([counts[task] for task in tasks[split]]) for split in SPLITS}
        quarantine = write_bytes(part / "quarantine.jsonl", _quarantine_lines(counts))
        _check_quarantine(config, splits, part)
        _join(part, tasks, dtype_for(tokenizer["vocab"]), config.tokens.index_format, chat)
        suffixes = CHAT_SUFFIXES if chat else SUFFIXES
        names = [f"{split}.{suffix}" for split in SPLITS for suffix in suffixes]
        files = {name: manifest_entry(part / name) for name in names}
        files |= _write_rows(config, part)
        shared = {name: tokenizer[name] for name in ("tokenizer", "vocab", "end")}
        remove_folder(part / PARTS)
        stage.write_manifest(part, {**files, "quarantine.jsonl": quarantine}, {**shared, "splits": splits})
    print(f"tokenize: {format_path(folder)}: {_format_counts(splits)}")
    return folder


def _check_sentences(config: RunConfig, source: dict[str, Any]) -> None:
    if config.tokens.level == "sentence" and source["made_from"].get("corpus.sentences", "none") == "none":
        raise TextmillError(
            f"tokens.level=sentence: "
            f"the corpus in {format_path(config.folder_of('corpus'))} does not have one sentence per line; "
            "prepare it again with corpus.sentences=split (or lines, if it already has), or set tokens.level=document"
        )


def require_chat_template(config: RunConfig) -> TurnTemplates:
    """The chat template of the tokenizer; raises an error if conversations cannot be encoded with it."""
    if config.tokens.level == "sentence" or config.tokens.kind != "store":
        key = "level" if config.tokens.level == "sentence" else "kind"
        raise TextmillError(f"tokens.{key}: is for plain text, but the corpus has conversations; remove it")
    folder = config.folder_of("tokenizer")
    tokenizer = open_tokenizer(folder)
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


def _encode_all(config: RunConfig, folder: Path) -> tuple[Tasks, dict[EncodingTask, Counts]]:
    """Encode with the fast encoder and compare it with the reference in the background; fall back if they differ."""
    tokenizer = open_tokenizer(config.folder_of("tokenizer"))
    reference = ReferenceEncoder(tokenizer)
    if reason := why_not_fast(tokenizer):
        print(f"tokenize: using {reference.name}, which is slower than {FAST}: {reason}")
    else:
        tasks = _plan_tasks(config, folder, tokenizer, FAST)
        shards = [shard for split in SPLITS for shard in list_shards(config.folder_of("corpus"), split)]
        with ThreadPoolExecutor(1) as thread:
            comparison = thread.submit(_compare, config.folder_of("tokenizer"), reference, shards)
            counts = _run(config, tasks, comparison)
        if (difference := comparison.result()) is None:
            return tasks, counts
        warn(f"{difference}; falling back to {reference.name}, which takes longer")
    tasks = _plan_tasks(config, folder, tokenizer, REFERENCE)
    return tasks, _run(config, tasks)


def _compare(folder: Path, reference: Encoder, shards: list[Path]) -> str | None:
    """Compare the encoders on hard texts and on a sample of this corpus; None: no difference was found."""
    try:
        fast = open_encoder_in(folder, FAST)
    except (ImportError, ValueError) as error:
        return f"{FAST} cannot open this tokenizer ({error})"
    other = first_difference(fast, reference, _sample_texts(shards))
    return None if other is None else f"{fast.name} encodes {other.name} differently from {reference.name}"


def _plan_tasks(config: RunConfig, folder: Path, tokenizer: TextTokenizer, encoder: str) -> Tasks:
    """Divide the corpus into tasks of about TASK_BYTES, in order; each encoder has its own folder for the results."""
    parts = folder / f"{encoder}-{metadata.version(encoder)}"
    parts.mkdir(parents=True, exist_ok=True)
    chat = tokenizer.turn_tokens if open_manifest(config.folder_of("corpus"))["made_from"].get("corpus.chat") else None
    begin = begin_token(tokenizer) if config.tokens.prepend_begin and chat is None else None
    end = tokenizer.end if config.tokens.append_end and chat is None else None
    document_format = DocumentFormat(config.tokens.level, begin, end, dtype_for(tokenizer.vocab).name, chat)
    encoder_arguments = (config.folder_of("tokenizer"), tokenizer.fingerprint, encoder)
    tasks: Tasks = {split: [] for split in SPLITS}
    for split in SPLITS:
        for shard in list_shards(config.folder_of("corpus"), split):
            for groups in _group_ranges(count_group_bytes(shard)):
                prefix = parts / f"{shard.stem}-{groups.start:05d}"
                tasks[split].append(EncodingTask(shard, groups, prefix, *encoder_arguments, document_format))
    return tasks


def begin_token(tokenizer: TextTokenizer) -> int:
    """The token put before a document; a tokenizer without one, such as GPT-2's, uses the end-of-text token."""
    return tokenizer.end if tokenizer.begin is None else tokenizer.begin


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


def _run(config: RunConfig, tasks: Tasks, comparison: Future[str | None] | None = None) -> dict[EncodingTask, Counts]:
    """Run all tasks on the runner; return the counts of each. Stops early if the comparison finds a difference."""
    counts: dict[EncodingTask, Counts] = {}
    todo = [task for split in tasks.values() for task in split]
    total = sum(split["bytes"] for split in read_json(config.folder_of("corpus") / "account.json")["by_split"].values())
    try:
        with progress("tokenize", total=total, unit="bytes", second_unit="tokens") as bar:
            for task, result in zip(todo, open_runner(config.runner).map(encode_task, todo), strict=True):
                counts[task] = result
                bar.advance(result["bytes"], result["tokens"])
                if comparison and comparison.done() and comparison.result() is not None:
                    break
    except OSError as error:  # a full disk, a deleted file
        raise failed_work(f"tokenize: {error}; fix that and run it again: finished work is kept", error) from None
    return counts


def _sum(counts: list[Counts]) -> Counts:
    return {name: sum(task_counts[name] for task_counts in counts) for name in COUNT_NAMES}


def _quarantine_lines(counts: dict[EncodingTask, Counts]) -> Iterator[bytes]:
    for task, task_counts in counts.items():
        if task_counts["quarantined"]:
            yield task.path("quarantine.jsonl").read_bytes()


def _check_quarantine(config: RunConfig, splits: dict[str, Counts], part: Path) -> None:
    bad, good = (sum(counts[name] for counts in splits.values()) for name in ("quarantined", "documents"))
    if bad > config.corpus.max_unreadable * (bad + good):
        with open(part / "quarantine.jsonl", encoding="utf-8") as lines:
            first = next(lines).strip()
        raise TextmillError(
            f"tokenize: {bad:,} of {bad + good:,} documents cannot be encoded, more than corpus.max_unreadable="
            f"{config.corpus.max_unreadable:g}; the first: {first}; see {part / 'quarantine.jsonl'}; "
            f"use another tokenizer, or raise corpus.max_unreadable"
        )


def _join(part: Path, tasks: Tasks, dtype: np.dtype[Any], index_format: IndexFormat, chat: bool) -> None:
    """Join the results of each split, in the order of the corpus, into one store and one lineage file."""
    for split, split_tasks in tasks.items():
        with (
            StoreWriter(part / split, dtype, index_format, has_loss_mask=chat) as store,
            LineageWriter(lineage_path(part / split)) as lineage,
        ):
            for task in split_tasks:
                store.add_store(open_store(task.prefix))
                lineage.add_file(lineage_path(task.prefix))


def _write_rows(config: RunConfig, part: Path) -> dict[str, dict[str, Any]]:
    """With tokens.kind=features or tfrecord, write rows of the stores too; return length and checksum of each file."""
    tokenizer = config.folder_of("tokenizer")
    tasks: list[Any] = []
    if config.tokens.kind == "features":
        name = "features"
        what = f"rows of {config.tokens.features.max_length} tokens"
        write_file: Any = write_feature_file
        special = open_tokenizer(tokenizer).end
        rule = config.tokens.features
        for split in SPLITS:
            tasks += plan_feature_files(part, split, rule, has_end_token=config.tokens.append_end, special=special)
    elif config.tokens.kind == "tfrecord":
        name = "examples"
        what = f"examples of {config.train.length} tokens"
        write_file = write_example_file
        length = int(config.train.length or 0)
        for split in SPLITS:
            tasks += plan_example_files(part, split, tokenizer, config.train, length, config.tokens.tfrecord.epochs)
    else:
        return {}
    folder = part / config.tokens.kind
    folder.mkdir(exist_ok=True)
    for left in folder.glob("*.tmp-*"):  # left by a run that was killed
        left.unlink()
    with progress(f"tokenize: {name}", total=len(tasks), unit="files") as bar:
        rows = 0
        for count in open_runner(config.runner).map(write_file, tasks):
            rows += count
            bar.advance(1)
    print(f"tokenize: {rows:,} {what} in {len(tasks)} files of {folder.name}/")
    if config.tokens.kind == "tfrecord":
        remove_folder(part / EXAMPLE_SPANS)
    return {f"{folder.name}/{task.path.name}": manifest_entry(task.path) for task in tasks}


def _format_counts(splits: dict[str, Counts]) -> str:
    tokens = [f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"]]
    bad = sum(counts["quarantined"] for counts in splits.values())
    return ", ".join(tokens + ([f"{bad:,} documents quarantined"] if bad else []))
