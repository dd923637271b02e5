"""What is measured during training: the loss on the valid split and `train.tasks`, and how long that takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Literal

from textmill.config import RunConfig
from textmill.engines import Engine, Sums
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.from_config import valid_batches
from textmill.tokens.splits import Splits
from textmill.track import Trackers
from textmill.training.best_step import open_best_step
from textmill.training.bits_per_byte import bits_factor, train_bits_factor
from textmill.training.run_folder import INDEX_FOLDER
from textmill.training.run_length import RunLength
from textmill.training.run_minutes import Costs
from textmill.training.start import Start
from textmill.training.tasks import TrainingTasks

TIMED_BATCHES = 3
"""Batches that are evaluated to estimate the time of all."""
SAVED_BYTES, SAVE_SPEED = 12, 1e9
"""Bytes of a trained weight in a checkpoint (the weight and two moments), and bytes written per second."""


class Validation:
    """The valid split of a run, its tasks, and the engine that evaluates them."""

    def __init__(self, config: RunConfig, data: Splits, start: Start, engine: Engine, length: int) -> None:
        """`length` is the number of tokens of a sample."""
        self.config, self.data, self.engine, self.length = config, data, engine, length
        self.tasks = TrainingTasks(config, start, data.tokenizer, engine)
        self.best = open_best_step(config.train.best, start.best)

    def is_due(self, length: RunLength, done: int) -> bool:
        """Whether something is measured after `done` steps."""
        return any(length.is_due(every, done) for every in self._intervals)

    @property
    def _intervals(self) -> set[int | Literal["epoch"]]:
        train = self.config.train
        return {train.evaluate_every, *([train.tasks_interval] if train.tasks else [])}

    def train_bits(self, loss: float) -> dict[str, float]:
        """A train loss in bits per byte, if that is known."""
        factor = train_bits_factor(self.data, self.config.train)
        return {"bits_per_byte": factor * loss} if factor else {}

    def measure(self, length: RunLength, done: int, trackers: Trackers) -> dict[str, float]:
        """Log and return the metrics that are due after `done` steps."""
        train = self.config.train
        metrics: dict[str, float] = {}
        if length.is_due(train.evaluate_every, done) and (found := self._measure_valid()):
            metrics |= found
            trackers.log(done, found)
        if train.tasks and length.is_due(train.tasks_interval, done):
            found = self.tasks.measure(done)
            metrics |= found
            trackers.log(done, found)
        self.best = self.best.add(done, metrics)
        if self.stops_early:
            trackers.note(f"step {done}: early stopping: {self.best.describe()}")
        return metrics

    @property
    def stops_early(self) -> bool:
        """Whether the run ends after this step: the metric has not become better for long."""
        return self.best.is_over(self.config.train.best.patience)

    def _measure_valid(self) -> dict[str, float]:
        """The loss and the accuracy; nothing if the split is empty."""
        batches = itertools.islice(self._batches(), self.config.train.evaluate_batches)
        sums = sum((self.engine.eval_step(batch) for batch in batches), Sums(0.0, 0, 0))
        if not sums.loss_tokens:
            return {}
        values = {}
        for name, one in {"": sums, **{f"{name}_": other for name, other in sums.others.items()}}.items():
            if one.loss_tokens:
                values[f"valid_{name}loss"] = one.loss / one.loss_tokens
                values[f"valid_{name}accuracy"] = one.correct / one.loss_tokens
        if factor := bits_factor(self.data, "valid", self.config.train):
            values["valid_bits_per_byte"] = factor * values["valid_loss"]
        return values

    def _batches(self) -> Iterator[Batch]:
        folder = self.config.folder_of("train") / INDEX_FOLDER
        return valid_batches(self.config.train, self.data, length=self.length, folder=folder)

    def costs(self) -> Costs:
        """How long an evaluation and a save take, from a few batches and from the number of weights."""
        save = SAVED_BYTES * self.engine.facts()["trained"] / SAVE_SPEED
        batches = list(itertools.islice(self._batches(), 1 + TIMED_BATCHES))
        for batch in batches[:1]:  # not timed: it may compile
            self.engine.eval_step(batch)
        timed, start = batches[1:] or batches, time.perf_counter()
        for batch in timed:
            self.engine.eval_step(batch)
        seconds = (time.perf_counter() - start) / max(1, len(timed))
        count = sum(1 for _ in self._batches())
        start = time.perf_counter()
        self.tasks.measure(0)
        tasks = time.perf_counter() - start
        return Costs(seconds * min(count, self.config.train.evaluate_batches or count), save, seconds * count, tasks)
