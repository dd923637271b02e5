"""LoRA adapter folders in PEFT's format: read next to their base model or merged into it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.hub import find_model_folder
from textmill.storage.tensor_files import Named, fingerprint_weights, read_model, read_model_names, read_tensors

Array = NDArray[np.float32]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
MERGED_CONFIG = "merged_config.json"
"""The config.json of the two merged; under that name transformers would look for a complete model."""
PREFIX = "base_model.model."
"""PEFT's prefix before the names of the model that it wraps."""
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
FP32_MAX = 1e38
"""About the largest fp32 number."""
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""PEFT settings beyond plain LoRA, which change the meaning of the matrices."""

LABEL_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""PEFT's tasks whose head is saved completely."""


@dataclass(frozen=True)
class Adapter:
    """An opened adapter folder."""

    base_name: str
    """The base model as the adapter's config names it."""
    base: Path
    """The base model's folder."""
    rank: int
    scale: float
    """The factor of the product of the two matrices: alpha / rank."""
    inputs_first: bool
    """Whether the base's matrices are inputs x outputs, as PEFT's fan_in_fan_out says."""
    pairs: dict[str, tuple[Array, Array]]
    """A (rank x inputs) and B (outputs x rank), by the name of the weight that they change, without ".weight"."""
    full_weights: dict[str, Array]
    """Weights that replace those of the base, or are added to them: an embedding with more rows, a head for labels."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def config_path(folder: Path) -> Path:
    """A model's config.json; of an adapter, the merged model's if the folder has it, else the base's."""
    if not is_adapter(folder):
        return folder / "config.json"
    return folder / MERGED_CONFIG if (folder / MERGED_CONFIG).is_file() else find_base(folder) / "config.json"


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer: its own, or that of the base of an adapter without one."""
    if not is_adapter(folder):
        return folder
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model"))
    return folder if has_tokenizer else find_base(folder)


def read_weights(folder: Path) -> Iterator[Named]:
    """The weights of a model folder; an adapter is merged into its base."""
    return merge_adapter(open_adapter(folder)) if is_adapter(folder) else read_model(folder)


def read_base_and_adapter(adapter: Adapter) -> Iterator[Named]:
    """The weights of the base as they are, then the adapter's own."""
    yield from read_base(adapter.base, adapter.full_weights)
    for stem, (a, b) in adapter.pairs.items():
        yield stem + LORA_A, a
        yield stem + LORA_B, b


def merge_adapter(adapter: Adapter) -> Iterator[Named]:
    """The weights of the base with the adapter's products added."""
    remaining = dict(adapter.pairs)
    for name, values in read_base(adapter.base, adapter.full_weights):
        if (stem := find_name(name.removesuffix(".weight"), remaining)) is None:
            yield name, values
            continue
        a, b = remaining.pop(stem)
        change = (b @ a).T if adapter.inputs_first else b @ a
        if change.shape != values.shape:
            raise TextmillError(
                f"{adapter.base}: '{name}' is {list(values.shape)}; the adapter was made for {list(change.shape)}"
            )
        yield name, values + np.float32(adapter.scale) * change
    if remaining:
        raise TextmillError(
            f"{adapter.base}: has no '{next(iter(remaining))}', which the adapter changes; "
            "the adapter belongs to another model"
        )


def read_base(base: Path, full_weights: dict[str, Array]) -> Iterator[Named]:
    """The weights of a base model, with those that an adapter's folder replaces or adds."""
    added = dict(full_weights)
    for name, values in read_model(base):
        replaced = find_name(name, full_weights)
        yield name, values if replaced is None else full_weights[replaced]
        added.pop(replaced or "", None)
    yield from added.items()


def find_name(name: str, names: Collection[str]) -> str | None:
    """A weight's name among others, where one may have a prefix that the other lacks, as files of a bare net do.

    h.0.attn.c_attn among [transformer.h.0.attn.c_attn] -> transformer.h.0.attn.c_attn
    """
    if name in names:
        return name
    return next((other for other in names if other.endswith(f".{name}") or name.endswith(f".{other}")), None)


