"""DeepSpeed's JSON config, built from our settings and a user's own JSON, which may add to them but not contradict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ValidationError

from textmill.config import RunConfig, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.errors import TextmillError
from textmill.schedules import decay_end, warmup_steps

Tree = dict[str, Any]
AUTO = "auto"
"""The value that JSON files for Hugging Face's trainer use for "fill this in"."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "LRRangeTest": "range_test"}
"""Values of `train.schedule` by the names of DeepSpeed's schedulers."""
TYPES: dict[str, tuple[type, ...]] = {
    "an object": (dict,),
    "an object or null": (dict, NoneType),
    "true or false": (bool,),
    "a number": (int, float),
    "a string": (str,),
    "a string or null": (str, NoneType),
}
KEYS_BY_TYPE: dict[str, tuple[str, ...]] = {
    "an object": (
        "zero_optimization",
        "fp16",
        "bf16",
        "data_types",
        "optimizer",
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "aio",
        "activation_checkpointing",
        "checkpoint",
        "comms_logger",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "flops_profiler",
        "pipeline",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "wandb",
    ),
    "an object or null": ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
    "true or false": (
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "prescale_gradients",
        "disable_allgather",
        "dataloader_drop_last",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    "a number": ("steps_per_print", "gradient_predivide_factor"),
    "a string": ("optimizer.type", "scheduler.type", "gradient_allreduce_op"),
    "a string or null": ("communication_data_type",),
}
"""Keys whose type is checked here, because DeepSpeed or this module reads them without a check."""
REQUIRED_VALUES = {
    "gradient_allreduce_op": "mean",
    "torch_autocast.enabled": False,
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 0,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    "data_efficiency.enabled": False,
}
"""Keys that would change sums, precision or samples, and the only values the engine supports."""
COMPARED_ONLY = ("optimizer", "scheduler")
"""Keys of a user's JSON that must agree with our settings but are not passed to DeepSpeed: we build the optimizer."""


def read_user_config(path: str | None) -> Tree:
    """A user's DeepSpeed JSON without its "auto" values; empty if there is no path."""
    if path is None:
        return {}
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TextmillError(f"engine.deepspeed_config: {path} is not readable as JSON ({error})") from None
    if not isinstance(tree, dict):
        raise TextmillError(
            f"engine.deepspeed_config: {path} contains a {type(tree).__name__}; it must be a JSON object"
        )
    tree = _without_auto(tree)
    _check_types(tree, path)
    return tree


def _check_types(tree: Tree, where: str) -> None:
    for kind, names in KEYS_BY_TYPE.items():
        for name in names:
            parent, _, key = name.rpartition(".")
            section = tree.get(parent, {}) if parent else tree
            if key in section and not isinstance(found := section[key], TYPES[kind]):
                raise TextmillError(f"{where}: {name} is {json.dumps(found)}; it must be {kind}")


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
    zero = user.get("zero_optimization", {})
    flat = dict(_flatten(user))
    half_precisions = [name for name in ("fp16", "bf16") if flat.get(f"{name}.enabled")]
    offload_optimizer = _offload_device(zero.get("offload_optimizer")) or None
    if offload_optimizer is None and zero.get("cpu_offload"):  # DeepSpeed's older name
        offload_optimizer = "cpu"
    optimizer_folder = flat.get("zero_optimization.offload_optimizer.nvme_path")
    user_values: Tree = {
        "zero": zero.get("stage", 2),
        "precision": half_precisions[0] if half_precisions else AUTO,
        "offload_optimizer": offload_optimizer,
        "offload_weights": _offload_device(zero.get("offload_param")),
        "nvme_folder": optimizer_folder or flat.get("zero_optimization.offload_param.nvme_path"),
        "micro_batch": flat.get("train_micro_batch_size_per_gpu", AUTO),
    }
    section = engine.model_dump()
    filled = {name: value for name, value in user_values.items() if section[name] in (None, AUTO)}
    try:
        return DeepSpeedEngine(**{**section, **filled})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise TextmillError(
            f"{engine.deepspeed_config}: its value for engine.{first['loc'][0]} is {first['input']!r}, "
            "which is not allowed; change it, or remove it"
        ) from None


def build_json(
    config: RunConfig, engine: DeepSpeedEngine, user: Tree, *, world: int, micro_batch: int, precision: str, block: int
) -> Tree:
    """The config that DeepSpeed gets.

    `engine` is the section that `fill_unset` returned, `precision` is resolved, `block` is the parameters of a block.
    """
    train = config.train
    passes = config.train.batch // (world * micro_batch)
    _check_conflicts(config, engine, user, micro_batch, passes, precision)
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
    _check_types(engine.deepspeed_overrides, "engine.deepspeed_overrides")
    passed_on = {name: value for name, value in user.items() if name not in COMPARED_ONLY}
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
    config: RunConfig, engine: DeepSpeedEngine, user: Tree, micro_batch: int, passes: int, precision: str
) -> None:
    """Refuse a user's JSON that contradicts our settings."""
    path = engine.deepspeed_config
    train = config.train
    flat = dict(_flatten(user))
    if str(flat.get("scheduler.type")).startswith("Warmup"):
        flat.setdefault("scheduler.params.warmup_type", "log")  # DeepSpeed's default
    expected: dict[str, tuple[str, Any]] = {
        "train_batch_size": ("train.batch", train.batch),
        "train_micro_batch_size_per_gpu": ("engine.micro_batch", micro_batch),
        "gradient_accumulation_steps": ("train.batch / processes / engine.micro_batch", passes),
        "gradient_clipping": ("train.clip", train.clip),
        "zero_optimization.stage": ("engine.zero", engine.zero),
        "zero_optimization.offload_optimizer.device": ("engine.offload_optimizer", engine.offload_optimizer or "none"),
        "zero_optimization.offload_param.device": ("engine.offload_weights", engine.offload_weights or "none"),
        "fp16.enabled": ("engine.precision=fp16", precision == "fp16"),
        "bf16.enabled": ("engine.precision=bf16", precision == "bf16"),
        **{name: ("the only supported value", value) for name, value in REQUIRED_VALUES.items()},
        **_expected_optimizer(train, flat),
        **_expected_schedule(train, flat),
    }
    for name, found in flat.items():
        key, value = expected.get(name, ("", found))
        if not _is_equal(found, value):
            raise TextmillError(
                f"{path}: {name} is {json.dumps(found)}, but {key} is {json.dumps(value)}; "
                f"set both to the same value, or remove {name}"
            )
        if name.startswith("optimizer.params.") and name not in expected and found is not True:
            raise TextmillError(
                f"{path}: {name} is {json.dumps(found)}, which textmill's AdamW does not support; remove it"
            )


