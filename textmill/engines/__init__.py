"""Engine: the handful of methods between the loop and a framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from textmill.errors import TextmillError
from textmill.tensors import Named
from textmill.tokens.batches.batch import Batch

__all__ = ["Engine", "Named", "Step", "Sums", "open_engine"]


class Step(Protocol):
    """What one optimizer step gave; nothing is waited for until a value is read."""

    @property
    def loss(self) -> float: ...
    @property
    def norm(self) -> float: ...
    @property
    def asked(self) -> int: ...
    @property
    def skipped(self) -> bool: ...


@dataclass(frozen=True)
class Sums:
    """Sums over the asked tokens of a batch, over all processes."""

    loss: float
    asked: int
    correct: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.asked + other.asked, self.correct + other.correct)


class Engine(Protocol):
    """How a step is done; what and when is the loop's."""

    first: bool
    """The one process that prints and commits."""

    def samples_of(self, batch: int) -> slice:
        """This process's part of a global batch."""
        ...

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """One optimizer step on this process's part of the batch; `step` feeds dropout."""
        ...

    def eval_step(self, batch: Batch) -> Sums:
        """Losses of a batch, without dropout or gradient."""
        ...

    def weights(self) -> Iterator[Named]:
        """Host copies of the weights, in checkpoint names and layout; of a net with adapters, what is trained of it."""
        ...

    def moments(self) -> Iterator[Named]:
        """Host copies of the optimizer's state: m/NAME and v/NAME of AdamW, momentum/NAME of Muon."""
        ...

    def load(self, weights: Iterable[Named], moments: Iterable[Named], updates: int, where: str) -> None:
        """Take weights, moments (none with 0 updates) and the count of updates; `where` names them in errors."""
        ...

    def updates(self) -> int:
        """Optimizer updates done so far, skipped ones not counted."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a person wants to know of it: device, precision, micro-batch, peak rate."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


def open_engine(config: Any, shape: Any) -> Engine:
    """The engine that `engine.kind` names: engines/on_KIND.py has new_engine, and says with ADAPTERS that it trains them."""
    module = import_module(f"textmill.engines.on_{config.engine.kind}")
    if config.model.lora and not getattr(module, "ADAPTERS", False):
        raise TextmillError("model.lora: this engine trains no adapters; take it out, or set engine.kind=torch")
    engine: Engine = module.new_engine(config, shape)
    return engine