def find_base(folder: Path) -> Path:
    """The folder of an adapter's base; a base that is missing, or changed since the adapter was trained, is refused."""
    base_name = _read_settings(folder).get("base_model_name_or_path")
    if not isinstance(base_name, str):
        raise TextmillError(
            f"{folder / ADAPTER_CONFIG}: has no base_model_name_or_path; set it to the base model of the adapter"
        )
    try:
        base = find_model_folder(base_name)
    except TextmillError as error:
        raise TextmillError(f"{folder}: the base model of this adapter is missing: {error}; put it back") from None
    if is_adapter(base):
        raise TextmillError(
            f"{folder}: its base {base_name} is an adapter itself; merge that one first: "
            f"textmill export {shlex.quote(base_name)} export.folder=MERGED"
        )
    if (folder / "progress.json").is_file() and _trained_on(folder / "progress.json") != fingerprint_weights(base):
        raise TextmillError(
            f"{folder}: the weights of its base {base_name} have changed since the adapter was trained; "
            "put the old ones back"
        )
    return base


def _trained_on(progress: Path) -> str:
    """The fingerprint of the base on which a checkpoint was trained."""
    try:
        return str(read_json(progress)["made_from"]["model.init_from"])
    except (LookupError, TypeError):
        raise TextmillError(
            f"{progress}: does not record which weights the adapter was trained on; the file is damaged"
        ) from None


def open_adapter(folder: Path) -> Adapter:
    """Open the adapter in a folder; the error names a setting beyond plain LoRA."""
    settings = _read_settings(folder)
    where = folder / ADAPTER_CONFIG
    if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none":
        found = f"peft_type {settings.get('peft_type')!r} with bias {settings.get('bias')!r}"
        raise TextmillError(f"{where}: found {found}; textmill reads LORA with bias 'none'")
    for key in UNSUPPORTED:
        if settings.get(key):
            raise TextmillError(f"{where}: {key} is {settings[key]!r}; textmill reads plain LoRA, without it")
    rank = settings.get("r")
    alpha = settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not 0 < alpha < FP32_MAX:
        raise TextmillError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}; both must be above 0, and r an integer")
    if settings.get("modules_to_save") and settings.get("task_type") not in LABEL_TASKS:
        raise TextmillError(
            f"{where}: modules_to_save is {settings['modules_to_save']!r}; textmill reads entire modules of heads for "
            f"labels only, with a task_type of {', '.join(LABEL_TASKS)}"
        )
    if not (folder / ADAPTER_MODEL).is_file():
        raise TextmillError(f"{folder}: no {ADAPTER_MODEL} found; save the adapter as safetensors")
    pairs, full_weights = _sort_tensors(read_tensors(folder / ADAPTER_MODEL), rank, folder / ADAPTER_MODEL)
    scale = alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank
    base = find_base(folder)
    inputs_first = bool(settings.get("fan_in_fan_out"))
    if settings.get("task_type") in LABEL_TASKS and not (folder / MERGED_CONFIG).is_file():
        _check_heads(folder, base, full_weights)
    return Adapter(settings["base_model_name_or_path"], base, rank, scale, inputs_first, pairs, full_weights)


def _check_heads(folder: Path, base: Path, full_weights: dict[str, Array]) -> None:
    """Refuse a head for labels that the base does not have if nothing describes it."""
    base_names = read_model_names(base) if full_weights else []
    for name in full_weights:
        if find_name(name, base_names) is None:
            raise TextmillError(
                f"{folder}: has '{name}', which its base {base} lacks, and no {MERGED_CONFIG} with the names of the "
                "labels; merge it with PEFT (merge_and_unload), and use that folder"
            )


def _sort_tensors(
    named: Iterable[Named], rank: int, where: Path
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """The LoRA pairs of an adapter file, and the full weights that it has."""
    a_by_stem: dict[str, Array] = {}
    b_by_stem: dict[str, Array] = {}
    full_weights: dict[str, Array] = {}
    for name, values in named:
        stem = name.removeprefix(PREFIX)
        side = a_by_stem if stem.endswith(LORA_A) else b_by_stem if stem.endswith(LORA_B) else None
        if side is None:
            full_weights[stem] = values
        else:
            side[stem.removesuffix(LORA_A).removesuffix(LORA_B)] = values
    for stem in sorted(a_by_stem.keys() | b_by_stem.keys()):
        a = a_by_stem.get(stem)
        b = b_by_stem.get(stem)
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise TextmillError(
                f"{where}: '{stem}' has no lora_A and lora_B of rank {rank}; the file is damaged or not plain LoRA"
            )
    return {stem: (a_by_stem[stem], b_by_stem[stem]) for stem in a_by_stem}, full_weights


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / ADAPTER_CONFIG)
    if not isinstance(settings, dict):
        raise TextmillError(
            f"{folder / ADAPTER_CONFIG}: found a {type(settings).__name__}; an adapter config is a JSON object"
        )
    return settings
