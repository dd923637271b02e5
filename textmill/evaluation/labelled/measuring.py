"""Predict the labels of a split or of files, write the predictions, and measure them where the labels are known."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig, EvaluateConfig
from textmill.corpus.find_sources import find_sources
from textmill.corpus.labelled import ANSWERS, WORDS, Example, read_examples, read_split
from textmill.errors import TextmillError
from textmill.evaluation import write_items
from textmill.evaluation.labelled.squad import AnswerScores, find_best_answer
from textmill.evaluation.task import Result
from textmill.storage.files import atomic_writer, format_path, make_folder_for
from textmill.tokens.labelled import Sample

Logits = NDArray[np.float32]
Row = dict[str, Any]


class SequenceMeasure:
    """Classes of texts. This and the other two measures make a line of the predictions file of an example's logits, and
    count those whose labels are known."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.matrix = ConfusionMatrix(names)

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        scores = np.exp(logits[0][0].astype(np.float64) - logits[0][0].max())
        best = int(scores.argmax())
        row: Row = {"source": example.source, "place": example.place, "texts": example.texts}
        row |= {"label": self.names[best], "probability": round(float(scores[best] / scores.sum()), 6)}
        if example.labels is not None:
            self.matrix.add([self.names.index(example.labels[0])], [best])
            row["expected"] = example.labels[0]
        return row

    def metrics(self) -> dict[str, float]:
        matrix = self.matrix
        by_class = {f"f1 of {name}": value for name, value in matrix.f1_by_class().items()}
        overall = {"accuracy": matrix.accuracy(), "macro_f1": matrix.macro_f1(), "matthews": matrix.matthews()}
        return overall | by_class


class WordMeasure:
    """Labels of words: those of their first tokens; a word without tokens is outside of entities."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.numbers = {name: number for number, name in enumerate(names)}
        self.matrix = ConfusionMatrix(names)
        self.entities = EntityCounts()

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        predicted = np.full(len(example.texts), self.numbers.get(OUTSIDE, 0), np.int64)
        for sample, sample_logits in zip(samples, logits, strict=True):
            assert sample.words is not None
            is_first_token = sample.words >= 0
            predicted[sample.words[is_first_token]] = sample_logits.argmax(1)[is_first_token]
        labels = [self.names[number] for number in predicted.tolist()]
        row: Row = {"source": example.source, "place": example.place, "words": example.texts, "labels": labels}
        if example.labels is not None:
            self.matrix.add([self.numbers[label] for label in example.labels], predicted)
            self.entities.add(example.labels, labels)
            row["expected"] = example.labels
        return row

    def metrics(self) -> dict[str, float]:
        entities = self.entities.metrics() if has_entities(self.names) else {"macro_f1": self.matrix.macro_f1()}
        return {**entities, "accuracy": self.matrix.accuracy()}


class AnswerMeasure:
    """Answers to questions."""

    def __init__(self, no_answer: bool) -> None:
        self.no_answer = no_answer
        self.scores = AnswerScores(version_2=no_answer)
        self.ids = set[str]()

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        if example.id in self.ids:
            raise TextmillError(f"{example.where}: the id '{example.id}' occurs twice; each question needs its own")
        self.ids.add(example.id)
        answer = find_best_answer(example.texts[1], samples, logits, no_answer=self.no_answer)
        if example.answers is not None:
            self.scores.add(answer, [text for text, _ in example.answers])
        return {"id": example.id, "answer": answer}

    def metrics(self) -> dict[str, float]:
        return self.scores.metrics()


def open_examples(evaluate: EvaluateConfig, corpus: CorpusConfig, folder: Path, task: str) -> Iterator[Example]:
    """The examples of `evaluate.text`, or of a split of the corpus in a folder; an error if there are none."""
    if evaluate.text:
        sources = find_sources(evaluate.text, encoding=corpus.encoding, setting="evaluate.text")
        examples: Iterator[Example] = chain.from_iterable(
            read_examples(source, task, corpus, needs_labels=False) for source in sources
        )
        what = ", ".join(evaluate.text)
    else:
        if not corpus.labels:
            raise TextmillError(
                "evaluate.text: is not set, and this model has no corpus of examples; name a file of examples"
            )
        examples = read_split(folder, evaluate.split)
        what = f"the {evaluate.split} split"
    first = next(examples, None)
    if first is None:
        raise TextmillError(
            f"evaluate: {what} has no examples; set evaluate.split, or name files of examples in evaluate.text"
        )
    return chain([first], examples)


def measure_labels(
    evaluate: EvaluateConfig, corpus: CorpusConfig, folder: Path, predictor: Any, predictions: Path | None
) -> Result:
    """Predict all examples, write the predictions, and return the metrics with how they were measured.

    Whether questions may have no answer is found in the examples.
    """
    start = time.monotonic()
    task = predictor.task
    read = partial(open_examples, evaluate, corpus, folder, task)
    measure: SequenceMeasure | WordMeasure | AnswerMeasure
    if task == ANSWERS:
        no_answer = any(example.answers == () for example in read())
        measure = AnswerMeasure(no_answer)
    else:
        measure = WordMeasure(predictor.names) if task == WORDS else SequenceMeasure(predictor.names)
    counts = {"examples": 0, "labelled": 0}

    def rows() -> Iterator[Row]:
        for example, samples, logits in predictor.predict(read()):
            counts["examples"] += 1
            counts["labelled"] += example.has_labels
            yield measure.add(example, samples, logits)

    if predictions is None:
        for _ in rows():
            pass
    else:
        make_folder_for(predictions, "evaluate.predictions")
        if task == ANSWERS:
            with atomic_writer(predictions) as stream:
                stream.writelines(_json_object(rows()))
        else:
            write_items(predictions, rows())
    metrics: dict[str, float] = measure.metrics() if counts["labelled"] else {}
    card = {
        **({"text": list(evaluate.text)} if evaluate.text else {"split": evaluate.split}),
        **counts,
        "length": predictor.length,
        **({"overlap": predictor.overlap} if task == ANSWERS else {}),
        "predictions": format_path(predictions) if predictions else "not written; set evaluate.predictions",
        "precision": str(predictor.precision).removeprefix("torch."),
        "device": str(predictor.device),
        "seconds": time.monotonic() - start,
    }
    return {task: {**metrics, "intervals": {}, "card": card}}


def _json_object(rows: Iterator[Row]) -> Iterator[bytes]:
    """SQuAD's predictions file: the answer to each question by its id."""
    for number, row in enumerate(rows):
        entry = f"{json.dumps(row['id'], ensure_ascii=False)}: {json.dumps(row['answer'], ensure_ascii=False)}"
        yield (",\n" if number else "{\n").encode() + entry.encode(errors="backslashreplace")
    yield b"\n}\n"


