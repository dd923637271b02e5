"""The command tokenize with `corpus.labels`: encodes every example, one token store with labels per split."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.labelled.example import Example, read_split
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, format_path, manifest_entry, read_json
from textmill.storage.progress import Bar, progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.labelled.encoding import ExampleEncoder
from textmill.tokens.lineage import LineageWriter, lineage_path
from textmill.tokens.shard_encoding import COUNT_NAMES
from textmill.tokens.store import dtype_for, labels_path
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.vocabulary.fitting import check_fitted, fit_tokenizer
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

SUFFIXES = ("bin", "idx", "labels", "lineage.parquet")
BATCH = 512
"""Examples that are encoded at the same time."""

Counts = dict[str, int]


def tokenize_labelled(config: RunConfig, task: str, force: Force = "no") -> Path:
    """Write the stores of all splits; return their folder."""
    folder = config.folder_of("tokens")
    corpus = config.folder_of("corpus")
    source = open_manifest(corpus, "prepare")
    if source["made_from"].get("corpus.labels") != task:
        raise TextmillError(f"{format_path(corpus)}: was made without corpus.labels={task}; run: textmill prepare")
    if not (config.folder_of("tokenizer") / MANIFEST).is_file():
        print("tokenize: no tokenizer yet; fitting one first")
        fit_tokenizer(config)
    check_fitted(config)
    tokenizer = open_manifest(config.folder_of("tokenizer"), "fit-tokenizer")
    labels = read_json(corpus / "account.json")["labels"]
    length = int(config.train.length or 0)
    overlap = config.tokens.overlap
    made_from = {
        "corpus": source["fingerprint"],
        "tokenizer": tokenizer["tokenizer"],
        "train.length": length,
        "tokens.overlap": overlap,
    }
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({_format_counts(open_manifest(folder)['splits'])})")
        return folder
    opened = open_tokenizer(config.folder_of("tokenizer"))
    encoder = ExampleEncoder(opened, task, length, overlap, labels["names"])
    with stage.unfinished_folder() as part:
        with progress("tokenize", total=source["documents"], unit="examples") as bar:
            splits: dict[str, Counts] = {split: _write_split(corpus, split, part, encoder, bar) for split in SPLITS}
        files = {
            f"{split}.{suffix}": manifest_entry(part / f"{split}.{suffix}") for split in SPLITS for suffix in SUFFIXES
        }
        facts: dict[str, Any] = {name: tokenizer[name] for name in ("tokenizer", "vocab", "end")}
        facts |= {"splits": splits, "labels": {"task": task, "names": labels["names"]}}
        stage.write_manifest(part, files, facts)
    print(f"tokenize: {format_path(folder)}: {_format_counts(splits)}")
    return folder


def _write_split(corpus: Path, split: Split, part: Path, encoder: ExampleEncoder, bar: Bar) -> Counts:
    """Write the store of a split, its labels and its lineage; return its counts."""
    counts = dict.fromkeys(COUNT_NAMES, 0) | {"examples": 0}
    with (
        StoreWriter(part / split, dtype_for(encoder.tokenizer.vocab)) as store,
        atomic_writer(labels_path(part / split)) as label_file,
        LineageWriter(lineage_path(part / split)) as lineage,
    ):
        for examples in _batches(read_split(corpus, split)):
            found = list(zip(examples, encoder.encode(examples), strict=True))
            samples = [sample for _, some in found for sample in some]
            places = [example for example, some in found for _ in some]
            store.add([sample.ids for sample in samples])
            label_file.write(np.concatenate([sample.labels for sample in samples]).data)
            lineage.add([example.source for example in places], [example.place for example in places])
            counts["examples"] += len(examples)
            counts["documents"] += len(samples)
            counts["tokens"] += sum(len(sample.ids) for sample in samples)
            bar.advance(len(examples))
    return counts


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while block := list(islice(examples, BATCH)):
        yield block


def _format_counts(splits: dict[str, Counts]) -> str:
    return ", ".join(
        f"{split} {counts['examples']:,} examples in {counts['documents']:,} samples"
        for split, counts in splits.items()
        if counts["documents"]
    )
