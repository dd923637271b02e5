"""DeepSpeed's JSON config as settings of ours: what it sets here, what DeepSpeed reads, what is ignored or refused.

`build_config` takes settings that nobody gave from the file of `engine.deepspeed_config`; the engine compares the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from textmill.config.other_names import VALUES
from textmill.errors import TextmillError

Tree = dict[str, Any]
AUTO = "auto"
"""The value that JSON files for Hugging Face's trainer use for "fill this in"."""
KEYS = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "engine.micro_batch",
    "gradient_clipping": "train.clip",
    "zero_optimization.stage": "engine.zero",
    "zero_optimization.offload_optimizer.device": "engine.offload_optimizer",
    "zero_optimization.offload_param.device": "engine.offload_weights",
    "zero_optimization.offload_param.nvme_path": "engine.nvme_folder",
    "zero_optimization.offload_optimizer.nvme_path": "engine.nvme_folder",
    "optimizer.type": "train.optimizer",
    "optimizer.params.lr": "train.learning_rate",
    "optimizer.params.eps": "train.epsilon",
    "optimizer.params.weight_decay": "train.weight_decay",
    "optimizer.params.betas": "train.betas",
    "scheduler.type": "train.schedule",
    "scheduler.params.warmup_min_lr": "train.min_learning_rate",
    "scheduler.params.warmup_max_lr": "train.learning_rate",
    "scheduler.params.warmup_num_steps": "train.warmup",
    "scheduler.params.warmup_type": "train.warmup_shape",
    "scheduler.params.total_num_steps": "train.decay_steps",
    "scheduler.params.lr_range_test_min_lr": "train.min_learning_rate",
    "scheduler.params.lr_range_test_step_size": "train.range_test_steps",
}
"""Our key for each key of the JSON that has one."""
COMPARED_ONLY = ("optimizer", "scheduler")
"""Parts of the JSON that are not passed to DeepSpeed: we build both."""
IGNORED = {
    "activation_checkpointing": "textmill recomputes activations itself: use engine.activation_checkpointing",
    "checkpoint load_universal_checkpoint datastates": "textmill writes checkpoints of its own",
    "pipeline": "the DeepSpeed engine has no pipeline stages",
    "dataloader_drop_last curriculum_learning": "textmill builds the batches",
    "autotuning": "engine.micro_batch=auto chooses the size",
    "hybrid_engine": "textmill generates text without DeepSpeed",
    "expert_parallel use_data_before_expert_parallelism": "there are no experts",
    "sparse_attention compression_training progressive_layer_drop eigenvalue quantize_training sparse_gradients "
    "weight_quantization": "DeepSpeed only applies it to nets that ask for it",
    "compile": "engine.compile belongs to engine.kind=torch",
}
"""Keys of the JSON without an effect, and why."""
OWN = """zero_optimization fp16 bf16 amp data_types aio comms_logger communication_data_type
    seq_parallel_communication_data_type csv_monitor comet tensorboard wandb flops_profiler gradient_predivide_factor
    prescale_gradients disable_allgather dump_state memory_breakdown wall_clock_breakdown steps_per_print timers
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer log_level disable_python_gc gradient_allreduce_op
    torch_autocast tensor_parallel sequence_parallel_size elasticity data_efficiency gradient_accumulation_steps
    managed_gradient_accumulation""".split()
