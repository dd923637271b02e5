"""The loss on the valid split, and how long evaluations and saves take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from textmill.config import RunConfig
from textmill.engines import Engine, Sums
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.from_config import valid_batches
from textmill.tokens.splits import Splits
from textmill.track import Trackers
from textmill.training.run_folder import INDEX_FOLDER
from textmill.training.run_minutes import Costs

TIMED_BATCHES = 3
"""Batches that are evaluated to estimate the time of all."""
SAVED_BYTES, SAVE_SPEED = 12, 1e9
"""Bytes of a trained weight in a checkpoint (the weight and two moments), and bytes written per second."""


class Validation:
    """The valid split of a run and the engine that evaluates it."""

    def __init__(self, config: RunConfig, data: Splits, engine: Engine, length: int) -> None:
        """`length` is the number of tokens of a sample."""
        self.config, self.data, self.engine, self.length = config, data, engine, length

    def measure(self, done: int, trackers: Trackers) -> float | None:
        """Log and return the loss after `done` steps; None if the split is empty."""
        batches = itertools.islice(self._batches(), self.config.train.evaluate_batches)
        sums = sum((self.engine.eval_step(batch) for batch in batches), Sums(0.0, 0, 0))
        if not sums.loss_tokens:
            return None
        loss = sums.loss / sums.loss_tokens
        trackers.log(done, {"valid_loss": loss, "valid_accuracy": sums.correct / sums.loss_tokens})
        return loss

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
        return Costs(seconds * min(count, self.config.train.evaluate_batches or count), save, seconds * count)
