"""DeepSpeed's JSON config, built from our settings and a user's own JSON, which may add to them but not contradict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from textmill.config import TrainConfig
from textmill.config.deepspeed_json import (
    AUTO,
    COMPARED_ONLY,
    Tree,
    check_types,
    equal_settings,
    explain_json,
    flatten,
    read_json_settings,
)
from textmill.config.engines import DeepSpeedEngine
from textmill.config.yaml_text import format_yaml_value
from textmill.errors import TextmillError


@contextmanager
def explain_errors(engine: DeepSpeedEngine) -> Iterator[None]:
    """Turn an exception of DeepSpeed into a user error, if the user gave settings of DeepSpeed's own."""
    try:
        yield
    except Exception as error:
        user_settings = [engine.deepspeed_config] if engine.deepspeed_config else []
        if engine.deepspeed_overrides:
            user_settings.append("engine.deepspeed_overrides")
        if not user_settings or isinstance(error, TextmillError):
            raise
        where = " and ".join(user_settings)
        message = " ".join(str(error).split())
        raise TextmillError(
            f"{where}: DeepSpeed rejects these settings ({type(error).__name__}: {message[:400]}); fix them"
        ) from None


def fill_unset(engine: DeepSpeedEngine, user: Tree) -> DeepSpeedEngine:
    """The engine's section, with settings that are unset or auto taken from the user's JSON."""
    section = engine.model_dump()
    found = dict(read_json_settings(user).values())
    values = {"zero": 2, **{key.removeprefix("engine."): value for key, value in found.items() if "engine." in key}}
    filled = {name: value for name, value in values.items() if section[name] in (None, AUTO)}
    try:
        return DeepSpeedEngine(**{**section, **filled})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise TextmillError(
            f"{engine.deepspeed_config}: its value for engine.{first['loc'][0]} is {first['input']!r}, "
            "which is not allowed; change it, or remove it"
        ) from None


def build_json(
    engine: DeepSpeedEngine, train: TrainConfig, user: Tree, *, world: int, micro_batch: int, precision: str, block: int
) -> Tree:
    """The config that DeepSpeed gets.

    `engine` is the section that `fill_unset` returned, `precision` is resolved, `block` is the parameters of a block.
    """
    passes = train.batch // (world * micro_batch)
    _check_conflicts(engine, train, user, micro_batch, passes, precision)
    zero: Tree = {"stage": engine.zero}
    for name, device in (("offload_optimizer", engine.offload_optimizer), ("offload_param", engine.offload_weights)):
        if device:
            zero[name] = {"device": device, **({"nvme_path": engine.nvme_folder} if device == "nvme" else {})}
    ours: Tree = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": passes,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        # Without ZeRO DeepSpeed does not skip non-finite gradients, so the engine clips and skips.
        "gradient_clipping": train.clip if engine.zero else 0.0,
    }
    if precision == "bf16" and engine.zero:
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if engine.zero != 1:  # for stage 1 DeepSpeed would choose an optimizer that does not check for overflows
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        ours["fp16"] = {"enabled": True}
    check_types(engine.deepspeed_overrides, "engine.deepspeed_overrides")
    without = {*COMPARED_ONLY, *explain_json(user)[1]}
    passed_on = {name: value for name, value in user.items() if name not in without}
    merged: Tree = {"zero_optimization": _bucket_sizes(block)}
    for overrides in (passed_on, ours, engine.deepspeed_overrides):
        merged = _merge(merged, overrides)
    fp32_sums = merged.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    if merged.get("bf16", {}).get("enabled") and engine.zero == 1 and fp32_sums:
        raise TextmillError(
            "engine.deepspeed_overrides: data_types.grad_accum_dtype=fp32 in bf16 needs engine.zero=2 or 3; "
            "set one of them, or remove it"
        )
    return merged


def _bucket_sizes(block: int) -> Tree:
    """Buckets of one block and live parameters of two; DeepSpeed's defaults exceed entire nets of our sizes."""
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    return {"reduce_bucket_size": block, "stage3_prefetch_bucket_size": block, **dict.fromkeys(names, 2 * block)}


def _check_conflicts(
    engine: DeepSpeedEngine, train: TrainConfig, user: Tree, micro_batch: int, passes: int, precision: str
) -> None:
    """Refuse a user's JSON that contradicts our settings: all that differs in one error."""
    ours: Tree = {
        "engine.micro_batch": micro_batch,
        "engine.precision": precision,
        "train.warmup": train.warmup_steps,
        "train.decay_steps": train.decay_end,
        "train.batch / processes / engine.micro_batch": passes,
        **{f"engine.{name}": getattr(engine, name) for name in ("zero", "offload_optimizer", "offload_weights")},
    }
    settings = read_json_settings(user)
    if "gradient_accumulation_steps" in user:
        settings["gradient_accumulation_steps"] = (
            "train.batch / processes / engine.micro_batch",
            user["gradient_accumulation_steps"],
        )
    written = dict(flatten(user))
    differences = []
    wanted = []
    for name, (key, found) in settings.items():
        if key == "engine.nvme_folder":
            continue
        value = ours[key] if key in ours else _value_of(train, key.removeprefix("train."))
        if not equal_settings(found, value):
            differences.append(f"{name} is {json.dumps(written.get(name, found))}, but {key} is {json.dumps(value)}")
            wanted += [f"{key}={format_yaml_value(found)}"] if " " not in key else []
    refused = explain_json(user)[2]
    problems = [*differences, *(f"{name} {reason}" for name, reason in refused.items())]
    if problems:
        advice = f"to use the file's values, set {' '.join(dict.fromkeys(wanted))}; else " if wanted else ""
        raise TextmillError(
            f"{engine.deepspeed_config}: {'; '.join(problems)}; {advice}change the file, or remove them from it"
        )


def _value_of(section: Any, key: str) -> Any:
    for name in key.split("."):
        section = getattr(section, name)
    return section


def _merge(tree: Tree, overrides: Tree) -> Tree:
    """The tree with values overridden key by key."""
    merged = dict(tree)
    for name, new in overrides.items():
        old = tree.get(name)
        merged[name] = _merge(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return merged
