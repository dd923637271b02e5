"""What is measured during training: the loss on the valid split and `train.tasks`, and how long that takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Literal

from textmill.config import RunConfig
from textmill.engines import Engine, Sums
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.loader import valid_batches
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
SAVED_BYTES = 12
SAVE_SPEED = 1e9
"""Bytes of a trained weight in a checkpoint (the weight and two moments), and bytes written per second."""


class Validation:
    """The valid split of a run, its tasks, and the engine that evaluates them."""

    def __init__(self, config: RunConfig, data: Splits, start: Start, engine: Engine, length: int) -> None:
        """`length` is the number of tokens of a sample."""
        self.config = config
        self.data = data
        self.engine = engine
        self.length = length
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
        if length.is_due(train.evaluate_every, done):
            valid_metrics = self._measure_valid()
            if valid_metrics:
                trackers.log(done, valid_metrics)
            metrics |= valid_metrics
        if train.tasks and length.is_due(train.tasks_interval, done):
            task_metrics = self.tasks.measure(done)
            trackers.log(done, task_metrics)
            metrics |= task_metrics
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
        heads = {"valid": sums, **{f"valid_{name}": head_sums for name, head_sums in sums.others.items()}}
        values = {}
        for name, head_sums in heads.items():
            if head_sums.loss_tokens:
                values[f"{name}_loss"] = head_sums.loss / head_sums.loss_tokens
                values[f"{name}_accuracy"] = head_sums.correct / head_sums.loss_tokens
        if factor := bits_factor(self.data, "valid", self.config.train):
            values["valid_bits_per_byte"] = factor * values["valid_loss"]
        return values

    def _batches(self) -> Iterator[Batch]:
        folder = self.config.folder_of("train") / INDEX_FOLDER
        return valid_batches(self.config.train, self.data, length=self.length, folder=folder)

    def costs(self) -> Costs:
        """How long an evaluation and a save take, from a few batches and from the number of weights."""
        save_seconds = SAVED_BYTES * self.engine.facts()["trained"] / SAVE_SPEED
        batches = list(itertools.islice(self._batches(), 1 + TIMED_BATCHES))
        for batch in batches[:1]:  # not timed: it may compile
            self.engine.eval_step(batch)
        timed = batches[1:] or batches
        start = time.perf_counter()
        for batch in timed:
            self.engine.eval_step(batch)
        batch_seconds = (time.perf_counter() - start) / max(1, len(timed))
        start = time.perf_counter()
        self.tasks.measure(0)
        task_seconds = time.perf_counter() - start
        all_batches = sum(1 for _ in self._batches())
        evaluated_batches = min(all_batches, self.config.train.evaluate_batches or all_batches)
        return Costs(
            evaluation=batch_seconds * evaluated_batches,
            save=save_seconds,
            full_pass=batch_seconds * all_batches,
            tasks=task_seconds,
        )
