"""What is measured during training: the loss on the valid split and `train.tasks`, and how long that takes."""

from __future__ import annotations

import io
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Literal

from textmill.checkpoints.adapters import read_base
from textmill.checkpoints.best import open_best_step
from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig, TrainConfig
from textmill.engines import Engine, EvalSums
from textmill.evaluation.task import Scorer, list_metrics
from textmill.evaluation.tasks import open_tasks
from textmill.processes.ranks import run_on_all
from textmill.storage.hub import find_model_folder
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.loader import valid_batches
from textmill.tokens.splits import Splits
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.track import Trackers
from textmill.training.run_folder import INDEX_FOLDER
from textmill.training.run_length import RunLength
from textmill.training.start import Start, check_measured
from textmill.training.timing import Costs

TIMED_BATCHES = 3
"""Batches that are evaluated to estimate the time of all."""
SAVED_BYTES = 12
SAVE_SPEED = 1e9
"""Bytes of a trained weight in a checkpoint (the weight and two moments), and bytes written per second."""
CHECKED_EXAMPLES = 2
"""Examples of each task that are measured before the first step, to find mistakes then."""
MAX_EXPONENT = 700.0
"""A larger loss would overflow as a perplexity."""
EVERY_TOKEN = ("packed", "padded", "features")
"""Layouts in which every token has a loss, so that the loss of a token is that of its bytes."""


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

    def train_metrics(self, loss: float) -> dict[str, float]:
        """The perplexity of a train loss, and the loss in bits per byte, if that is known."""
        factor = train_bits_factor(self.data, self.config.train)
        bits = {"bits_per_byte": factor * loss} if factor else {}
        return self._perplexity("perplexity", loss) | bits

    def _perplexity(self, name: str, loss: float) -> dict[str, float]:
        """The perplexity of a token; a loss of examples has none."""
        return {} if self.config.train.layout == "labelled" else {name: math.exp(min(loss, MAX_EXPONENT))}

    def measure(
        self, length: RunLength, done: int, trackers: Trackers, batch_at: Callable[[int], Batch]
    ) -> dict[str, float]:
        """Log and return the metrics that are due after `done` steps; `batch_at` has the train batch of a step."""
        train = self.config.train
        metrics: dict[str, float] = {}
        if length.is_due(train.evaluate_every, done):
            valid_metrics = self._measure_valid()
            if valid_metrics:
                sums = self.engine.eval_step(batch_at(done - 1))
                valid_metrics["train_accuracy"] = sums.correct / max(1, sums.loss_tokens)
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
        by_source: dict[str, EvalSums] = {}
        for name, batch in itertools.islice(self._batches_by_source(), self.config.train.evaluate_batches):
            by_source[name] = self.engine.eval_step(batch) + by_source.get(name, EvalSums(0.0, 0, 0))
        sums = sum(by_source.values(), EvalSums(0.0, 0, 0))
        if not sums.loss_tokens:
            return {}
        heads = {"valid": sums, **{f"valid_{name}": head_sums for name, head_sums in sums.others.items()}}
        values = {}
        for name, head_sums in heads.items():
            if head_sums.loss_tokens:
                values[f"{name}_loss"] = head_sums.loss / head_sums.loss_tokens
                values[f"{name}_accuracy"] = head_sums.correct / head_sums.loss_tokens
        values |= {
            f"valid_loss_{name}": part.loss / part.loss_tokens
            for name, part in by_source.items()
            if name and part.loss_tokens
        }
        values |= self._perplexity("valid_perplexity", values["valid_loss"])
        if factor := bits_factor(self.data, "valid", self.config.train):
            values["valid_bits_per_byte"] = factor * values["valid_loss"]
        return values

    def _batches(self) -> Iterator[Batch]:
        return (batch for _, batch in self._batches_by_source())

    def _batches_by_source(self) -> Iterator[tuple[str, Batch]]:
        """The valid batches, each with the name of its part of the corpus, if parts have names.

        The parts take turns, so that the first batches are of all of them.
        """
        folder = self.config.folder_of("train") / INDEX_FOLDER
        parts: deque[tuple[str, Iterator[Batch]]] = deque()
        for part in self.data.by_split["valid"]:
            data = replace(self.data, by_split={**self.data.by_split, "valid": [part]})
            parts.append((part.name, valid_batches(self.config.train, data, length=self.length, folder=folder)))
        while parts:
            name, batches = parts.popleft()
            if (batch := next(batches, None)) is not None:
                yield name, batch
                parts.append((name, batches))

    def costs(self) -> Costs:
        """How long an evaluation and a save take, from a few batches and from the number of weights."""
        save_seconds = SAVED_BYTES * self.engine.describe()["trained"] / SAVE_SPEED
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


