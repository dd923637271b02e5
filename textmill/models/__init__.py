"""Model families: what each offers, finding one by name, and the shape of the model in a folder.

family.py        the interface of a family: `Shape` (the numbers of a net) and `Family` (functions over a shape)
weights.py       `Weight`: all that engines, optimizers, LoRA and conversion know of one parameter
gpt2/ llama/ bert/    the families: family.json (sizes), family.py, net_torch.py, net_jax.py, decode_torch.py
base_torch.py    what torch nets are written with: `BaseNet`, `BaseBlock`, linear, attention, and their `Context`
nets_torch.py    builds and fills torch nets
decode_torch.py  generation with a KV cache for any causal net, on a GPU with CUDA graphs
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.adapters import config_path
from textmill.checkpoints.folders import Checkpoint, StepChoice, find_model
from textmill.config import SIZES, RunConfig
from textmill.config.own_files import is_own_file
from textmill.config.sizes import FAMILY_BY_TYPE
from textmill.errors import TextmillError
from textmill.models.family import Family as Family
from textmill.models.family import Shape as Shape
from textmill.models.family_files import find_family_file, load_family_file
from textmill.models.weights import Weight as Weight
from textmill.models.weights import count_parameters, sample_weights
from textmill.models.weights import to_checkpoint as to_checkpoint
from textmill.models.weights import to_memory as to_memory
from textmill.storage.files import read_json
from textmill.storage.tensor_files import Named, read_model_names


def open_family(name: str) -> Family:
    """The family of `model.family` or a config.json's model_type: models/NAME/family.py, or the user's own file.

    A path is code to run: callers pass one only if the user named it.
    """
    if is_own_file(name):
        return cast(Family, load_family_file(name).module)
    if (file := find_family_file(name)) is not None:
        return cast(Family, file.module)
    return cast(Family, import_module(f"textmill.models.{name}.family"))


def find_family_module(shape: Shape, part: str) -> ModuleType | None:
    """A module of a shape's family: net_torch, net_jax or decode_torch; None if the family has none.

    A family in the user's own file has net_torch only, in that file."""
    if (file := find_family_file(shape.family)) is not None:
        return file.module if part == "net_torch" else None
    name = f"textmill.models.{shape.family}.{part}"
    return import_module(name) if find_spec(name) else None


IMPORTED = ("granite", "gemma", "phi3")
"""Values of model_type that `textmill import` turns into a llama."""
DIFFERENCES = {
    "gemma2": "norms after attention and MLP, bounded logits and windows",
    "gemma3": "norms after attention and MLP, and windows",
    "gemma3_text": "norms after attention and MLP, and windows",
    "gpt_neox": "partly rotated heads, and attention beside the MLP",
    "mixtral": "experts",
    "olmo": "LayerNorms without weights",
    "olmo2": "norms after attention and MLP",
    "phi": "partly rotated heads, and attention beside the MLP",
    "roberta": "positions from 2 on, and no segments",
    "smollm3": "layers without positions",
}
"""What other models have, by their model_type."""


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder, read from its config.json."""
    path = config_path(folder)
    hf = read_json(path)
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    kind = FAMILY_BY_TYPE.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or (kind not in SIZES and find_family_file(kind) is None):
        if kind in IMPORTED:
            raise TextmillError(
                f"{path}: is a {kind}; textmill reads it as a llama: textmill import {path.parent} NEW-FOLDER"
            )
        known = f"textmill knows {', '.join(SIZES)}"
        if kind in DIFFERENCES:
            raise TextmillError(f"{path}: a {kind} has {DIFFERENCES[kind]}, which textmill does not; {known}")
        raise TextmillError(
            f"{path}: model_type is {kind!r}; {known}; "
            f"if it is a family of your own, name its file: model.family=./{kind}.py"
        )
    family = open_family(kind)
    shape = family.shape_of_hf(hf, str(path))
    if path.name == "config.json":
        _check_size(shape, path.parent)
    # Which heads a file has is not always what its config.json says; the config of a merged adapter is ours.
    with_weights = getattr(family, "shape_with_weights", None)
    if with_weights is not None and path.name == "config.json" and any(path.parent.glob("*.safetensors")):
        shape = with_weights(shape, read_model_names(path.parent))
    return shape


class SavedTokenizer(Protocol):
    """What a model folder needs of its tokenizer."""

    @property
    def model_ids(self) -> Mapping[str, Any]: ...
    @property
    def is_qwen(self) -> bool: ...
    def files(self, longest: int | None = None, *, segments: bool = False) -> dict[str, str]: ...


def hf_config_of(shape: Shape, tokenizer: SavedTokenizer | None) -> dict[str, Any]:
    """The config.json of a model with this tokenizer, with the special tokens that the tokenizer brought along.

    In a folder of `qwen2`, transformers replaces whatever splits a text by Qwen's way, so a net with another tokenizer
    is a `seed_oss`, which computes the same.
    """
    hf = open_family(shape.family).hf_config_of(shape)
    if tokenizer is None:
        return hf
    if hf["model_type"] == "qwen2" and not tokenizer.is_qwen:
        hf = open_family(shape.family).hf_config_of(shape, "seed_oss")  # type: ignore[call-arg]
    return hf | {key: id_ for key, id_ in tokenizer.model_ids.items() if id_ is not None or key != "eos_token_id"}


def tokenizer_files(shape: Shape, tokenizer: SavedTokenizer) -> dict[str, str]:
    """The files of a model's tokenizer."""
    return tokenizer.files(shape.positions, segments=getattr(shape, "types", 1) > 1)


