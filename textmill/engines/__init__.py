"""Engine: the handful of methods between the loop and a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from textmill.engines.spikes import Guard
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.processes.ranks import Ranks, SingleProcess
from textmill.storage import faults
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import Batch

__all__ = ["Engine", "Mine", "Named", "Ranks", "Step", "Sums", "compiled_in", "every", "open_engine", "open_ranks"]

Mine = Callable[[str], bool]
"""Which tensors, by name, a process wants a copy of."""


def every(_: str) -> bool:
    """All of them."""
    return True


def compiled_in(seconds: float) -> str:
    """What a person hears of a step for which something was compiled."""
    return f"it took {seconds:.1f} s to begin, with compiling"


class Step(Protocol):
    """What one optimizer step gave; nothing is waited for until a value is read."""

    @property
    def ready(self) -> bool:
        """Whether reading would wait for nothing."""
        ...

    @property
    def loss(self) -> float: ...
    @property
    def norm(self) -> float: ...
    @property
    def asked(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def scale(self) -> float | None:
        """What the loss was multiplied by, where a scaler does that; at 1 it can fall no more."""
        ...

    @property
    def news(self) -> str | None:
        """What a person should hear of how it began: that something was compiled for it."""
        ...


@dataclass(frozen=True)
class Sums:
    """Sums over the asked tokens of a batch, over all processes."""

    loss: float
    asked: int
    correct: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.asked + other.asked, self.correct + other.correct)


class Engine(Protocol):
    """How a step is done; what and when is the loop's. All processes of a run call each method together, in the same order."""

    ranks: Ranks
    """The processes of the run, and what they agree on."""
    first: bool
    """The one process that prints and commits."""
    guard: Guard | None
    """What leaves out the update of a loss far above those before it, where `train.spikes.threshold` asks for it."""

    def samples_of(self, batch: int) -> slice:
        """This process's part of a global batch; tensor-parallel peers have the same part."""
        ...

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """One optimizer step on this process's part of the batch; `step` feeds dropout."""
        ...

    def eval_step(self, batch: Batch) -> Sums:
        """Losses of a batch, without dropout or gradient; every process is given the whole of it and looks at its part."""
        ...

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of those weights that are `mine`, whole, in checkpoint names and layout; of a net with adapters,
        of those alone.

        All processes walk it together and to its end, each with a `mine` of its own: what lies in shards is gathered by all,
        one tensor at a time, and kept by those who want it.
        """
        ...

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """The optimizer's state in the same way: m/NAME and v/NAME of AdamW, momentum/NAME of Muon."""
        ...

    def scaling(self) -> dict[str, float]:
        """What the loss scale of fp16 goes on from; nothing in other arithmetic."""
        ...

    def load(
        self,
        weights: Iterable[Named],
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Take weights, moments (none with 0 updates), the count of updates and the loss scale's state; `where` names them in errors."""
        ...

    def replica_checksums(self) -> dict[str, int]:
        """A number for each weight, or part of one, that other processes hold a copy of: the same for the same bits."""
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


def open_ranks(config: Any) -> Ranks:
    """The processes of this run, as the engine's launcher started them: engines/on_KIND.py has new_ranks."""
    ranks: Ranks = _module_of(config).new_ranks(config)
    return ranks


def open_engine(config: Any, shape: Shape, ranks: Ranks | None = None) -> Engine:
    """The engine of `engine.kind`, on these processes: engines/on_KIND.py has new_engine, and says with FAULTS that it breaks
    where `textmill.storage.faults` tells it to."""
    module = _module_of(config)
    if (inner := faults.armed_actions("nan", "flip")) and not getattr(module, "FAULTS", False):
        raise TextmillError(
            f"{faults.VARIABLE}: {inner[0]} happens inside the torch engine alone; take it out, or set engine.kind=torch"
        )
    engine: Engine = module.new_engine(config, shape, ranks or SingleProcess())
    return engine


def _module_of(config: Any) -> Any:
    return import_module(f"textmill.engines.on_{config.engine.kind}")
