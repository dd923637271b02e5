"""Decide whether a run's net is compiled, and report compile times and compile errors."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from textmill.config import TorchEngine, TrainConfig
from textmill.devices import peak_flops_of
from textmill.engines import format_compile_time, shortest_compiled_run
from textmill.engines.meshes import Mesh
from textmill.errors import TextmillError
from textmill.kernels.triton_support import missing_requirement
from textmill.models import Shape
from textmill.runners.on_local import usable_cores

EAGER_FRACTION = 0.12
DEFAULT_PEAK = 1e14
"""The fraction of a GPU's peak FLOP/s that an eager net reaches, and the peak of an unknown GPU."""
COMPILE_ERRORS = ("TorchDynamoException", "TritonError")
"""Names of the base classes of compile errors, in torch and in Triton."""


def decide_compile(
    engine: TorchEngine, train: TrainConfig, shape: Shape, device: torch.device, mesh: Mesh
) -> tuple[bool, str]:
    """Whether this run's net is compiled, and a note for the log; `train.steps` is the length of the entire run, with
    `train.minutes` the most steps that it may have."""
    if engine.compile is True and device.type == "cuda" and mesh.tensor > 1:
        raise TextmillError(
            "engine.compile: with engine.mesh.tensor a compiled net got wrong gradients on a GPU (docs/parallel.md); "
            "remove engine.compile"
        )
    if engine.compile != "auto":
        return engine.compile, _note(engine.compile)
    # `engine.deterministic` is promised for eager nets.
    if device.type != "cuda" or engine.deterministic or mesh.tensor > 1:
        return False, ""
    if not _is_long(train, shape, device, mesh.data_ranks):
        return False, ""
    if missing := missing_requirement():
        return False, f"not compiled, although it would be faster: no {missing} found"
    # Later a failure would end the run: one rank cannot repeat a pass in which the others take part.
    if mesh.shard > 1 and (failure := try_compiler(device)):
        return False, f"not compiled, although it would be faster: torch cannot compile here: {failure}"
    return True, _note(True)


def try_compiler(device: torch.device) -> str:
    """Compile and run a small function; why that failed, empty if it worked."""
    try:
        torch.compile(lambda values: torch.nn.functional.gelu(values) * 2)(torch.ones(64, device=device))
    except Exception as error:
        if not _is_compile_error(error):
            raise
        return _summary(error)
    return ""


def _note(compiled: bool) -> str:
    return "compiles in the first step, which takes longer" if compiled else ""


def _is_long(train: TrainConfig, shape: Shape, device: torch.device, world: int) -> bool:
    enough = shortest_compiled_run(usable_cores())
    if train.minutes is not None and 60 * train.minutes < enough:
        return False
    tokens = train.steps * train.batch * (train.length or shape.positions)
    flops_per_second = EAGER_FRACTION * (peak_flops_of(device) or DEFAULT_PEAK) * world
    return bool(6 * shape.parameters * tokens >= enough * flops_per_second)


class CompileMonitor:
    """Around a training step: times compilation, and turns compile errors into user errors."""

    def __init__(self, compiled: bool) -> None:
        """`compiled` is whether the step's net is compiled."""
        self.compiled = compiled
        self.note: str | None = None
        """A line for the log: the compile time, or why the net runs eagerly."""

    def __enter__(self) -> CompileMonitor:
        self._graphs, self._start = _count_graphs(), time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.is_compile_error(error):
            raise TextmillError(
                f"engine.compile: torch cannot compile the net here: {_summary(error)}; set engine.compile=false"
            ) from error
        if self.note is None and _count_graphs() > self._graphs:
            self.note = format_compile_time(time.perf_counter() - self._start)

    def is_compile_error(self, error: BaseException) -> bool:
        """Whether compiling failed, and not the code that was compiled."""
        return self.compiled and _is_compile_error(error)

    def fall_back(self, error: BaseException) -> None:
        """Note that the net runs eagerly from now on, because of a compile error."""
        self.compiled = False
        self.note = f"torch cannot compile the net here, so it runs eagerly: {_summary(error)}"


def _is_compile_error(error: BaseException) -> bool:
    return any(kind.__name__ in COMPILE_ERRORS for kind in type(error).__mro__)


def _summary(error: BaseException) -> str:
    """The first two lines of an error as one; the first line of some names the compiler's backend only."""
    return " ".join(str(error).strip().split("\n")[:2]) or type(error).__name__


def _count_graphs() -> int:
    """Graphs that torch's compiler has compiled in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0