def _check_size(shape: Shape, folder: Path) -> None:
    """Refuse a config.json that describes a much larger model than the weights next to it, before it is built."""
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    least = (shape.layers * shape.width + shape.vocab) * shape.width  # counting all would take as long as they are many
    if held and least <= held:
        least = shape.parameters
    if held and least > held:
        raise TextmillError(
            f"{folder}: config.json describes {least:,} weights or more, its files have {held:,} bytes; "
            "config.json and the weights disagree"
        )


def find_run_model(config: RunConfig, step: StepChoice | None = None) -> Checkpoint:
    """The model of a config: the run's checkpoint, or `model.init_from`; loads its family."""
    open_family(config.model.family)
    return find_model(config.folder_of("train"), config.model.init_from, step)


def check_next_token(shape: Shape, where: object, work: str) -> None:
    """Refuse a model that does not predict the next token; `work` is what only those can do."""
    objective = open_family(shape.family).OBJECTIVE
    place = shlex.quote(str(where))
    if objective != "next_token":
        advice = f"textmill embed {place} 'a text'"
        if label_head_of(shape):
            advice = f"textmill evaluate {place} evaluate.text=FILE"
        elif has_masked_head(shape):
            advice = f"textmill fill {place} sample.prompt='a text with [MASK]'"
        raise TextmillError(
            f"{where}: a {shape.family} predicts {objective} tokens, not the next one, so it cannot {work}; "
            f"use: {advice}"
        )


def has_masked_head(shape: Shape) -> bool:
    """Whether a model predicts masked tokens; a plain encoder has no head for them."""
    return open_family(shape.family).OBJECTIVE == "masked" and getattr(shape, "masked_head", True)


def check_masked_head(shape: Shape, where: object) -> None:
    """Refuse a model that does not predict masked tokens."""
    place = shlex.quote(str(where))
    if open_family(shape.family).OBJECTIVE != "masked":
        raise TextmillError(
            f"{where}: a {shape.family} predicts the next token, not masked ones; use: textmill generate {place}"
        )
    if not has_masked_head(shape):
        raise TextmillError(
            f"{where}: has no head for masked tokens, so it cannot predict them; use a folder of BertForMaskedLM or "
            f"BertForPreTraining; for embeddings use: textmill embed {place} 'a text'"
        )


def with_label_head(shape: Shape, task: str, labels: Sequence[str]) -> Shape:
    """The same net with a head for a task with labels; refuses a family that has none."""
    change = getattr(open_family(shape.family), "shape_with_labels", None)
    if change is None:
        raise TextmillError(
            f"model.family: {shape.family} has no head for corpus.labels={task}; set model.family=bert and "
            "model.init_from"
        )
    changed: Shape = change(shape, task, labels)
    return changed


def check_segments(shape: Shape, samples: str, advice: str) -> None:
    """Refuse samples of two segments for a net that has an embedding for one only."""
    if (types := getattr(shape, "types", 2)) < 2:
        raise TextmillError(
            f"{samples}: makes samples of two texts, and the model knows {types} segment (type_vocab_size in its "
            f"config.json), so it cannot distinguish them; {advice}"
        )


def label_head_of(shape: Shape) -> tuple[str, tuple[str, ...]] | None:
    """The task of a finetuned head and the names of its labels; None if the net predicts tokens."""
    return (task, getattr(shape, "labels", ())) if (task := getattr(shape, "task", "")) else None


def recorded_numbers(shape: Shape) -> dict[str, Any]:
    """The numbers of a shape as a run records them, for JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(shape).items()}


def count_blocks_and_head(shape: Shape) -> int:
    """Parameters without embeddings that are only looked up: the size of a net in the rules of a plan."""
    return count_parameters(weight for weight in shape.weights() if not weight.looked_up)


def known_weights(
    shape: Shape, named: Iterable[tuple[str, NDArray[np.float32]]]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The weights of any file of the family under the names of `Shape.weights`, without second copies of tied ones and
    those that the net does not use."""
    family = open_family(shape.family)
    left_out = {name for weight in shape.weights() for name in weight.copies}
    if hasattr(family, "unneeded_weights"):
        left_out |= family.unneeded_weights(shape)
    return ((name, values) for name, values in family.known_weights(named) if name not in left_out)


def initial_weights(shape: Shape, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The weights of a net of this shape before the first step, by checkpoint name."""
    return sample_weights(shape.weights(), seed)


def lay_out_weights(
    weights: Iterable[Weight], shape: Shape, named: Iterable[Named], where: str
) -> Iterator[tuple[Weight, NDArray[np.float32]]]:
    """Each weight of a net exactly once, in memory layout; `where` names the source in errors."""
    missing = {weight.name: weight for weight in weights}
    for name, values in known_weights(shape, named):
        if name not in missing:
            raise TextmillError(f"{where}: has '{name}', which this model does not have")
        weight = missing.pop(name)
        yield weight, lay_out_weight(weight, values, where)
    if missing:
        raise TextmillError(f"{where}: lacks {len(missing)} weights, such as '{next(iter(missing))}'")


def lay_out_weight(weight: Weight, values: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    """Values from checkpoint layout to the net's memory layout."""
    if values.shape != weight.shape:
        raise TextmillError(f"{where}: '{weight.name}' is {list(values.shape)}; this model's is {list(weight.shape)}")
    return np.ascontiguousarray(to_memory(weight, values.astype(np.float32, copy=False)))
