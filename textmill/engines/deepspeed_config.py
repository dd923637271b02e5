"""DeepSpeed's JSON: made from our settings, over a user's own file, which may say more but nothing else."""

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
from textmill.schedules import warmup_steps

Tree = dict[str, Any]
AUTO = "auto"
"""What files that were written for Hugging Face leave to whoever reads them."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "LRRangeTest": "range_test"}
"""DeepSpeed's schedules by our names."""
KINDS: dict[str, tuple[str, ...]] = {
    "an object": (
        "zero_optimization", "fp16", "bf16", "data_types", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "aio",
        "activation_checkpointing", "checkpoint", "comms_logger", "compile", "csv_monitor", "data_efficiency", "flops_profiler",
        "pipeline", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "wandb",
    ),
    "an object or null": ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
    "true or false": (
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients", "disable_allgather", "dataloader_drop_last",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    ),
    "a number": ("steps_per_print", "gradient_predivide_factor"),
    "a text": ("optimizer.type", "scheduler.type", "gradient_allreduce_op"),
    "a text or null": ("communication_data_type",),
}  # fmt: skip
"""What is taken for granted where it is read, here or by DeepSpeed, and so is looked at before."""
TYPES: dict[str, tuple[type, ...]] = {
    "an object": (dict,), "an object or null": (dict, NoneType), "true or false": (bool,), "a number": (int, float),
    "a text": (str,), "a text or null": (str, NoneType),
}  # fmt: skip
ALWAYS = {
    "gradient_allreduce_op": "mean", "torch_autocast.enabled": False, "sequence_parallel_size": 1, "tensor_parallel.autotp_size": 0,
    "bf16.bf16_master_weights_and_grads": False, "bf16.bf16_optimizer_states": False, "fp16.fp16_master_weights_and_grads": False,
    "data_efficiency.enabled": False,
}  # fmt: skip
"""What would change sums, precision or samples behind the engine's back, and what it must be."""
OUR_OWN = ("optimizer", "scheduler")
"""Parts of a file that are held against our settings and not handed on: the optimizer and its rate are ours."""


def read_file(path: str | None) -> Tree:
    """A user's own JSON, without what it leaves open; empty if none is named."""
    if path is None:
        return {}
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TextmillError(f"engine.deepspeed_config: {path} is not readable as JSON ({error})") from None
    if not isinstance(tree, dict):
        raise TextmillError(
            f"engine.deepspeed_config: {path} holds a {type(tree).__name__}; DeepSpeed's settings are an object"
        )
    tree = _said(tree)
    _check_kinds(tree, path)
    return tree


def _check_kinds(tree: Tree, where: str) -> None:
    for kind, names in KINDS.items():
        for name in names:
            part, _, last = name.rpartition(".")
            holder = tree.get(part, {}) if part else tree
            if last in holder and not isinstance(found := holder[last], TYPES[kind]):
                raise TextmillError(f"{where}: {name} is {json.dumps(found)}; {kind} belongs there")


@contextmanager
def their_say(engine: DeepSpeedEngine) -> Iterator[None]:
    """DeepSpeed's own look at settings of a user's: what it does not take is told in a sentence."""
    try:
        yield
    except Exception as error:
        where = " and ".join(
            [
                *([engine.deepspeed_config] if engine.deepspeed_config else []),
                *(["engine.deepspeed_overrides"] if engine.deepspeed_overrides else []),
            ]
        )
        if not where or isinstance(error, TextmillError):
            raise
        said = " ".join(str(error).split())
        raise TextmillError(
            f"{where}: DeepSpeed does not take these settings ({type(error).__name__}: {said[:400]}); mend them"
        ) from None


def settled(engine: DeepSpeedEngine, theirs: Tree) -> DeepSpeedEngine:
    """The section with what it leaves open taken from the file."""
    zero, at = theirs.get("zero_optimization", {}), dict(_leaves(theirs))
    halves = [name for name in ("fp16", "bf16") if at.get(f"{name}.enabled")]
    found: Tree = {
        "zero": zero.get("stage", 2),
        "precision": halves[0] if halves else AUTO,
        "offload_optimizer": _device_of(zero.get("offload_optimizer")) or ("cpu" if zero.get("cpu_offload") else None),
        "offload_weights": _device_of(zero.get("offload_param")),
        "nvme_folder": at.get("zero_optimization.offload_optimizer.nvme_path")
        or at.get("zero_optimization.offload_param.nvme_path"),
        "micro_batch": at.get("train_micro_batch_size_per_gpu", AUTO),
    }
    own = engine.model_dump()
    opened = {name: value for name, value in found.items() if own[name] in (None, AUTO)}
    try:
        return DeepSpeedEngine(**{**own, **opened})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = f"what it says for engine.{first['loc'][0]} is {first['input']!r}"
        raise TextmillError(
            f"{engine.deepspeed_config}: {wrong}, which cannot be; say another, or take it out"
        ) from None


def json_of(
    config: RunConfig,
    engine: DeepSpeedEngine,
    theirs: Tree,
    *,
    world: int,
    micro_batch: int,
    precision: str,
    block: int,
) -> Tree:
    """All that DeepSpeed is told; `engine` is the settled section, `precision` what its auto came to, `block` the weights of a block."""
    train, passes = config.train, config.train.batch // (world * micro_batch)
    _refuse_contradictions(engine.deepspeed_config, theirs, config, engine, micro_batch, passes, precision)
    zero: Tree = {"stage": engine.zero}
    for name, device in (("offload_optimizer", engine.offload_optimizer), ("offload_param", engine.offload_weights)):
        if device:
            zero[name] = {"device": device, **({"nvme_path": engine.nvme_folder} if device == "nvme" else {})}
    ours: Tree = {
        "train_batch_size": train.batch, "train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": passes,
        "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        # Without ZeRO DeepSpeed leaves non-finite gradients in; there the engine clips and skips by itself.
        "gradient_clipping": train.clip if engine.zero else 0.0,
    }  # fmt: skip
    if precision == "bf16" and engine.zero:
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if engine.zero != 1:  # at 1 DeepSpeed would change to an optimizer that does not look for overflows
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        ours["fp16"] = {"enabled": True}
    _check_kinds(engine.deepspeed_overrides, "engine.deepspeed_overrides")
    kept = {name: value for name, value in theirs.items() if name not in OUR_OWN}
    whole = _laid(_laid(_laid({"zero_optimization": _sizes(block)}, kept), ours), engine.deepspeed_overrides)
    if (
        whole.get("bf16", {}).get("enabled")
        and engine.zero == 1
        and whole.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    ):
        raise TextmillError(
            "engine.deepspeed_overrides: data_types.grad_accum_dtype=fp32 in bf16 wants engine.zero=2 or 3; set one, or take it out"
        )
    return whole


def _sizes(block: int) -> Tree:
    """What travels at a time and how much of ZeRO-3's weights stays: a few blocks. DeepSpeed's own sizes are whole nets of this kind."""
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    return {"reduce_bucket_size": block, "stage3_prefetch_bucket_size": block, **dict.fromkeys(names, 2 * block)}


def _refuse_contradictions(
    path: str | None,
    theirs: Tree,
    config: RunConfig,
    engine: DeepSpeedEngine,
    micro_batch: int,
    passes: int,
    precision: str,
) -> None:
    train, at = config.train, dict(_leaves(theirs))
    if str(at.get("scheduler.type")).startswith("Warmup"):
        at.setdefault("scheduler.params.warmup_type", "log")  # DeepSpeed's own default
    known: dict[str, tuple[str, Any]] = {
        "train_batch_size": ("train.batch", train.batch),
        "train_micro_batch_size_per_gpu": ("engine.micro_batch", micro_batch),
        "gradient_accumulation_steps": ("train.batch over processes and engine.micro_batch", passes),
        "gradient_clipping": ("train.clip", train.clip),
        "zero_optimization.stage": ("engine.zero", engine.zero),
        "zero_optimization.offload_optimizer.device": ("engine.offload_optimizer", engine.offload_optimizer or "none"),
        "zero_optimization.offload_param.device": ("engine.offload_weights", engine.offload_weights or "none"),
        "fp16.enabled": ("engine.precision=fp16", precision == "fp16"),
        "bf16.enabled": ("engine.precision=bf16", precision == "bf16"),
        **{name: ("textmill's own", value) for name, value in ALWAYS.items()},
        **_optimizer_of(train, at),
        **_schedule_of(train, at),
    }
    for name, found in at.items():
        key, ours = known.get(name, ("", found))
        if not _equal(found, ours):
            raise TextmillError(
                f"{path}: {name} is {json.dumps(found)}, but {key} is {json.dumps(ours)}; make them agree, or take {name} out"
            )
        if name.startswith("optimizer.params.") and name not in known and found is not True:
            raise TextmillError(
                f"{path}: {name} is {json.dumps(found)}, which textmill's AdamW does not have; take it out"
            )


def _optimizer_of(train: TrainConfig, at: Tree) -> dict[str, tuple[str, Any]]:
    """What a file may say of the optimizer; DeepSpeed's Adam decays as AdamW does."""
    kind = at.get("optimizer.type", "AdamW")
    named = {"lr": train.learning_rate, "eps": train.epsilon, "weight_decay": train.weight_decay, "betas": train.betas}
    words = {"lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay", "betas": "betas"}
    params = {f"optimizer.params.{name}": (f"train.{words[name]}", value) for name, value in named.items()}
    return {
        "optimizer.type": ("train.optimizer", kind if str(kind).lower() in ("adam", "adamw") else train.optimizer),
        **params,
    }


def _schedule_of(train: TrainConfig, at: Tree) -> dict[str, tuple[str, Any]]:
    """What a file may say of the learning rate."""
    kind = at.get("scheduler.type")
    if kind is None:
        return {}
    params = {
        "warmup_min_lr": ("train.min_learning_rate", train.min_learning_rate),
        "warmup_max_lr": ("train.learning_rate", train.learning_rate),
        "warmup_num_steps": ("train.warmup in steps", warmup_steps(train)),
        "warmup_type": ("train.warmup_shape", train.warmup_shape),
        "total_num_steps": ("train.decay_steps or train.steps", train.decay_steps or train.steps),
        "lr_range_test_min_lr": ("train.min_learning_rate", train.min_learning_rate),
        "lr_range_test_step_size": ("train.range_test.steps", train.range_test.steps),
        "lr_range_test_step_rate": ("train.range_test.rate", train.range_test.rate),
        "lr_range_test_staircase": ("train.range_test.staircase", train.range_test.staircase),
    }
    ours = kind if SCHEDULES.get(kind) == train.schedule else train.schedule
    return {
        "scheduler.type": ("train.schedule", ours),
        **{f"scheduler.params.{name}": value for name, value in params.items()},
    }


def _equal(found: Any, ours: Any) -> bool:
    """Whether two settings say the same; 1e-4 may be a text in JSON, and numbers may be whole or not."""
    if isinstance(ours, list):
        return isinstance(found, list) and len(found) == len(ours) and all(map(_equal, found, ours))
    if isinstance(found, bool) or isinstance(ours, bool) or ours is None:
        return bool(found is ours)
    try:
        return float(found) == float(ours)
    except (TypeError, ValueError, OverflowError):
        return bool(found == ours)


def _device_of(part: Any) -> str | None:
    device = part.get("device") if isinstance(part, dict) else None
    return None if device == "none" else device


def _said(tree: Tree) -> Tree:
    """The tree without what it leaves to its reader."""
    return {name: _said(value) if isinstance(value, dict) else value for name, value in tree.items() if value != AUTO}


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _laid(tree: Tree, over: Tree) -> Tree:
    """One tree with another laid over it, key by key."""
    both = {
        name: _laid(tree[name], over[name])
        for name in over
        if isinstance(tree.get(name), dict) and isinstance(over[name], dict)
    }
    return {**tree, **over, **both}
