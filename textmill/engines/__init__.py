"""Engine: the interface between the training loop and torch, DeepSpeed or JAX.

on_torch.py, on_deepspeed.py and on_jax.py implement it; `engine.kind` names the file. The torch engine consists of
micro_batches.py and losses_torch.py (the objective), optimizers/ (the update), parallel_torch.py and
tensor_parallel_torch.py (FSDP, data and tensor parallelism), pipeline_torch.py, local_sgd_torch.py (slow networks),
memory.py (`engine.micro_batch: auto`) and ranks_torch.py (processes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from textmill.config import EngineConfig, LoraConfig, TrainConfig
from textmill.config.own_files import is_own_file
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.processes.ranks import SINGLE_PROCESS, Ranks
from textmill.storage import faults
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import Batch

__all__ = [
    "MANY_CORES",
    "Engine",
    "EvalSums",
    "NameFilter",
    "Step",
    "StepValues",
    "all_names",
    "check_engine",
    "format_compile_time",
    "open_engine",
    "open_ranks",
    "shortest_compiled_run",
]

NameFilter = Callable[[str], bool]
"""True for the names of the tensors that a process needs a copy of."""
MANY_CORES = 8
"""With fewer cores, compiling for a GPU takes much longer."""


def all_names(_: str) -> bool:
    """The filter that selects every tensor."""
    return True


def shortest_compiled_run(cores: int) -> float:
    """The seconds of an eager run from which on compiling pays: on an H200 it adds 10 to 40 s and halves the other
    steps; with few cores, or busy ones, it took up to 45 s."""
    return 90.0 if cores >= MANY_CORES else 150.0


def format_compile_time(seconds: float) -> str:
    """The note of a step for which something was compiled."""
    return f"took {seconds:.1f} s to start, including compilation"


class StepValues(NamedTuple):
    """The numbers of a step, on the host."""

    loss: float
    norm: float
    loss_tokens: int
    terms: dict[str, float]
    scale: float | None = None


class Step:
    """The result of one optimizer step. Reading a value waits for this step, but not for later ones."""

    def __init__(self, is_ready: Callable[[], bool], read: Callable[[], StepValues], note: str | None = None) -> None:
        """`note` is a line for the log, if something was compiled for this step."""
        self._is_ready = is_ready
        self._read = read
        self.note = note

    @property
    def ready(self) -> bool:
        """Whether the values can be read without waiting."""
        return self._is_ready()

    @property
    def loss(self) -> float:
        """The loss of the global batch, before the update: the mean of its loss tokens."""
        return self._read().loss

    @property
    def terms(self) -> dict[str, float]:
        """Other terms that the update minimises together with the loss, by their names in the log: pair_loss."""
        return self._read().terms

    @property
    def norm(self) -> float:
        """The global gradient norm, before clipping."""
        return self._read().norm

    @property
    def loss_tokens(self) -> int:
        """Tokens with a label in the global batch."""
        return self._read().loss_tokens

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because loss or gradient was not finite."""
        return not math.isfinite(self.norm)

    @property
    def scale(self) -> float | None:
        """The loss scale of fp16, None in other precisions; it does not fall below 1."""
        return self._read().scale


@dataclass(frozen=True)
class EvalSums:
    """Sums over the loss tokens of a batch, over all processes."""

    loss: float
    loss_tokens: int
    correct: int
    others: dict[str, EvalSums] = field(default_factory=dict)
    """The same of other heads, by name: pair."""

    def __add__(self, other: EvalSums) -> EvalSums:
        tokens = self.loss_tokens + other.loss_tokens
        names = {**self.others, **other.others}
        none = EvalSums(0.0, 0, 0)
        others = {name: self.others.get(name, none) + other.others.get(name, none) for name in names}
        return EvalSums(self.loss + other.loss, tokens, self.correct + other.correct, others)


