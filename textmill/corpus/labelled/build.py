"""Builds a corpus of examples with labels: reads all sources, decides the splits and the names of the labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from textmill.config import CorpusConfig
from textmill.corpus.accounts import Counts, build_account
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.labelled.example import ANSWERS, SEQUENCES, WORDS, Example
from textmill.corpus.labelled.readers import read_examples
from textmill.corpus.shards import SCHEMA, ShardWriter, new_shard, shard_name
from textmill.corpus.source import Source
from textmill.corpus.split import assign_split, declared_splits, text_digest
from textmill.errors import TextmillError
from textmill.storage.files import manifest_entry, write_json

BATCH_ROWS = 1024
COUNTED = ("documents", "bytes", "characters")
MANY_LABELS = 100
"""From this many labels on, as many labels as half of the examples mean that the key is wrong."""


class LabelSet:
    """The labels of the train split, and where others occur."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.elsewhere: dict[str, str] = {}
        """Where a label first occurs outside of the train split."""
        self.ids: set[str] = set()
        self.train_examples = 0

    def add(self, example: Example, split: Split) -> None:
        """Count the labels of an example; refuse an example without labels, and a second question with its id."""
        if not example.has_labels:
            raise TextmillError(f"{example.where}: has no label; add it")
        if example.id and example.id in self.ids:
            raise TextmillError(f"{example.where}: the id '{example.id}' occurs twice; each question needs its own")
        if example.id:
            self.ids.add(example.id)
        self.train_examples += split == "train"
        for label in example.labels or ():
            if split == "train":
                self.counts[label] += 1
            else:
                self.elsewhere.setdefault(label, f"{example.where}: the {split} split")

    def names(self, task: str) -> list[str]:
        """The names in the order of their numbers; numbers are sorted as numbers."""
        if not self.train_examples:
            raise TextmillError("corpus.sources: the train split is empty; give it more of corpus.split, or a file")
        if task == ANSWERS:
            return []
        if len(self.counts) < 2:
            raise TextmillError(
                f"corpus.label_key: the train split has one label only, '{next(iter(self.counts), '')}'; "
                "there is nothing to learn"
            )
        if task == SEQUENCES and len(self.counts) > max(MANY_LABELS, self.train_examples / 2):
            raise TextmillError(
                f"corpus.label_key: {self.train_examples:,} examples have {len(self.counts):,} different labels; "
                "name the field with the classes"
            )
        for label, where in self.elsewhere.items():
            if label not in self.counts:
                raise TextmillError(
                    f"{where} has the label '{label}', which the train split does not have; its labels are "
                    f"{', '.join(sorted(self.counts)[:12])}"
                )
        numbers = all(re.fullmatch("-?[0-9]{1,18}", label) for label in self.counts)
        return sorted(self.counts, key=int) if numbers else sorted(self.counts)


def build_labelled(
    config: CorpusConfig, task: str, sources: Sequence[Source], folder: Path, skipped: list[str]
) -> tuple[Counts, dict[str, Any]]:
    """Write one shard for each split; return the account, with the names of the labels, and the manifest entry of each
    file."""
    declared = declared_splits([source.name for source in sources], config.source_splits)
    labels = LabelSet()
    split_counts: list[Counts] = []
    with ExitStack() as stack:
        shards = {split: stack.enter_context(new_shard(folder / shard_name(split, 0))) for split in SPLITS}
        for source, split in zip(sources, declared, strict=True):
            examples = _with_splits(read_examples(source, task, config), task, split, config)
            split_counts.append(_write_examples(examples, task, shards, labels))
        names = labels.names(task)
    read_counts: list[Counts] = []
    for by_split in split_counts:
        records = sum(counts_of_split["documents"] for counts_of_split in by_split.values())
        read_counts.append({"records": records, "changed": {}, "dropped": {}})
    counts = build_account([source.name for source in sources], read_counts, [{} for _ in sources], split_counts)
    counts |= {"skipped_files": skipped, "labels": {"task": task, "names": names, "counts": dict(labels.counts)}}
    files = {"account.json": write_json(folder / "account.json", counts)}
    for split in SPLITS:
        files[shard_name(split, 0)] = manifest_entry(folder / shard_name(split, 0))
    return counts, files


def _with_splits(
    examples: Iterable[Example], task: str, declared: Split | None, config: CorpusConfig
) -> Iterator[tuple[Example, Split]]:
    """Each example with its split: that declared for its source, else by its text."""
    for example in examples:
        yield example, declared or assign_split(_digest(example, task), config.split)


def _write_examples(
    examples: Iterator[tuple[Example, Split]], task: str, shards: Mapping[Split, ShardWriter], labels: LabelSet
) -> Counts:
    """Write the examples of a source to the shards of their splits; return what each split got."""
    amounts: dict[Split, Counter[str]] = {split: Counter() for split in SPLITS}
    while block := list(islice(examples, BATCH_ROWS)):
        by_split: dict[Split, list[Example]] = {split: [] for split in SPLITS}
        for example, split in block:
            labels.add(example, split)
            by_split[split].append(example)
        for split, split_examples in by_split.items():
            shards[split].add(_to_table(split_examples, task, amounts[split]))
    return {split: {key: counter[key] for key in COUNTED} for split, counter in amounts.items()}


def _digest(example: Example, task: str) -> bytes:
    """What decides the split: the texts; all questions about a context are in one split."""
    texts = example.texts[1:] if task == ANSWERS else example.texts
    return text_digest((" " if task == WORDS else "\n").join(texts))


def _to_table(examples: Iterable[Example], task: str, amounts: Counter[str]) -> pa.Table:
    documents = [example.to_document(task) for example in examples]
    for document in documents:
        amounts.update(documents=1, bytes=len(document.text.encode()), characters=len(document.text))
    columns = [[getattr(document, name) for document in documents] for name in SCHEMA.names]
    return pa.table(columns, schema=SCHEMA)
