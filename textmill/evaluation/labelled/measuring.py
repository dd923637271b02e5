"""Predict the labels of a split or of files, write the predictions, and measure them where the labels are known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.config import RunConfig
from textmill.corpus.labelled.example import ANSWERS, WORDS, Example, read_split
from textmill.corpus.labelled.readers import read_examples
from textmill.corpus.sources import find_sources
from textmill.errors import TextmillError
from textmill.evaluation.labelled.answers import find_best_answer
from textmill.evaluation.labelled.class_metrics import ConfusionMatrix
from textmill.evaluation.labelled.entities import OUTSIDE, EntityCounts, has_entities
from textmill.evaluation.labelled.squad import AnswerScores
from textmill.evaluation.task import Result
from textmill.storage.files import atomic_writer, format_path, make_folder_for
from textmill.tokens.labelled.encoding import Sample

Logits = NDArray[np.float32]
Row = dict[str, Any]


class Measure(Protocol):
    """Turns logits into predictions, and counts those whose labels are known."""

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        """The prediction for an example, as a line of the predictions file."""
        ...

    def metrics(self) -> dict[str, float]:
        """What was measured."""
        ...


class SequenceMeasure:
    """Classes of texts."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.numbers = names, {name: number for number, name in enumerate(names)}
        self.matrix = ConfusionMatrix(names)

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        scores = np.exp(logits[0][0].astype(np.float64) - logits[0][0].max())
        best = int(scores.argmax())
        row: Row = {"source": example.source, "place": example.place, "texts": example.texts}
        row |= {"label": self.names[best], "probability": round(float(scores[best] / scores.sum()), 6)}
        if example.labels is not None:
            self.matrix.add([self.numbers[example.labels[0]]], [best])
            row["expected"] = example.labels[0]
        return row

    def metrics(self) -> dict[str, float]:
        matrix = self.matrix
        by_class = {f"f1 of {name}": value for name, value in matrix.f1_by_class().items()}
        overall = {"accuracy": matrix.accuracy(), "macro_f1": matrix.macro_f1(), "matthews": matrix.matthews()}
        return {**overall, **by_class}


class WordMeasure:
    """Labels of words: those of their first tokens; a word without tokens is outside of entities."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.numbers = names, {name: number for number, name in enumerate(names)}
        self.matrix, self.entities = ConfusionMatrix(names), EntityCounts()

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

    def __init__(self, config: RunConfig, no_answer: bool) -> None:
        self.rule = config.evaluate.answers
        self.no_answer = no_answer
        self.scores, self.ids = AnswerScores(version_2=no_answer), set[str]()

    def add(self, example: Example, samples: list[Sample], logits: list[Logits]) -> Row:
        if example.id in self.ids:
            raise TextmillError(f"{example.where}: the id '{example.id}' occurs twice; each question needs its own")
        self.ids.add(example.id)
        best = find_best_answer(example.texts[1], samples, logits, self.rule, no_answer=self.no_answer)
        if example.answers is not None:
            self.scores.add(best.text, [text for text, _ in example.answers])
        return {"id": example.id, "answer": best.text}

    def metrics(self) -> dict[str, float]:
        return self.scores.metrics()


def open_examples(config: RunConfig, task: str) -> Iterator[Example]:
    """The examples of `evaluate.text`, or of a split of the corpus folder; an error if there are none."""
    if config.evaluate.text:
        sources = find_sources(config.evaluate.text, encoding=config.corpus.encoding, setting="evaluate.text")
        examples: Iterator[Example] = chain.from_iterable(
            read_examples(source, task, config.corpus, needs_labels=False) for source in sources
        )
        what = ", ".join(config.evaluate.text)
    else:
        if not config.corpus.labels:
            raise TextmillError(
                "evaluate.text: is not set, and this model has no corpus of examples; name a file of examples"
            )
        examples = read_split(config.folder_of("corpus"), config.evaluate.split)
        what = f"the {config.evaluate.split} split"
    first = next(examples, None)
    if first is None:
        raise TextmillError(
            f"evaluate: {what} has no examples; set evaluate.split, or name files of examples in evaluate.text"
        )
    return chain([first], examples)


def new_measure(config: RunConfig, task: str, names: tuple[str, ...]) -> Measure:
    """The measure of a task; whether questions may have no answer is found in the examples, unless it is set."""
    if task != ANSWERS:
        return WordMeasure(names) if task == WORDS else SequenceMeasure(names)
    no_answer = config.evaluate.answers.no_answer
    if no_answer is None:
        no_answer = any(example.answers == () for example in open_examples(config, task))
    return AnswerMeasure(config, no_answer)


def measure_labels(config: RunConfig, predictor: Any, predictions: Path | None) -> Result:
    """Predict all examples, write the predictions, and return the metrics with how they were measured."""
    start = time.monotonic()
    task = predictor.task
    measure = new_measure(config, task, predictor.names)
    counts = {"examples": 0, "labelled": 0}

    def rows() -> Iterator[Row]:
        for example, samples, logits in predictor.predict(open_examples(config, task)):
            counts["examples"] += 1
            counts["labelled"] += example.has_labels
            yield measure.add(example, samples, logits)

    if predictions is None:
        for _ in rows():
            pass
    else:
        make_folder_for(predictions, "evaluate.predictions")
        with atomic_writer(predictions) as stream:
            stream.writelines(_json_object(rows()) if task == ANSWERS else _json_lines(rows()))
    metrics: dict[str, float] = measure.metrics() if counts["labelled"] else {}
    data = ", ".join(map(str, config.evaluate.text)) or f"{config.evaluate.split} split"
    card = {
        "data": data,
        **counts,
        "length": predictor.length,
        **({"overlap": predictor.overlap} if task == ANSWERS else {}),
        "predictions": format_path(predictions) if predictions else "not written; set evaluate.predictions",
        "precision": str(predictor.precision).removeprefix("torch."),
        "device": str(predictor.device),
        "seconds": time.monotonic() - start,
    }
    return {task: {**metrics, "intervals": {}, "card": card}}


def _json_lines(rows: Iterator[Row]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _json_object(rows: Iterator[Row]) -> Iterator[bytes]:
    """SQuAD's predictions file: the answer to each question by its id."""
    for number, row in enumerate(rows):
        entry = f"{json.dumps(row['id'], ensure_ascii=False)}: {json.dumps(row['answer'], ensure_ascii=False)}"
        yield (",\n" if number else "{\n").encode() + entry.encode(errors="backslashreplace")
    yield b"\n}\n"
