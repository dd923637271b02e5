"""The guard against spikes: the rule is the formula's, a spike changes nothing, and a resume remembers."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.stats import median_abs_deviation

from tests.support.engine_runs import VOCAB, batch_of, config_of, started
from textmill.config import TorchEngine
from textmill.config.engines import DeepSpeedEngine
from textmill.engines import Engine, open_engine
from textmill.engines.spikes import SpikeGuard
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.tokens.batches.batch import Batch, corrupt_labels

SETTINGS: dict[str, Any] = {"spike_threshold": 50.0}
BAD = 30
"""The step whose labels are garbage: by then the net knows better."""


@pytest.fixture(autouse=True)
def _few_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.engines.spikes.WINDOW", 8)


def by_the_formula(losses: list[float], deviations: float, window: int) -> list[int]:
    """Which losses are spikes, by numpy's median and scipy's deviation from it, in doubles."""
    kept: list[float] = []
    spikes = []
    for step, loss in enumerate(losses):
        last = np.array(kept[-window:], np.float32).astype(float)
        if len(last) == window and loss > np.median(last) + deviations * median_abs_deviation(last, scale="normal"):
            spikes.append(step)
        elif np.isfinite(loss):
            kept.append(loss)
    return spikes


@pytest.mark.parametrize("window", [5, 8])
@pytest.mark.parametrize("name", ["numpy", "torch", "jax.numpy"])
def test_spikes_match_the_formula(name: str, window: int) -> None:
    xp: Any = pytest.importorskip(name)
    put = torch.tensor if xp is torch else xp.asarray
    dice = np.random.default_rng(3)
    losses = np.linspace(9, 4, 120) + dice.normal(0, 0.2, 120)
    losses[[2, 40, 41, 77, 100]] += [5, 4, 0.9, 30, 1.3]
    losses[50] = np.nan
    guard = SpikeGuard(xp, 4.0, window, put)
    found = []
    for step, loss in enumerate(losses.astype(np.float32)):
        value = put(loss)
        spike = guard.is_spike(guard.state, value)
        guard.state = guard.next_state(guard.state, value, spike, xp.isfinite(value), step + 1)
        found += [step] if bool(spike) else []
    expected = by_the_formula(losses.astype(np.float32).tolist(), 4.0, window)
    assert found == expected
    assert {40, 77} <= set(found)
    assert 2 not in found, "before the window is full nothing is judged"
    assert guard.counts() == {"left": len(expected), "streak": 0, "last": expected[-1] + 1}


def test_an_update_ends_a_streak_and_a_nan_loss_does_not() -> None:
    guard = SpikeGuard(np, 3.0, 3, np.asarray)
    streaks = []
    for step, loss in enumerate(np.float32([1, 2, 3, 50, 50, np.nan, 50, 2, 50])):
        spike = guard.is_spike(guard.state, loss)
        guard.state = guard.next_state(guard.state, loss, spike, np.isfinite(loss), step + 1)
        streaks.append(guard.counts()["streak"])
    assert streaks == [0, 0, 0, 1, 2, 2, 3, 0, 1]


def given(step: int) -> Batch:
    return corrupt_labels(batch_of(step, unequal=False)) if step == BAD else batch_of(step, unequal=False)


def losses_of(engine: Engine, steps: range) -> list[str]:
    return [engine.train_step(given(step), step, 1e-2).loss.hex() for step in steps]


@pytest.mark.long_with("jax")
def test_a_spike_skips_the_update_and_is_saved(kind: str) -> None:
    """The curve after it is that of a run which never saw the step; one that stops before it and goes on has the same
    bits."""
    config = config_of(kind, dropout=0.1, micro_batch=4, **SETTINGS)
    guarded = started(config)
    first = losses_of(guarded, range(BAD))
    saved = (
        [(name, values.copy()) for name, values in guarded.weights()],
        list(guarded.optimizer_state()),
        guarded.updates(),
        "saved",
    )
    assert guarded.guard is not None
    state = json.loads(json.dumps(guarded.guard.save_state()))
    spike = guarded.train_step(given(BAD), BAD, 1e-2)
    assert spike.loss > float.fromhex(first[-1]) + 1, "the loss of garbage, reported unchanged"
    assert guarded.guard.counts() == {"left": 1, "streak": 1, "last": BAD + 1}
    assert guarded.updates() == BAD
    after = losses_of(guarded, range(BAD + 1, BAD + 8))
    other = open_engine(
        config.engine, config.train, open_family(config.model.family).shape_of(config.model, vocab=VOCAB, eos_id=0)
    )
    assert other.guard is not None
    for steps, expected in ((range(BAD + 1, BAD + 8), after), (range(BAD, BAD + 8), [spike.loss.hex(), *after])):
        other.load(*saved)
        other.guard.load_state(state)
        assert losses_of(other, steps) == expected
    assert other.guard.save_state() == guarded.guard.save_state()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_muon_and_fp16_skip_spikes_too(precision: Literal["fp32", "fp16"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.engines.on_torch.FIRST_SCALE", 256.0)
    section = TorchEngine(device="cpu", precision=precision)
    with torch.backends.mkldnn.flags(enabled=False):  # it is slow in fp16 on a CPU without it
        engine = started(config_of("torch", optimizer="muon", **SETTINGS).model_copy(update={"engine": section}))
        losses_of(engine, range(BAD))
        weights, scaling = dict(engine.weights()), engine.scaling()
        assert not engine.train_step(given(BAD), BAD, 1e-2).skipped, "the gradient is finite"
    assert engine.updates() == BAD
    assert scaling.get("scale") == engine.scaling().get("scale"), "a spike is no overflow"
    for name, values in engine.weights():
        assert np.array_equal(values, weights[name]), name


@pytest.mark.long_with(3)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_stage_of_zero(zero: int) -> None:
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    section = DeepSpeedEngine(device="cpu", micro_batch=4, zero=zero)
    engine = started(config_of("torch", **SETTINGS).model_copy(update={"engine": section}))
    losses_of(engine, range(BAD))
    weights = [(name, values.copy()) for name, values in engine.weights()]
    engine.train_step(given(BAD), BAD, 1e-2)
    assert engine.guard is not None
    assert engine.guard.counts() == {"left": 1, "streak": 1, "last": BAD + 1}
    assert engine.updates() == BAD
    for (name, values), (_, same) in zip(engine.weights(), weights, strict=True):
        assert np.array_equal(values, same), name
    engine.close()


def test_unsupported_deepspeed_settings_are_refused() -> None:
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    section = DeepSpeedEngine(device="cpu", zero=1, precision="fp16")
    with pytest.raises(TextmillError, match=r"train\.spike_threshold: in fp16 .* set engine\.precision=bf16"):
        started(config_of("torch", **SETTINGS).model_copy(update={"engine": section}))