class TrainingTasks:
    """The tasks of a run. The engine's weights are copied into a net of their own, which is freed after the tasks."""

    def __init__(self, config: RunConfig, start: Start, tokenizer: TextTokenizer, engine: Engine) -> None:
        self.config = config
        self.start = start
        self.tokenizer = tokenizer
        self.engine = engine
        self.tasks = open_tasks(config.train.tasks)
        if self.tasks:
            from textmill.engines.scoring_torch import ScoringMesh

            self.mesh = ScoringMesh(config.engine, engine.ranks, in_training=True)

    def check(self) -> None:
        """Measure a few examples, so that mistakes are found before the first step."""
        metric = self.config.train.best.metric
        values = self._measure(self.start.step, CHECKED_EXAMPLES) if self.tasks else {}
        measured = [name for name in values if not name.endswith("/seconds")]
        check_measured(metric, measured)

    def measure(self, done: int) -> dict[str, float]:
        """The metrics of all tasks after `done` steps, and the seconds of each; the same on all ranks."""
        if not self.tasks:
            return {}
        return self._measure(done, self.config.train.tasks_sample)

    def _measure(self, done: int, sample: int | None) -> dict[str, float]:
        changes = {"sample": sample, "baselines": False, "tasks": self.config.train.tasks}
        evaluate = self.config.evaluate.model_copy(update=changes)
        config = self.config.model_copy(update={"evaluate": evaluate})

        def run() -> dict[str, float]:
            # Progress bars would tear the console's line, and weights may well look untrained at the start.
            with redirect_stderr(io.StringIO()):
                scorer = self._open_scorer(done)
                metrics: dict[str, float] = {}
                for task in self.tasks:
                    start = time.perf_counter()
                    found, _ = task.measure(scorer, config)
                    task_metrics = list_metrics(found)  # such as "lambada/accuracy"
                    label = next(iter(task_metrics)).partition("/")[0]
                    metrics |= task_metrics
                    metrics[f"{label}/seconds"] = time.perf_counter() - start
            return metrics

        metrics = run_on_all(self.engine.ranks, run)
        shared: dict[str, float] = self.engine.ranks.all_gather(metrics)[0]
        return shared

    def _open_scorer(self, done: int) -> Scorer:
        from textmill.evaluation.scorer_torch import new_scorer
        from textmill.evaluation.task import Share

        folder = self.config.folder_of("train") / f"step-{done:07d}"
        shape = self.start.shape
        net = self.mesh.new_net(shape, self._weights(), str(folder), self.config.model.lora)
        share = Share(self.engine.ranks, *self.mesh.part)
        return new_scorer(
            Checkpoint(folder, done, {}),
            net,
            self.tokenizer,
            self.config.engine.precision,
            self.config.evaluate.batch,
            share,
        )

    def _weights(self) -> Iterator[Named]:
        """The weights as they are now; with LoRA those of the base, then the adapters."""
        if self.start.base is not None:
            yield from read_base(Path(find_model_folder(self.start.base)), dict(self.start.changed_weights))
        yield from self.engine.weights()


def bits_factor(data: Splits, split: str, train: TrainConfig) -> float | None:
    """Times a loss in nats per token this is bits per byte; None if the bytes are not known or not all have a loss."""
    counts = data.manifest.get("splits", {}).get(split) or {}
    octets = counts.get("bytes")
    tokens = counts.get("tokens")
    if train.layout not in EVERY_TOKEN or not octets or not tokens:
        return None
    return float(tokens / octets / math.log(2))


def train_bits_factor(data: Splits, train: TrainConfig) -> float | None:
    """The same for the train loss; None if it is more than the cross-entropy."""
    return None if train.label_smoothing else bits_factor(data, "train", train)
