"""When a net is compiled, and what a person hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import ShortenTraceback

from tests.support.engine_runs import batch_of, config_of, run, started
from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.engines import compile_torch as compiling_torch
from textmill.engines.compile_torch import compiling
from textmill.errors import TextmillError
from textmill.training.run_folder import describe_engine

GPU = torch.device("cuda", 0)
LONG = TrainConfig(steps=2000, batch=64, length=1024)


@dataclass
class Net:
    """As much of a shape as is asked for: GPT-2 small's."""

    parameters: int = 124_439_808
    positions: int = 1024


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card whose maker says 989 TFLOP/s, on a machine with all that compiling needs."""
    monkeypatch.setattr(compiling_torch, "peak_flops_of", lambda device: 989e12)
    monkeypatch.setattr(compiling_torch, "lacking", lambda: "")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("engine", "train", "device", "world", "compiled"),
    [
        (TorchEngine(), LONG, GPU, 1, True),
        (TorchEngine(), LONG.model_copy(update={"steps": 20}), GPU, 1, False),
        (TorchEngine(), LONG.model_copy(update={"length": None}), GPU, 1, True),
        (TorchEngine(), LONG, torch.device("cpu"), 1, False),
        (TorchEngine(), LONG, GPU, 2, False),
        (TorchEngine(deterministic=True), LONG, GPU, 1, False),
        (TorchEngine(compile=False), LONG, GPU, 1, False),
        (TorchEngine(compile=True), LONG.model_copy(update={"steps": 1}), torch.device("cpu"), 2, True),
    ],
    ids=["long", "short", "of the net's own length", "no GPU", "two processes", "bit for bit", "said no", "said yes"],
)
def test_what_is_compiled(
    engine: TorchEngine, train: TrainConfig, device: torch.device, world: int, compiled: bool
) -> None:
    found, words = compiling(engine, train, Net(), device, world)
    assert found == compiled
    assert words.startswith("compiled at the first step") == compiled


@pytest.mark.usefixtures("h200")
def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_torch, "lacking", lambda: "C compiler (install gcc)")
    found = compiling(TorchEngine(), LONG, Net(), GPU, 1)
    assert found == (False, "not compiled, though that would be faster: there is no C compiler (install gcc)")


def compiled_by(backend: Any, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The same, compiled by another part than the one that makes kernels."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *given, **settings: compile_(*given, **{**settings, "backend": backend})
    )
    return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": True})})


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_step_says_that_something_was_compiled_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, and one on a batch of another shape; none in between."""
    if kind == "jax":
        pytest.importorskip("jax")
    engine = started(compiled_by("aot_eager", config_of(kind), monkeypatch) if kind == "torch" else config_of(kind))
    whole = batch_of(0)
    half = type(whole)(whole.inputs[:2], whole.labels[:2], whole.samples[:2])
    news = [engine.train_step(batch, 0, 1e-3).news for batch in (whole, whole, half, whole)]
    assert [one is not None and one.endswith(" s to begin, with compiling") for one in news] == [
        True,
        False,
        True,
        False,
    ]


def fails(*_: Any) -> Any:
    raise ValueError("no such instruction")


def test_what_was_to_be_compiled_and_cannot_be_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(compiled_by(fails, config_of("torch"), monkeypatch))
    with pytest.raises(
        TextmillError, match=r"^engine\.compile: torch cannot .*no such instruction.*; set engine\.compile=false$"
    ):
        engine.train_step(batch_of(0), 0, 1e-3)


def too_old(*_: Any) -> Any:
    """As inductor says it of a card that Triton does not know; torch passes that on as it is."""

    class GPUTooOldForTriton(ShortenTraceback): ...

    raise GPUTooOldForTriton("too old", first_useful_frame=None)


@pytest.mark.parametrize("backend", [fails, too_old])
def test_what_nobody_asked_to_be_compiled_goes_on_without(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same steps as what is not compiled."""
    config = config_of("torch", micro_batch=4)
    plain, engine = started(config), started(compiled_by(backend, config, monkeypatch))
    engine.requested = False  # type: ignore[attr-defined]
    news = [engine.train_step(batch_of(step), step, 1e-2).news for step in range(3)]
    assert news[0] is not None
    assert news[0].startswith("torch cannot compile the net here, so it goes on without: ")
    assert news[1:] == [None, None]
    run(plain, range(3))
    for (name, one), (_, other) in zip(engine.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(one, other, name)


class TritonError(Exception):
    """As Triton names its own."""


@pytest.mark.parametrize("compiled", [False, True])
def test_an_error_of_what_runs_uncompiled_too_is_told_as_it_is(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel of our own, say: not compiling would not help."""
    config = config_of("torch")
    engine: Any = started(compiled_by("aot_eager", config, monkeypatch) if compiled else config)
    engine.requested = False

    def one_pass(*_: Any) -> Any:
        raise TritonError("out of resource: shared memory")

    engine.one_pass = engine._pass = one_pass
    with pytest.raises(TritonError):
        engine.train_step(batch_of(0), 0, 1e-3)


def test_a_batch_that_grows_is_compiled_for_one_size() -> None:
    """The automatic micro-batch divides what the batch begins with and grows by, where it is compiled."""
    for compiled, size in ((True, 4), (False, 8)):
        config = config_of("torch").model_copy(
            update={"train": TrainConfig(batch=8, batch_rampup=[4, 4, 100], length=8)}
        )
        engine = config.engine.model_copy(update={"compile": compiled, "micro_batch": "auto"})
        assert started(config.model_copy(update={"engine": engine})).facts()["micro_batch"] == size


def test_it_is_said_before_the_first_step() -> None:
    facts: dict[str, Any] = started(config_of("torch")).facts()
    assert describe_engine(facts).endswith(", micro-batch 8")
    assert describe_engine(facts | {"compiling": "compiled so"}).endswith(", micro-batch 8, compiled so")
