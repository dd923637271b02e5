"""fp16 with its loss scale: the formula, the engine's numbers, going on bit for bit, and giving up with advice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.engine_runs import LENGTH, batch_of, config_of, started
from textmill.config import RunConfig
from textmill.devices import torch_dtype
from textmill.engines import on_torch as scaling_torch
from textmill.engines.on_torch import FIRST_SCALE, HYSTERESIS, LOWEST_SCALE, WINDOW, LossScaler


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """On a CPU without fp16 oneDNN takes a second for what plain loops do in milliseconds."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def in_fp16(**options: object) -> RunConfig:
    config = config_of("torch", **options)  # type: ignore[arg-type]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"precision": "fp16"})})


def scales_by_the_formula(overflows: list[bool], window: int) -> list[float]:
    """On overflow: counter 0, hysteresis less one, from 0 on halve, not below 1. On success: counter up; at the
    window all anew, double."""
    scale, counter, hysteresis, seen = 2.0**32, 0, 2, []
    for overflow in overflows:
        if overflow:
            counter, hysteresis = 0, hysteresis - 1
            if hysteresis <= 0:
                scale = max(1.0, scale / 2)
        else:
            counter += 1
            if counter == window:
                counter, hysteresis, scale = 0, 2, scale * 2
        seen.append(scale)
    return seen


@pytest.mark.parametrize(
    ("window", "share", "steps"), [(1000, 0.003, 6000), (7, 0.1, 2000), (3, 0.4, 500), (5, 1.0, 50)]
)
def test_the_scale_follows_the_formula(window: int, share: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_torch, "WINDOW", window)
    dice = random.Random(window)
    overflows = [dice.random() < share for _ in range(steps)]
    scaler, seen = LossScaler(torch.device("cpu")), []
    for number, overflow in enumerate(overflows):
        if number % 100 == 50:  # saved and restored, nothing changes
            state, scaler = scaler.state(), LossScaler(torch.device("cpu"))
            scaler.load_state(state)
        scaler.update(torch.tensor(not overflow))
        seen.append(float(scaler.scale))
    assert seen == scales_by_the_formula(overflows, window)


def test_constants_are_those_of_megatron() -> None:
    assert (FIRST_SCALE, LOWEST_SCALE, WINDOW, HYSTERESIS) == (2**32, 1, 1000, 2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fp16_is_close_to_fp32_once_the_scale_fits(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(in_fp16(optimizer=optimizer, micro_batch=4))
    steps = [engine.train_step(batch_of(number), number, 1e-2) for number in range(24)]
    early = [step.skipped for step in steps].index(False)
    assert 5 < early < 24, "2**32 is more than fp16 holds, and halving finds what it does hold"
    assert engine.updates() == 24 - sum(step.skipped for step in steps)
    assert [step.scale for step in steps[:3]] == [2**32, 2**32, 2**31]
    monkeypatch.setattr(scaling_torch, "FIRST_SCALE", 2.0**12)
    exact, near = started(config_of("torch", optimizer=optimizer)), started(in_fp16(optimizer=optimizer))
    pairs = [
        (one.train_step(batch_of(n), n, 1e-2), other.train_step(batch_of(n), n, 1e-2))
        for n in range(8)
        for one, other in [(exact, near)]
    ]
    assert not any(other.skipped for _, other in pairs)
    assert [other.loss for _, other in pairs] == pytest.approx([one.loss for one, _ in pairs], rel=1e-2)
    assert pairs[0][1].norm == pytest.approx(pairs[0][0].norm, rel=2e-3), "the norm is that of the unscaled gradients"
    assert pairs[0][1].loss == pytest.approx(pairs[0][0].loss, rel=1e-4)


def test_the_loss_scale_prevents_underflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a loss spread over many tokens are below fp16's smallest number; with a scale they are there."""
    norms = {}
    for scale in (1.0, 2.0**12):
        monkeypatch.setattr(scaling_torch, "FIRST_SCALE", scale)
        engine = started(in_fp16(clip=0.0))
        shares = np.full((8, LENGTH), 1e-8, np.float32)
        monkeypatch.setattr("textmill.engines.on_torch.token_weights", lambda *given, shares=shares: shares)
        norms[scale] = engine.train_step(batch_of(0), 0, 0.0).norm
    engine = started(config_of("torch", clip=0.0))
    exact = engine.train_step(batch_of(0), 0, 0.0).norm
    assert norms[2.0**12] == pytest.approx(exact, rel=2e-2)
    assert norms[1.0] < 0.8 * exact


def test_other_precisions_have_no_loss_scale() -> None:
    engine = started(config_of("torch"))
    engine.load(engine.weights(), [], 0, "itself", {"scale": 8.0, "good": 1, "left": 2})
    assert engine.scaling() == {}
    assert engine.train_step(batch_of(0), 0, 0.0).scale is None


@pytest.mark.parametrize(
    ("capability", "bf16", "wanted"),
    [((9, 0), True, "bfloat16"), ((7, 0), False, "float16"), ((6, 1), False, "float32")],
)
def test_auto_precision_depends_on_the_device(
    capability: tuple[int, int], bf16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert torch_dtype("auto", torch.device("cuda")) == getattr(torch, wanted)
    assert torch_dtype("auto", torch.device("cpu")) == torch.float32
