"""The command tokenize with `corpus.labels`: encodes every example, one token store with labels per split.

An example becomes ids with special tokens, cut to the length of a sample or into windows of it, and a label per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.labelled import ANSWERS, WORDS, Example, read_split
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, format_path, manifest_entry, read_json
from textmill.storage.progress import Bar, progress
from textmill.storage.stages import Force, Stage, open_manifest
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.encoding import COUNT_NAMES
from textmill.tokens.lineage import lineage_path, new_lineage
from textmill.tokens.store import StoreWriter, dtype_for, labels_path
from textmill.tokens.vocabulary.fitting import require_tokenizer
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

Ids = NDArray[np.int32]
SHORTEST = 8
"""Tokens of the shortest sample: three special ones, and some of a question and its context."""
NO_SPAN = -1
"""The offset of a token that is not part of the context."""

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
    tokenizer = require_tokenizer(config)
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
        facts: dict[str, Any] = {name: tokenizer[name] for name in ("tokenizer", "vocab", "eos_id")}
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
        new_lineage(lineage_path(part / split)) as lineage,
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


class ExampleEncoder:
    """Encodes the examples of one task."""

    def __init__(self, tokenizer: TextTokenizer, task: str, length: int, overlap: int, names: Sequence[str]) -> None:
        classifier = tokenizer.cls_id
        if classifier is None:
            raise TextmillError(
                "the tokenizer has no token such as [CLS] or <s>, which train.layout=labelled needs; "
                "set tokenizer.use to the tokenizer of a BERT"
            )
        if length < SHORTEST:
            raise TextmillError(f"train.length: {length} has no space for an example; set at least {SHORTEST}")
        self.tokenizer = tokenizer
        self.task = task
        self.length = length
        self.overlap = overlap
        self.first = classifier
        self.sep_id = tokenizer.sep_id
        self.numbers = {name: number for number, name in enumerate(names)}

    def encode(self, examples: Sequence[Example]) -> Iterator[list[Sample]]:
        """The samples of each example: one, or several windows of words or of a long context."""
        if self.task == WORDS:
            given = [list(example.texts) for example in examples]
            encodings: list[Encoding] = self.tokenizer.inner.encode_batch(
                given, is_pretokenized=True, add_special_tokens=False
            )
            for example, encoding in zip(examples, encodings, strict=True):
                yield list(self._word_windows(example, encoding))
            return
        texts = list(dict.fromkeys(text for example in examples for text in example.texts))
        known = dict(zip(texts, self.tokenizer.inner.encode_batch(texts, add_special_tokens=False), strict=True))
        for example in examples:
            parts = [known[text] for text in example.texts]
            yield list(self._context_windows(example, *parts)) if self.task == ANSWERS else [self._text(example, parts)]

    def _text(self, example: Example, encodings: Sequence[Encoding]) -> Sample:
        """One text, or two; the longer one is truncated first."""
        segments = [np.array(encoding.ids, np.int32) for encoding in encodings]
        lengths = truncate_lengths([len(one) for one in segments], self.length - 1 - len(segments))
        ids = self._join([one[:length] for one, length in zip(segments, lengths, strict=True)])
        labels = np.full(len(ids), IGNORED, np.int32)
        labels[0] = self._number(example, 0)
        return Sample(ids, labels)

    def _word_windows(self, example: Example, encoding: Encoding) -> Iterator[Sample]:
        """Consecutive words, as many as fit; a word that is longer than a sample loses its end."""
        ids = np.array(encoding.ids, np.int32)
        words = np.array(encoding.word_ids, np.int32)
        numbers = np.array([self._number(example, word) for word in range(len(example.texts))], np.int32)
        starts_word = np.append(True, words[1:] != words[:-1]) if len(words) else np.zeros(0, np.bool_)
        firsts = np.flatnonzero(starts_word)
        start = 0
        most = self.length - 2
        while start < len(ids) or start == 0:
            stop = min(start + most, len(ids))
            if stop < len(ids):
                before = firsts[: np.searchsorted(firsts, stop, side="right")]
                stop = int(before[-1]) if len(before) and before[-1] > start else stop
            here = np.where(starts_word[start:stop], words[start:stop], np.int32(-1))
            inside = np.concatenate([[-1], here, [-1]]).astype(np.int32)
            labels = np.full(len(inside), IGNORED, np.int32)
            labels[inside >= 0] = numbers[inside[inside >= 0]]
            yield Sample(self._join([ids[start:stop]]), labels, words=inside)
            after = firsts[np.searchsorted(firsts, stop, side="left") :]
            start = int(after[0]) if len(after) else max(len(ids), 1)

    def _context_windows(self, example: Example, question: Encoding, context: Encoding) -> Iterator[Sample]:
        """The question with each window of the context; the answer's label is [CLS] where it is not in the window."""
        question_ids = np.array(question.ids, np.int32)[: (self.length - 3) // 2]
        ids = np.array(context.ids, np.int32)
        spans = np.array(context.offsets, np.int32).reshape(-1, 2)
        window = self.length - 3 - len(question_ids)
        before = len(question_ids) + 2
        step = max(window - self.overlap, (window + 1) // 2)
        for start in range(0, max(1, len(ids) - window + step), step):
            inside = spans[start : start + window]
            labels = np.full(len(inside) + before + 1, IGNORED, np.int32)
            if example.answers is not None:
                labels[:2] = find_answer(example.answers, inside, before)
            outside = np.full((before, 2), NO_SPAN, np.int32)
            joined = self._join([question_ids, ids[start : start + window]])
            yield Sample(joined, labels, spans=np.concatenate([outside, inside, outside[:1]]))

    def _join(self, segments: Sequence[Ids]) -> Ids:
        parts = [np.array([self.first], np.int32)]
        for segment in segments:
            parts += [segment, np.array([self.sep_id], np.int32)]
        return np.concatenate(parts)

    def _number(self, example: Example, place: int) -> int:
        """The number of a label; -100 if it is unknown."""
        if example.labels is None:
            return IGNORED
        number = self.numbers.get(example.labels[place])
        if number is None:
            raise TextmillError(
                f"{example.where}: the label '{example.labels[place]}' is not one of the model's: "
                f"{', '.join(list(self.numbers)[:12])}"
            )
        return number


@dataclass(frozen=True)
class Sample:
    """What the net reads of an example: all of it, or one of several windows."""

    ids: Ids
    labels: Ids
    """The label of each token, -100 for none; question-answering: the positions of the answer, then -100."""
    words: Ids | None = None
    """token-classification: the word that starts at each token; -1 for other tokens."""
    spans: Ids | None = None
    """question-answering: [tokens, 2], where each token of the context starts and ends in it; -1 for other tokens."""


def truncate_lengths(lengths: Sequence[int], most: int) -> list[int]:
    """The lengths of one or two segments that have at most `most` tokens together; the longer one loses first."""
    if sum(lengths) <= most:
        return list(lengths)
    if len(lengths) == 1:
        return [most]
    shorter = min(min(lengths), most // 2)
    return [shorter, most - shorter] if lengths[0] <= lengths[1] else [most - shorter, shorter]


def find_answer(answers: Sequence[tuple[str, int]], spans: Ids, before: int) -> tuple[int, int]:
    """The positions of the first answer's first and last token in a window whose context starts at `before`.

    (0, 0), the position of [CLS], if there is no answer or if it is not fully in the window."""
    if not answers or not len(spans):
        return 0, 0
    text, start = answers[0]
    end = start + len(text)
    if spans[0, 0] > start or spans[-1, 1] < end:
        return 0, 0
    first = int(np.searchsorted(spans[:, 0], start, side="right")) - 1
    last = int(np.searchsorted(spans[:, 1], end, side="left"))
    return before + first, before + max(first, last)