"""Keys that DeepSpeed reads itself."""
REQUIRED_VALUES = {
    "gradient_allreduce_op": "mean",
    "torch_autocast.enabled": False,
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 0,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    "data_efficiency.enabled": False,
    "amp.enabled": False,
    "managed_gradient_accumulation": True,
    "scheduler.params.warmup_min_ratio": 0.0,
    "scheduler.params.lr_range_test_step_rate": 1.0,
    "scheduler.params.lr_range_test_staircase": False,
}
"""Keys that would change sums, precision or samples, and the only values the engine supports."""
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "an object": (
        (dict,),
        """zero_optimization fp16 bf16 data_types optimizer optimizer.params scheduler scheduler.params aio
        activation_checkpointing checkpoint comms_logger compile csv_monitor data_efficiency flops_profiler pipeline
        tensor_parallel tensorboard timers torch_autocast wandb""",
    ),
    "an object or null": ((dict, NoneType), "zero_optimization.offload_optimizer zero_optimization.offload_param"),
    "true or false": (
        (bool,),
        """wall_clock_breakdown memory_breakdown dump_state prescale_gradients disable_allgather dataloader_drop_last
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
    "a number": ((int, float), "steps_per_print gradient_predivide_factor"),
    "a string": ((str,), "optimizer.type scheduler.type gradient_allreduce_op"),
    "a string or null": ((str, NoneType), "communication_data_type"),
}
"""Types in words, and the keys that must have them, because DeepSpeed or this module reads them without a check."""


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
    tree = without_auto(tree)
    check_types(tree, path)
    return tree


def check_types(tree: Tree, where: str) -> None:
    for kind, (types, names) in TYPES.items():
        for name in names.split():
            parent, _, key = name.rpartition(".")
            section = tree.get(parent, {}) if parent else tree
            if key in section and not isinstance(found := section[key], types):
                raise TextmillError(f"{where}: {name} is {json.dumps(found)}; it must be {kind}")


def read_json_settings(tree: Tree) -> dict[str, tuple[str, Any]]:
    """Our key and its value for each key of the JSON that has one, without those that say "none"."""
    flat = dict(flatten(tree))
    if str(flat.get("scheduler.type")).startswith("Warmup") and flat["scheduler.type"] != "WarmupCosineLR":
        flat.setdefault("scheduler.params.warmup_type", "log")  # DeepSpeed's default
    settings: dict[str, tuple[str, Any]] = {}
    for name, key in KEYS.items():
        if name in flat and flat[name] != "none" and name not in _unsupported(flat):
            value = flat[name]
            settings[name] = (key, VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value)
    for half in ("fp16", "bf16"):
        if flat.get(f"{half}.enabled") is True:
            settings[f"{half}.enabled"] = ("engine.precision", half)
    if flat.get("fp16.enabled") is True and flat.get("zero_optimization.stage") == 0:
        settings["zero_optimization.stage"] = ("engine.zero", 1)  # what fp16 needs here; the updates are the same
    if flat.get("zero_optimization.cpu_offload") is True:  # DeepSpeed's older name
        settings["zero_optimization.cpu_offload"] = ("engine.offload_optimizer", "cpu")
    ratio = flat.get("scheduler.params.cos_min_ratio")
    rate = flat.get("optimizer.params.lr")
    if isinstance(ratio, int | float) and isinstance(rate, int | float):
        settings["scheduler.params.cos_min_ratio"] = ("train.min_learning_rate", ratio * rate)
    return settings


def explain_json(tree: Tree) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Of the JSON: the keys that only DeepSpeed reads, and why others are ignored or refused."""
    flat = dict(flatten(tree))
    ignored = {
        name: reason for names, reason in IGNORED.items() for name in names.split() if tree.get(name) not in (None, {})
    }
    known = {*OWN, *COMPARED_ONLY, *ignored, *(name.partition(".")[0] for name in KEYS)}
    ignored |= dict.fromkeys(tree.keys() - known, "neither textmill nor DeepSpeed has this key")
    refused = _unsupported(flat)
    for name, value in REQUIRED_VALUES.items():
        if not equal_settings(flat.get(name, value), value):
            refused[name] = f"is {json.dumps(flat[name])}, but the only supported value is {json.dumps(value)}"
    taken = read_json_settings(tree)
    own = [name for name in flat if name.partition(".")[0] in OWN and name not in taken and name not in refused]
    return own, ignored, refused


def _unsupported(flat: Tree) -> dict[str, str]:
    """Why a setting of the optimizer or the scheduler has no equivalent; DeepSpeed's Adam decays weights as AdamW."""
    found = {}
    kinds = {"optimizer.type": ("train.optimizer", "adamw"), "scheduler.type": ("train.schedule", "cosine")}
    for name, (key, example) in kinds.items():
        kind = flat.get(name)
        if kind is not None and str(VALUES[key].get(str(kind), kind)) not in {*VALUES[key].values(), example}:
            found[name] = f"is {json.dumps(kind)}, which textmill does not have; use {key}"
    for name, value in flat.items():
        is_param = name.startswith(("optimizer.params.", "scheduler.params.")) and name not in KEYS
        if is_param and value is not True and name not in REQUIRED_VALUES and not name.endswith("cos_min_ratio"):
            found[name] = f"is {json.dumps(value)}, which textmill does not have; remove it"
    return found


def equal_settings(found: Any, expected: Any) -> bool:
    """Whether two settings are equal: numbers by value, so that 1 equals 1.0, and "1e-4" as a string equals 1e-4."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(equal_settings, found, expected))
    if isinstance(found, bool) or isinstance(expected, bool) or expected is None:
        return bool(found is expected)
    try:
        return float(found) == float(expected)
    except (TypeError, ValueError, OverflowError):
        return bool(found == expected)


def without_auto(tree: Tree) -> Tree:
    kept = {name: value for name, value in tree.items() if value != AUTO}
    return {name: without_auto(value) if isinstance(value, dict) else value for name, value in kept.items()}


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values with dotted keys."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