def _expected_optimizer(train: TrainConfig, flat: Tree) -> dict[str, tuple[str, Any]]:
    """Our setting and its value for each optimizer key; DeepSpeed's Adam decays weights as AdamW does."""
    kind = flat.get("optimizer.type", "AdamW")
    params = {
        "lr": ("train.learning_rate", train.learning_rate),
        "eps": ("train.epsilon", train.epsilon),
        "weight_decay": ("train.weight_decay", train.weight_decay),
        "betas": ("train.betas", train.betas),
    }
    return {
        "optimizer.type": ("train.optimizer", kind if str(kind).lower() in ("adam", "adamw") else train.optimizer),
        **{f"optimizer.params.{name}": value for name, value in params.items()},
    }


def _expected_schedule(train: TrainConfig, flat: Tree) -> dict[str, tuple[str, Any]]:
    """Our setting and its value for each scheduler key."""
    kind = flat.get("scheduler.type")
    if kind is None:
        return {}
    params = {
        "warmup_min_lr": ("train.min_learning_rate", train.min_learning_rate),
        "warmup_max_lr": ("train.learning_rate", train.learning_rate),
        "warmup_num_steps": ("train.warmup in steps", warmup_steps(train)),
        "warmup_type": ("train.warmup_shape", train.warmup_shape),
        "total_num_steps": ("the end of the decay in steps", decay_end(train)),
        "lr_range_test_min_lr": ("train.min_learning_rate", train.min_learning_rate),
        "lr_range_test_step_size": ("train.range_test.steps", train.range_test.steps),
        "lr_range_test_step_rate": ("train.range_test.rate", train.range_test.rate),
        "lr_range_test_staircase": ("train.range_test.staircase", train.range_test.staircase),
    }
    value = kind if SCHEDULES.get(kind) == train.schedule else train.schedule
    return {
        "scheduler.type": ("train.schedule", value),
        **{f"scheduler.params.{name}": param for name, param in params.items()},
    }


def _is_equal(found: Any, expected: Any) -> bool:
    """Whether two settings are equal: numbers by value, so that 1 equals 1.0, and "1e-4" as a string equals 1e-4."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_is_equal, found, expected))
    if isinstance(found, bool) or isinstance(expected, bool) or expected is None:
        return bool(found is expected)
    try:
        return float(found) == float(expected)
    except (TypeError, ValueError, OverflowError):
        return bool(found == expected)


def _offload_device(section: Any) -> str | None:
    device = section.get("device") if isinstance(section, dict) else None
    return None if device == "none" else device


def _without_auto(tree: Tree) -> Tree:
    kept = {name: value for name, value in tree.items() if value != AUTO}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values with dotted keys."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _merge(tree: Tree, overrides: Tree) -> Tree:
    """The tree with values overridden key by key."""
    merged = dict(tree)
    for name, new in overrides.items():
        old = tree.get(name)
        merged[name] = _merge(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return merged
