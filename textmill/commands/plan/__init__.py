"""The command plan: memory by part, time, disk and cost of a run before it starts, on this machine or another.

`textmill.planning` chooses settings for `new` and `tune`; this command estimates what given settings take.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from textmill.commands.plan.amounts import (
    cache_bytes,
    communication_of,
    complete,
    disk_of,
    open_data,
    open_shape,
    parameters_by_part,
    run_length_of,
    teacher_cache_bytes,
    trained_weights,
)
from textmill.commands.plan.fitting import Fitting, nearest_fitting
from textmill.commands.plan.speed import Speed, probe_speed, stated_speed
from textmill.commands.plan.target import Target, target_of
from textmill.commands.plan.text import format_plan
from textmill.config import RunConfig
from textmill.engines.memory.estimate import Estimate, Estimator
from textmill.models import Shape
from textmill.training.run_length import RunLength
from textmill.training.teachers import teacher_flops


def plan(config: RunConfig, as_json: bool = False) -> dict[str, Any]:
    """Print and return what the run takes; writes nothing."""
    data = open_data(config)
    config = complete(config, data)
    shape = open_shape(config, data)
    target = target_of(config)
    estimator = Estimator(shape)
    estimate = estimator.estimate(config, target.devices, target.device)
    fits = estimate.memory.total <= target.usable
    settings_that_fit = [] if fits else _settings_that_fit(config, estimator, target)
    figures: dict[str, Any] = {
        "machine": _describe_target(target),
        "parameters": parameters_by_part(config, shape),
        "trained": sum(weight.size for weight in trained_weights(config, shape)),
        "memory": _describe_memory(config, shape, estimate, target),
        "fits": fits,
        "settings_that_fit": [_describe_fitting(fitting) for fitting in settings_that_fit],
        **_describe_work(config, shape, run_length_of(config, shape, data), target, estimate, fits, data.tokens),
    }
    figures["disk"] = disk_of(config, shape, data, figures["steps"])
    if config.train.distil.cache and figures["tokens"] is not None:
        figures["disk"]["teacher_cache"] = teacher_cache_bytes(config, shape, figures["tokens"], estimate.precision)
    print(json.dumps(figures, indent=2, ensure_ascii=False) if as_json else format_plan(figures))
    return figures


def _settings_that_fit(config: RunConfig, estimator: Estimator, target: Target) -> list[Fitting]:
    estimate = estimator.estimate(config, target.devices, target.device, exact=False)
    return nearest_fitting(config, estimator, target, estimate)


def _describe_target(target: Target) -> dict[str, Any]:
    return {
        "device": target.name,
        "devices": target.devices,
        "memory": target.device.memory,
        "usable": target.usable,
        "peak_flops": target.peak,
    }


def _describe_memory(config: RunConfig, shape: Shape, estimate: Estimate, target: Target) -> dict[str, Any]:
    mesh = {key: value for key, value in asdict(estimate.mesh).items() if key in ("replicate", "shard", "tensor")}
    return {
        **asdict(estimate.memory),
        "total": estimate.memory.total,
        "host": estimate.host,
        "cache_per_text": cache_bytes(shape, estimate.itemsize),
        "engine": estimate.engine,
        "precision": estimate.precision,
        "micro_batch": estimate.micro_batch,
        "passes": estimate.passes,
        "recompute": config.engine.recompute,
        "mesh": mesh,
    }


def _describe_fitting(fitting: Fitting) -> dict[str, Any]:
    estimate = fitting.estimate
    return {"settings": fitting.settings, "total": estimate.memory.total, "host": estimate.host}


def _describe_work(
    config: RunConfig,
    shape: Shape,
    length: RunLength | None,
    target: Target,
    estimate: Estimate,
    fits: bool,
    train_tokens: int | None,
) -> dict[str, Any]:
    """Steps, tokens, operations, time and cost; with `train.minutes` the steps follow from the time."""
    sample_length = config.train.length or shape.positions
    flops_per_token = shape.flops_per_token(sample_length, trained_weights(config, shape))
    flops_per_token += teacher_flops(config, sample_length)
    step_tokens = config.train.batch * sample_length
    speed = _speed(config, shape, target, estimate, flops_per_token * step_tokens, fits)
    steps, seconds = _steps_and_seconds(config.train.minutes, length, speed, step_tokens)
    run_tokens = length.tokens_after(steps) if length is not None and steps is not None else None
    hours = None if seconds is None else seconds / 3600
    price = config.plan.price
    return {
        "steps": steps,
        "tokens": run_tokens,
        "train_tokens": train_tokens,
        "epochs": run_tokens / train_tokens if run_tokens is not None and train_tokens else None,
        "flops_per_token": flops_per_token,
        "flops": None if run_tokens is None else flops_per_token * run_tokens,
        "communication": communication_of(config, shape, estimate, sample_length),
        "step_seconds": speed.step_seconds if speed else None,
        "speed": speed.source if speed else None,
        "tokens_per_second": step_tokens / speed.step_seconds if speed else None,
        "hours": hours,
        "cost": None if hours is None or price is None else hours * target.devices * price,
    }


def _steps_and_seconds(
    minutes: float | None, length: RunLength | None, speed: Speed | None, step_tokens: int
) -> tuple[int | None, float | None]:
    """How many steps the run has and how long they take, as far as known; `minutes` is `train.minutes`."""
    if minutes is not None:
        if speed is None:
            return None, 60.0 * minutes
        steps = max(1, int(60.0 * minutes / speed.step_seconds))
        if length is not None and length.max_steps < steps:
            return length.max_steps, length.max_steps * speed.step_seconds
        return steps, 60.0 * minutes
    if length is None or not length.known:
        return None, None
    seconds = None if speed is None else length.tokens_after(length.steps) / step_tokens * speed.step_seconds
    return length.steps, seconds


def _speed(
    config: RunConfig, shape: Shape, target: Target, estimate: Estimate, flops_per_step: float, fits: bool
) -> Speed | None:
    if target.here and fits and config.plan.probe_steps:
        return probe_speed(config, shape, estimate)
    return stated_speed(config, target, flops_per_step)
