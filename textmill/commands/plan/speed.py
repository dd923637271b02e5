"""Seconds of a training step: timed here for a few steps, or computed from a stated rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.commands.plan.target import Target
from textmill.config import RunConfig
from textmill.engines import Engine, open_engine
from textmill.engines.memory.estimate import Estimate
from textmill.models import Shape, initial_weights, label_head_of, open_family
from textmill.models.lora import initial_adapters
from textmill.tokens.batches.batch import IGNORED, Batch

MAX_SECONDS = 60.0
"""A probe ends after this, even if it has done fewer steps."""
RECOMPUTE_FACTOR = 4 / 3
"""Activation checkpointing computes the forward pass twice."""


@dataclass(frozen=True)
class Speed:
    """How long a step takes, and how that is known."""

    step_seconds: float
    source: str


def stated_speed(config: RunConfig, target: Target, flops_per_step: float) -> Speed | None:
    """From the device's peak and the assumed MFU; None if the peak is not known."""
    if target.peak is None:
        return None
    rate = target.devices * target.peak * config.plan.mfu
    factor = RECOMPUTE_FACTOR if config.engine.recompute else 1.0
    source = f"assumed: {config.plan.mfu:.0%} of {target.peak / 1e12:,.0f} TFLOP/s (plan.mfu), nothing was timed"
    return Speed(factor * flops_per_step / rate, source)


def probe_speed(config: RunConfig, shape: Shape, estimate: Estimate) -> Speed:
    """Time real steps of one and of two passes on random tokens: their difference is the time of a pass."""
    wanted = max(2, config.plan.probe_steps)
    passes = 2 if estimate.passes > 1 else 1
    engine = _open(config, shape, estimate, passes)
    try:
        end = time.perf_counter() + MAX_SECONDS
        _step(engine, shape, config, estimate.micro_batch, 0)  # the first step compiles
        one = _fastest(engine, shape, config, estimate.micro_batch, wanted // passes, end)
        seconds = one
        if passes == 2:
            _step(engine, shape, config, 2 * estimate.micro_batch, 0)
            two = _fastest(engine, shape, config, 2 * estimate.micro_batch, wanted // 2, end)
            seconds += max(0.0, two - one) * (estimate.passes - 1)
    finally:
        engine.close()
    return Speed(seconds, f"timed here: {config.plan.probe_steps} steps of this net on random tokens")


def _open(config: RunConfig, shape: Shape, estimate: Estimate, passes: int) -> Engine:
    train = config.train.model_copy(update={"batch": passes * estimate.micro_batch, "batch_rampup": []})
    engine = config.engine.model_copy(update={"micro_batch": estimate.micro_batch})
    probed = config.model_copy(update={"train": train, "engine": engine})
    opened = open_engine(probed, shape)
    lora = config.model.lora
    weights: Any = initial_weights(shape, 0)
    opened.load([*weights, *initial_adapters(shape, lora, 0)] if lora else weights, [], 0, "a probe")
    return opened


def _fastest(engine: Engine, shape: Shape, config: RunConfig, rows: int, steps: int, end: float) -> float:
    """Seconds of the fastest step: other programs only make steps slower."""
    found = [_step(engine, shape, config, rows, 1)]
    for step in range(1, max(1, steps)):
        if time.perf_counter() > end:
            break
        found.append(_step(engine, shape, config, rows, step + 1))
    return min(found)


def _labels(ids: NDArray[np.int32], shape: Shape, config: RunConfig, step: int) -> NDArray[np.int32]:
    """A label for every token, or for as many as a masked language model predicts; two for a finetuned head."""
    if label_head_of(shape):
        return np.where(np.arange(ids.shape[1]) < 2, np.zeros_like(ids), np.int32(IGNORED))
    if open_family(shape.family).OBJECTIVE == "next_token":
        return ids
    predicted = np.random.default_rng(step).random(ids.shape) < config.train.masked.probability
    return np.where(predicted, ids, np.int32(IGNORED))


def _step(engine: Engine, shape: Shape, config: RunConfig, rows: int, step: int) -> float:
    length = config.train.length or shape.positions
    ids = np.random.default_rng(step).integers(0, shape.vocab, (rows, length + 1)).astype(np.int32)
    batch = Batch(ids[:, :-1], _labels(ids[:, 1:], shape, config, step), np.arange(rows))
    if config.train.distil.cache:
        top_k = config.train.distil.top_k
        logs = np.full((rows, length, top_k + 1), -np.log(top_k + 1), np.float32)
        tops = np.broadcast_to(np.arange(top_k, dtype=np.int32), (rows, length, top_k)).copy()
        batch = replace(batch, teacher_ids=tops, teacher_logs=logs)
    began = time.perf_counter()
    _ = engine.train_step(batch, step, 1e-4).loss
    return time.perf_counter() - began