class ConfusionMatrix:
    """How often each class was predicted for each class."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.counts: NDArray[np.int64] = np.zeros((len(self.names), len(self.names)), np.int64)
        """Rows are the labels of the examples, columns the predictions."""

    def add(self, expected: Sequence[int] | NDArray[np.int64], predicted: Sequence[int] | NDArray[np.int64]) -> None:
        """Count pairs of a label and its prediction."""
        np.add.at(self.counts, (np.asarray(expected), np.asarray(predicted)), 1)

    def accuracy(self) -> float:
        """The fraction of predictions that are right."""
        return float(np.trace(self.counts) / max(1, self.counts.sum()))

    def f1_by_class(self) -> dict[str, float]:
        """F1 of each class that occurs as a label or as a prediction."""
        right = np.diag(self.counts)
        labels = self.counts.sum(1)
        predictions = self.counts.sum(0)
        return {
            name: float(2 * right[number] / (labels[number] + predictions[number]))
            for number, name in enumerate(self.names)
            if labels[number] + predictions[number]
        }

    def macro_f1(self) -> float:
        """The mean of the classes' F1."""
        found = self.f1_by_class()
        return sum(found.values()) / max(1, len(found))

    def matthews(self) -> float:
        """Matthews correlation coefficient, for any number of classes; 0 if all labels or predictions are equal."""
        labels = self.counts.sum(1).astype(float)
        predictions = self.counts.sum(0).astype(float)
        total = float(self.counts.sum())
        right = float(np.trace(self.counts))
        spread = (total**2 - labels @ labels) * (total**2 - predictions @ predictions)
        return float((right * total - labels @ predictions) / math.sqrt(spread)) if spread > 0 else 0.0


OUTSIDE = "O"
PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
"""Begin, inside, end, single; BILOU names the last two last and unit."""

Entity = tuple[str, int, int]
"""Its type, its first word and its last word."""


def has_entities(names: Sequence[str]) -> bool:
    """Whether labels mark entities."""
    return any(name.startswith(PREFIXES) for name in names)


def find_entities(labels: Sequence[str]) -> set[Entity]:
    """The entities of a sentence. One starts at B or S, at another type, or at any tag after the end of one."""
    found: set[Entity] = set()
    start = 0
    previous_tag = OUTSIDE
    previous_kind = ""
    for place, label in enumerate([*labels, OUTSIDE]):
        tag, kind = (label[0], label[2:]) if label.startswith(PREFIXES) else (OUTSIDE, "")
        tag = {"L": "E", "U": "S"}.get(tag, tag)
        inside = tag != OUTSIDE
        was_inside = previous_tag != OUTSIDE
        breaks = tag in "BSO" or previous_tag in "ESO" or kind != previous_kind
        if was_inside and breaks:
            found.add((previous_kind, start, place - 1))
        if inside and breaks:
            start = place
        previous_tag = tag
        previous_kind = kind
    return found


class EntityCounts:
    """Entities that are expected, predicted and both."""

    def __init__(self) -> None:
        self.expected = self.predicted = self.right = 0

    def add(self, expected: Sequence[str], predicted: Sequence[str]) -> None:
        """Count the entities of a sentence; one is right if its type and both of its ends are."""
        wanted = find_entities(expected)
        found = find_entities(predicted)
        self.expected += len(wanted)
        self.predicted += len(found)
        self.right += len(wanted & found)

    def metrics(self) -> dict[str, float]:
        """Precision, recall and F1 over all entities."""
        return {
            "entity_f1": 2 * self.right / max(1, self.expected + self.predicted),
            "entity_precision": self.right / max(1, self.predicted),
            "entity_recall": self.right / max(1, self.expected),
        }
