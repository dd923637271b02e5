"""Whether a net is compiled for its run, and what a person is told of that."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from textmill.config import TorchEngine, TrainConfig
from textmill.devices import peak_flops_of
from textmill.engines import compiled_in
from textmill.errors import TextmillError
from textmill.kernels.availability import lacking
from textmill.models import Shape

SECONDS = 60.0
"""What a run must take without compiling for that to be worth it: on an H200 a first step takes 10 to 30 s more, the others half."""
SHARE, PEAK = 0.2, 1e14
"""The part of a card's peak that a net makes without being compiled, and the peak of a card that is not known."""
FAILURES = ("TorchDynamoException", "TritonError")
"""What errors of compiling are called: torch's, which has one name above all of its own, and Triton's."""


def compiling(
    engine: TorchEngine, train: TrainConfig, shape: Shape, device: torch.device, world: int
) -> tuple[bool, str]:
    """Whether this run's net is compiled, and the words for it; `train.steps` are those of the whole run, however often it is taken up."""
    if engine.compile != "auto":
        return engine.compile, _words(engine.compile)
    # Tried on one device alone; and bit for bit the same is promised of what is not compiled.
    if device.type != "cuda" or world > 1 or engine.deterministic or not _is_long(train, shape, device):
        return False, ""
    lacks = lacking()
    return not lacks, f"not compiled, though that would be faster: there is no {lacks}" if lacks else _words(True)


def _words(compiled: bool) -> str:
    return "compiled at the first step, which takes a while" if compiled else ""


def _is_long(train: TrainConfig, shape: Shape, device: torch.device) -> bool:
    tokens = train.steps * train.batch * (train.length or shape.positions)
    return bool(6 * shape.parameters * tokens >= SECONDS * SHARE * (peak_flops_of(device) or PEAK))


class Compiling:
    """A step; `compiles` says whether its net is compiled."""

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.news: str | None = None
        """What a person should hear of it."""

    def __enter__(self) -> Compiling:
        self._graphs, self._began = _graphs(), time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.is_to_blame(error):
            raise TextmillError(
                f"engine.compile: torch cannot compile the net here: {_spoken(error)}; set engine.compile=false"
            ) from error
        if self.news is None and _graphs() > self._graphs:
            self.news = compiled_in(time.perf_counter() - self._began)

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether an error is of compiling, and not of what is compiled."""
        return self.compiles and any(kind.__name__ in FAILURES for kind in type(error).__mro__)

    def leave(self, error: BaseException) -> None:
        """Go on without compiling, after an error of that."""
        self.compiles, self.news = False, f"torch cannot compile the net here, so it goes on without: {_spoken(error)}"


def _spoken(error: BaseException) -> str:
    """An error in a line; the first one of some says only who failed."""
    return " ".join(str(error).strip().split("\n")[:2]) or type(error).__name__


def _graphs() -> int:
    """Programs that torch's compiler has made in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0
