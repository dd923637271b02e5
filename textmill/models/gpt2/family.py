"""GPT-2 without a framework: its shape, its weights under transformers' names, its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import ModelConfig, shape_numbers
from textmill.errors import TextmillError
from textmill.models.family import Shape as BaseShape
from textmill.models.hf_config import HfConfig, read_config_file
from textmill.models.weights import Weight

Array = NDArray[np.float32]

NAME = "gpt2"
OBJECTIVE = "next_token"
BATCH_FIELDS = frozenset({"documents"})
HEAD = "lm_head.weight"
"""The head; a tied one is the embedding."""
DROPOUTS = {"embd_pdrop": "embedding_dropout", "attn_pdrop": "attention_dropout", "resid_pdrop": "residual_dropout"}
"""Dropout rates, by transformers' names and ours."""
MUST_BE = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
WHOLE_NUMBERS = dict.fromkeys(("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"))


@dataclass(frozen=True)
class Shape(BaseShape):
    """Every number that the net is built from."""

    activation: str = "gelu_new"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    epsilon: float = 1e-5
    untied: bool = False
    """True if the head has weights of its own."""
    family: str = "gpt2"

    def weights(self) -> list[Weight]:
        """Every weight, under transformers' name and in its layout (matrices are inputs x outputs)."""
        width = self.width
        by_token: Any = {"by_token": True, "padded_rows": self.padded_vocab, "split": 0, "decay": True}
        weights = [
            Weight(
                "transformer.wte.weight",
                (self.vocab, width),
                0.02,
                copies=() if self.untied else (HEAD,),
                looked_up=self.untied,
                depth=self.layers + 1,
                **by_token,
            ),
            Weight(
                "transformer.wpe.weight",
                (self.positions, width),
                0.02,
                by_position=True,
                decay=True,
                depth=self.layers + 1,
            ),
        ]
        for layer in range(self.layers):
            weights += [replace(weight, depth=self.layers - layer) for weight in _block(self, f"transformer.h.{layer}")]
        weights += _norm("transformer.ln_f", width)
        if self.untied:
            weights.append(Weight(HEAD, (self.vocab, width), 0.02, **by_token))
        return [replace(weight, parameter=weight.name.removeprefix("transformer.")) for weight in weights]


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    """The shape that the `model` section describes; `length` limits positions unless `model.shape.positions` is set."""
    if isinstance(config.shape, str):
        return replace(shape_of_hf(*read_config_file(config.shape)), vocab=vocab, eos_id=eos_id)
    numbers = dict(shape_numbers(config))
    dropout = numbers.pop("dropout")
    if length and config.shape.positions is None:
        numbers["positions"] = length  # positions that are never trained would be noise in generation
    numbers.setdefault("inner", 4 * numbers["width"])
    return Shape(vocab=vocab, eos_id=eos_id, embedding_dropout=dropout, residual_dropout=dropout, **numbers)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    """The shape of a transformers config.json; an unsupported setting is an error that names it."""
    config = HfConfig(hf, where, "GPT-2")
    config.check(MUST_BE, WHOLE_NUMBERS, (*DROPOUTS, "layer_norm_epsilon"), "n_head", "n_embd")
    if hf.get("n_inner") is not None and (type(hf["n_inner"]) is not int or hf["n_inner"] < 1):
        raise TextmillError(
            f"{where}: n_inner is {hf['n_inner']!r}; a GPT-2 config.json has a whole number above 0 there, or null"
        )
    return Shape(
        layers=hf["n_layer"],
        heads=hf["n_head"],
        width=hf["n_embd"],
        inner=hf.get("n_inner") or 4 * hf["n_embd"],
        positions=hf["n_positions"],
        vocab=hf["vocab_size"],
        eos_id=config.eos_id(),
        activation=config.activation("activation_function", "gelu_new"),
        epsilon=hf.get("layer_norm_epsilon", 1e-5),
        untied=not hf.get("tie_word_embeddings", True),
        **{name: hf.get(key, 0.1) for key, name in DROPOUTS.items()},
    )


def hf_config_of(shape: Shape) -> dict[str, Any]:
    """The config.json with which transformers opens the checkpoint."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "vocab_size": shape.vocab,
        "n_positions": shape.positions,
        "n_ctx": shape.positions,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": None if shape.inner == 4 * shape.width else shape.inner,
        "activation_function": shape.activation,
        "embd_pdrop": shape.embedding_dropout,
        "attn_pdrop": shape.attention_dropout,
        "resid_pdrop": shape.residual_dropout,
        "layer_norm_epsilon": shape.epsilon,
        "initializer_range": 0.02,
        "bos_token_id": shape.eos_id,
        "eos_token_id": shape.eos_id,
        "tie_word_embeddings": not shape.untied,
        "use_cache": True,
    }


def _block(shape: Shape, name: str) -> list[Weight]:
    """The weights of a block; the matrices that add to the residual stream start smaller, by depth, as GPT-2's do."""
    width = shape.width
    inner = shape.inner
    residual_std = 0.02 / math.sqrt(2 * shape.layers)
    return [
        *_norm(f"{name}.ln_1", width),
        *_matrix(f"{name}.attn.c_attn", width, 3 * width, 0.02, split=0, parts=(width,) * 3, groups=shape.heads),
        *_matrix(f"{name}.attn.c_proj", width, width, residual_std, split=1),
        *_norm(f"{name}.ln_2", width),
        *_matrix(f"{name}.mlp.c_fc", width, inner, 0.02, split=0),
        *_matrix(f"{name}.mlp.c_proj", inner, width, residual_std, split=1),
    ]


def _norm(name: str, width: int) -> list[Weight]:
    return [Weight(f"{name}.weight", (width,), ones=True), Weight(f"{name}.bias", (width,))]


def _matrix(
    name: str, inputs: int, outputs: int, std: float, *, split: int, parts: tuple[int, ...] = (), groups: int = 1
) -> list[Weight]:
    """A matrix and its bias."""
    matrix = Weight(
        f"{name}.weight",
        (inputs, outputs),
        std,
        transposed=True,
        decay=True,
        muon=True,
        lora=True,
        split=split,
        parts=parts,
        groups=groups,
    )
    # A row-parallel matrix's bias is added after the sum over ranks, so every rank has all of it.
    bias_split = 0 if split == 0 else None
    return [matrix, Weight(f"{name}.bias", (outputs,), split=bias_split, parts=parts, groups=groups)]


def known_weights(named: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Weights of any GPT-2 file under transformers' names: adds a missing prefix, drops masks."""
    for name, values in named:
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        yield (name if name.startswith("transformer.") or name == HEAD else f"transformer.{name}"), values


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    """A tiny net with the same activation, a tied or untied head, and the largest of the three dropout rates."""
    heads = 2 * tensor
    head_width = 8
    dropout = max(shape.embedding_dropout, shape.attention_dropout, shape.residual_dropout)
    width = heads * head_width
    return {
        "layers": 2,
        "heads": heads,
        "width": width,
        "inner": 4 * width,
        "activation": shape.activation,
        "dropout": dropout,
        "untied": shape.untied,
    }