class Engine(Protocol):
    """How a training step is computed. All processes of a run call the same methods in the same order."""

    ranks: Ranks
    """The processes of the run and their collectives."""
    first: bool
    """Whether this is rank 0, which prints and writes."""

    def samples_of(self, batch: int) -> slice:
        """The samples of a global batch that this process computes, equal inside a tensor-parallel group."""
        ...

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """One optimizer step on this process's samples; `step` is part of the seed of dropout."""
        ...

    def eval_step(self, batch: Batch) -> EvalSums:
        """Loss of a batch without dropout or gradients; each process gets the full batch and computes its own part."""
        ...

    def weights(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the wanted weights: full tensors in checkpoint names and layout; with LoRA only the adapters.

        All processes iterate to the end together, each with its own filter: sharded tensors are gathered one at a
        time by all ranks, and copied only where they are wanted.
        """
        ...

    def optimizer_state(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """The optimizer state, like `weights`: m/NAME and v/NAME of AdamW, momentum/NAME of Muon.

        If `train.ema_window` is set, also raw/NAME: the weights that training continues with.
        """
        ...

    def scaling(self) -> dict[str, float]:
        """The state of fp16's loss scaler, for a checkpoint; empty in other precisions."""
        ...

    def load(
        self,
        weights: Iterable[Named],
        optimizer_state: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights, optimizer state (none if `updates` is 0), the number of updates and the loss scaler's state.

        `where` is the source that error messages name.
        """
        ...

    def replica_checksums(self) -> dict[str, int]:
        """A checksum of each weight, or shard of one, that other processes replicate; equal bits give equal numbers."""
        ...

    def updates(self) -> int:
        """Optimizer updates done so far, without skipped ones."""
        ...

    def describe(self) -> dict[str, Any]:
        """Device, precision, micro-batch, parameters and peak FLOP/s, for the first log line and the metrics."""
        ...

    def close(self) -> None:
        """Release devices and memory."""
        ...


def open_ranks(engine: EngineConfig) -> Ranks:
    """The processes of this run, as its launcher started them; calls `new_ranks` of engines/on_KIND.py."""
    ranks: Ranks = _import_engine(engine.kind).new_ranks(engine)
    return ranks


def check_engine(engine: EngineConfig, train: TrainConfig, shape: Shape, world: int) -> None:
    """Refuse settings that the engine cannot train with in `world` processes, before data is prepared; calls
    `check_settings` of engines/on_KIND.py, as opening the engine does.

    A module that supports the injected faults nan and flip of `textmill.storage.faults` has FAULTS = True.
    """
    module = _import_engine(engine.kind)
    own = [key for key in ("loss", "optimizer") if is_own_file(getattr(train, key))]
    if own and not getattr(module, "OWN_PARTS", False):
        raise TextmillError(
            f"train.{own[0]}: engine.kind={engine.kind} takes no file of your own; set engine.kind=torch"
        )
    if (armed := faults.armed_actions("nan", "flip")) and not getattr(module, "FAULTS", False):
        raise TextmillError(
            f"{faults.VARIABLE}: only the torch engine supports {armed[0]}; remove it, or set engine.kind=torch"
        )
    module.check_settings(engine, train, shape, world)


def open_engine(
    engine: EngineConfig, train: TrainConfig, shape: Shape, lora: LoraConfig | None = None, ranks: Ranks | None = None
) -> Engine:
    """The engine of `engine.kind` on these processes; calls `new_engine` of engines/on_KIND.py."""
    ranks = ranks or SINGLE_PROCESS
    check_engine(engine, train, shape, ranks.world)
    opened: Engine = _import_engine(engine.kind).new_engine(engine, train, shape, lora, ranks)
    return opened


def _import_engine(kind: str) -> Any:
    try:
        return import_module(f"textmill.engines.on_{kind}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jax", "optax"):
            raise
        raise TextmillError("engine.kind=jax needs jax and optax; run: pip install 'textmill[jax]'") from None
