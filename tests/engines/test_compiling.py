"""When a net is compiled, and what the log reports of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import ShortenTraceback

from tests.support.engine_runs import batch_of, config_of, run, started
from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.engines import on_torch
from textmill.engines.meshes import Mesh
from textmill.engines.on_torch import decide_compile, try_compiler
from textmill.errors import TextmillError
from textmill.training.run_folder import describe_engine

GPU = torch.device("cuda", 0)
LONG = TrainConfig(steps=2000, batch=64, length=1024)


@dataclass
class Net:
    """The attributes of a shape that are needed, of GPT-2 small."""

    parameters: int = 124_439_808
    positions: int = 1024


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a peak of 989 TFLOP/s, on a machine that can compile."""
    monkeypatch.setattr(on_torch, "peak_flops_of", lambda device: 989e12)
    monkeypatch.setattr(on_torch, "missing_requirement", lambda: "")
    monkeypatch.setattr(on_torch, "try_compiler", lambda device: "")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("engine", "train", "device", "mesh", "compiled"),
    [
        (TorchEngine(), LONG, GPU, Mesh(), True),
        (TorchEngine(), LONG.model_copy(update={"steps": 20}), GPU, Mesh(), False),
        (TorchEngine(), LONG.model_copy(update={"length": None}), GPU, Mesh(), True),
        (TorchEngine(), LONG, torch.device("cpu"), Mesh(), False),
        (TorchEngine(), LONG, GPU, Mesh(2), True),
        (TorchEngine(), LONG, GPU, Mesh(shard=2), True),
        (TorchEngine(), LONG, GPU, Mesh(tensor=2), False),
        (TorchEngine(), LONG, GPU, Mesh(64), False),
        (TorchEngine(deterministic=True), LONG, GPU, Mesh(), False),
        (TorchEngine(), LONG.model_copy(update={"minutes": 30}), GPU, Mesh(), True),
        (TorchEngine(), LONG.model_copy(update={"minutes": 1}), GPU, Mesh(), False),
        (TorchEngine(), LONG.model_copy(update={"minutes": 30, "steps": 20}), GPU, Mesh(), False),
        (TorchEngine(compile=False), LONG, GPU, Mesh(), False),
        (TorchEngine(compile=True), LONG.model_copy(update={"steps": 1}), torch.device("cpu"), Mesh(tensor=2), True),
    ],
    ids=[
        "long",
        "short",
        "default length",
        "no GPU",
        "two",
        "shards",
        "tensor",
        "short on 64",
        "deterministic",
        "long by minutes",
        "short by minutes",
        "short by epochs",
        "set to false",
        "set to true",
    ],
)
def test_when_a_net_is_compiled(
    engine: TorchEngine, train: TrainConfig, device: torch.device, mesh: Mesh, compiled: bool
) -> None:
    found, note = decide_compile(engine, train, Net(), device, mesh)
    assert found == compiled
    assert note.startswith("compiles in the first step") == compiled


@pytest.mark.usefixtures("h200")
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torch, "missing_requirement", lambda: "C compiler (install gcc)")
    found = decide_compile(TorchEngine(), LONG, Net(), GPU, Mesh())
    assert found == (False, "not compiled, although it would be faster: no C compiler (install gcc) found")


@pytest.mark.usefixtures("h200")
def test_with_fsdp_a_compiler_that_fails_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: compile_(net, backend=fails))
    failure = try_compiler(torch.device("cpu"))
    assert "no such instruction" in failure
    monkeypatch.setattr(on_torch, "try_compiler", lambda device: failure)
    found, note = decide_compile(TorchEngine(), LONG, Net(), GPU, Mesh(shard=2))
    assert not found
    assert note.startswith("not compiled, although it would be faster: torch cannot compile here: ")
    assert "no such instruction" in note
    assert decide_compile(TorchEngine(), LONG, Net(), GPU, Mesh())[0], "one process goes on after a failure"


def test_a_compiler_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: compile_(net, backend="aot_eager"))
    assert try_compiler(torch.device("cpu")) == ""


