"""Adapter folders in PEFT's format: narrow matrices (LoRA) that change a base model, read separately or merged into it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.hub import find_model_folder
from textmill.storage.tensor_files import Named, fingerprint_weights, read_model, read_tensors

Array = NDArray[np.float32]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
MERGED_CONFIG = "merged_config.json"
"""The config.json of the two merged; under that name transformers would look for a complete model."""
PREFIX = "base_model.model."
"""PEFT's prefix before the names of the model that it wraps."""
A, B = ".lora_A.weight", ".lora_B.weight"
FP32_MAX = 1e38
"""Where fp32 ends, about."""
UNSUPPORTED = (
    "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""PEFT's settings that change what the matrices mean; plain LoRA has none of them."""


@dataclass(frozen=True)
class Adapter:
    """An opened adapter folder."""

    named: str
    """The model that it changes, as its config names it."""
    base: Path
    """That model's folder."""
    rank: int
    scale: float
    """The factor of the product of the two matrices: alpha / rank."""
    dropout: float
    """Dropout on the inputs of the first matrix in training."""
    inputs_first: bool
    """Whether the base's matrices are inputs x outputs, as PEFT's fan_in_fan_out says."""
    pairs: dict[str, tuple[Array, Array]]
    """A (rank x inputs) and B (outputs x rank), by the name of what they change, without its ".weight"."""
    whole: dict[str, Array]
    """Weights that replace those of the base: an embedding with more rows."""


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
    lacks = is_adapter(folder) and not any(
        path for pattern in ("tokenizer*", "vocab*", "*.model") for path in folder.glob(pattern)
    )
    return find_base(folder) if lacks else folder


def read_weights(folder: Path) -> Iterator[Named]:
    """The weights of a model folder; an adapter is merged into its base."""
    return merge_adapter(open_adapter(folder)) if is_adapter(folder) else read_model(folder)


def read_base_and_adapter(adapter: Adapter) -> Iterator[Named]:
    """The weights of the base as they are, then the adapter's own."""
    yield from _read_base(adapter)
    for stem, (a, b) in adapter.pairs.items():
        yield stem + A, a
        yield stem + B, b


def merge_adapter(adapter: Adapter) -> Iterator[Named]:
    """The weights of the base with the adapter's products added."""
    left = dict(adapter.pairs)
    for name, values in _read_base(adapter):
        if (stem := find_name(name.removesuffix(".weight"), left)) is None:
            yield name, values
            continue
        pair = left.pop(stem)
        product = pair[1] @ pair[0]
        change = product.T if adapter.inputs_first else product
        if change.shape != values.shape:
            raise TextmillError(
                f"{adapter.base}: '{name}' is {list(values.shape)}; the adapter was made for {list(change.shape)}"
            )
        yield name, values + np.float32(adapter.scale) * change
    if left:
        raise TextmillError(
            f"{adapter.base}: has no '{next(iter(left))}', which the adapter changes; it is of another model"
        )


def _read_base(adapter: Adapter) -> Iterator[Named]:
    """The base's weights, with those that the adapter's folder replaces."""
    for name, values in read_model(adapter.base):
        replaced = find_name(name, adapter.whole)
        yield name, values if replaced is None else adapter.whole[replaced]


def find_name(name: str, known: Collection[str]) -> str | None:
    """A weight's name among others, one of which may have a prefix that the other lacks, as files of a bare net do."""
    if name in known:
        return name
    return next((one for one in known if one.endswith(f".{name}") or name.endswith(f".{one}")), None)


def find_base(folder: Path) -> Path:
    """The folder of an adapter's base; a base that is missing, or changed since the adapter was trained, is refused."""
    named = _read_settings(folder).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise TextmillError(
            f"{folder / ADAPTER_CONFIG}: names no base_model_name_or_path; write there which model the adapter changes"
        )
    try:
        base = find_model_folder(named)
    except TextmillError as error:
        raise TextmillError(f"{folder}: the model that this adapter changes is gone: {error}; put it back") from None
    if is_adapter(base):
        raise TextmillError(
            f"{folder}: changes {named}, which is an adapter itself; merge that one first: textmill export {named}"
        )
    if (folder / "progress.json").is_file() and _trained_on(folder / "progress.json") != fingerprint_weights(base):
        raise TextmillError(
            f"{folder}: {named}, which this adapter changes, has other weights than when it was trained; put those back"
        )
    return base


def _trained_on(progress: Path) -> str:
    """The fingerprint of the base that a checkpoint of ours was trained on."""
    try:
        return str(read_json(progress)["made_from"]["model.init_from"])
    except (LookupError, TypeError):
        raise TextmillError(
            f"{progress}: does not say which weights the adapter was trained on; it is damaged or not ours"
        ) from None


def open_adapter(folder: Path) -> Adapter:
    """The adapter in a folder; settings beyond plain LoRA are refused by name."""
    settings, where = _read_settings(folder), folder / ADAPTER_CONFIG
    if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none":
        found = f"peft_type {settings.get('peft_type')!r} with bias {settings.get('bias')!r}"
        raise TextmillError(f"{where}: found {found}; textmill reads LORA with bias 'none'")
    for key in UNSUPPORTED:
        if settings.get(key):
            raise TextmillError(f"{where}: {key} is {settings[key]!r}; textmill reads plain LoRA, without it")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not 0 < alpha < FP32_MAX:
        raise TextmillError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}; both are numbers above 0, r a whole one")
    dropout = settings.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise TextmillError(f"{where}: lora_dropout is {dropout!r}; it is a fraction, 0 or more and less than 1")
    if not (folder / ADAPTER_MODEL).is_file():
        raise TextmillError(f"{folder}: no {ADAPTER_MODEL} there; save the adapter as safetensors")
    pairs, whole = _sort_tensors(read_tensors(folder / ADAPTER_MODEL), rank, folder / ADAPTER_MODEL)
    scale = alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank
    base, inputs_first = find_base(folder), bool(settings.get("fan_in_fan_out"))
    return Adapter(settings["base_model_name_or_path"], base, rank, scale, dropout, inputs_first, pairs, whole)


def _sort_tensors(
    named: Iterable[Named], rank: int, where: Path
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """The pairs of an adapter file, and the weights that it replaces."""
    first: dict[str, Array] = {}
    second: dict[str, Array] = {}
    whole: dict[str, Array] = {}
    for name, values in named:
        stem = name.removeprefix(PREFIX)
        half = first if stem.endswith(A) else second if stem.endswith(B) else None
        if half is None:
            whole[stem] = values
        else:
            half[stem.removesuffix(A).removesuffix(B)] = values
    for stem in sorted(first.keys() | second.keys()):
        a, b = first.get(stem), second.get(stem)
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise TextmillError(
                f"{where}: '{stem}' has no lora_A and lora_B of rank {rank}; the file is damaged or not plain LoRA"
            )
    return {stem: (first[stem], second[stem]) for stem in first}, whole


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / ADAPTER_CONFIG)
    if not isinstance(settings, dict):
        raise TextmillError(
            f"{folder / ADAPTER_CONFIG}: found a {type(settings).__name__}; it is not an adapter's config"
        )
    return settings