def compiled_by(backend: Any, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The config with compilation by another backend than inductor."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *given, **settings: compile_(*given, **{**settings, "backend": backend})
    )
    return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": True})})


@pytest.mark.long_with("jax")
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_step_reports_its_compile_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step does, and one with a batch of another shape; the steps in between do not."""
    if kind == "jax":
        pytest.importorskip("jax")
    engine = started(compiled_by("aot_eager", config_of(kind), monkeypatch) if kind == "torch" else config_of(kind))
    full = batch_of(0)
    half = type(full)(full.inputs[:2], full.labels[:2], full.samples[:2])
    notes = [engine.train_step(batch, 0, 1e-3).note for batch in (full, full, half, full)]
    compiled = [note is not None and note.endswith(" s to start, including compilation") for note in notes]
    assert compiled == [True, False, True, False]


def fails(*_: Any) -> Any:
    raise ValueError("no such instruction")


def test_a_compile_error_is_a_user_error_if_compiling_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(compiled_by(fails, config_of("torch"), monkeypatch))
    with pytest.raises(
        TextmillError, match=r"^engine\.compile: torch cannot .*no such instruction.*; set engine\.compile=false$"
    ):
        engine.train_step(batch_of(0), 0, 1e-3)


def too_old(*_: Any) -> Any:
    """Inductor's error for a GPU that Triton does not support, which torch does not wrap."""

    class GPUTooOldForTriton(ShortenTraceback): ...

    raise GPUTooOldForTriton("too old", first_useful_frame=None)


@pytest.mark.parametrize("backend", [fails, too_old])
def test_a_compile_error_falls_back_to_eager_under_auto(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are those of an engine that never compiled."""
    config = config_of("torch", micro_batch=4)
    plain, engine = started(config), started(compiled_by(backend, config, monkeypatch))
    engine.compile_requested = False  # type: ignore[attr-defined]
    notes = [engine.train_step(batch_of(step), step, 1e-2).note for step in range(3)]
    assert notes[0] is not None
    assert notes[0].startswith("torch cannot compile the net here, so it runs eagerly: ")
    assert notes[1:] == [None, None]
    run(plain, range(3))
    for (name, one), (_, other) in zip(engine.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(one, other, name)


class TritonError(Exception):
    """Has the name of Triton's own error."""


@pytest.mark.parametrize("compiled", [False, True])
def test_an_error_that_eager_mode_raises_too_is_not_hidden(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in a Triton kernel of ours: running eagerly would not help."""
    config = config_of("torch")
    engine: Any = started(compiled_by("aot_eager", config, monkeypatch) if compiled else config)
    engine.compile_requested = False

    def run_pass(*_: Any) -> Any:
        raise TritonError("out of resource: shared memory")

    engine._forward_backward = run_pass
    with pytest.raises(TritonError):
        engine.train_step(batch_of(0), 0, 1e-3)


def test_a_batch_ramp_up_is_compiled_for_one_size() -> None:
    """In a compiled net, the automatic micro-batch divides the first batch size and its increments."""
    for compiled, size in ((True, 4), (False, 8)):
        config = config_of("torch").model_copy(
            update={"train": TrainConfig(batch=8, batch_rampup=[4, 4, 100], length=8)}
        )
        engine = config.engine.model_copy(update={"compile": compiled, "micro_batch": "auto"})
        assert started(config.model_copy(update={"engine": engine})).describe()["micro_batch"] == size


def test_the_first_log_line_reports_compiling() -> None:
    facts: dict[str, Any] = started(config_of("torch")).describe()
    assert describe_engine(facts).endswith(", micro-batch 8")
    assert describe_engine(facts | {"compiling": "compiled so"}).endswith(", micro-batch 8, compiled so")


def test_importing_an_engine_does_not_load_the_compiler() -> None:
    """Loading it takes seconds, and fails where DeepSpeed has replaced tensor classes."""
    code = "import sys, textmill.engines.on_torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
