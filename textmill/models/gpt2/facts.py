"""GPT-2 as numbers: its shape, its weights by transformers' names, how they start and how memory holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import ModelConfig, shape_numbers
from textmill.errors import TextmillError
from textmill.models import Weight, first_of
from textmill.storage.files import read_json

Array = NDArray[np.float32]

OBJECTIVE = "next_token"
VOCAB_MULTIPLE = 128
SAME_ACTIVATION = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "gelu": "gelu"}
DROPOUTS = {"embd_pdrop": "embedding_dropout", "attn_pdrop": "attention_dropout", "resid_pdrop": "residual_dropout"}
"""Shares that are dropped, by transformers' names and ours."""
MUST_BE = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True, "add_cross_attention": False,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Every number that the net is made of."""

    layers: int
    heads: int
    width: int
    inner: int
    positions: int
    vocab: int
    end: int
    """The end-of-text token."""
    activation: str = "gelu_new"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    epsilon: float = 1e-5
    family: str = "gpt2"

    def with_dropout(self, share: float) -> Shape:
        """The same net with another dropout everywhere."""
        return replace(self, embedding_dropout=share, attention_dropout=share, residual_dropout=share)

    @property
    def drops(self) -> bool:
        """Whether training drops anything."""
        return bool(self.embedding_dropout or self.attention_dropout or self.residual_dropout)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding in memory: a multiple that matrix units like."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def parameters(self) -> int:
        """Weights of the net, as its checkpoint has them."""
        return sum(math.prod(weight.shape) for weight in weights_of(self))

    def flops_per_token(self, length: int, trained: Iterable[Weight] | None = None) -> float:
        """Multiplications and additions of forward and backward for one token: 6N + 12LHQT where all is trained.

        Else forward is the same, a weight that is not trained has no gradient, and backward ends at the lowest block that has one that
        is; adapters, the trained weights that are not the net's own, come on top.
        """
        own = [weight for weight in weights_of(self) if not weight.by_position]
        trained = weights_of(self) if trained is None else list(trained)
        names, lowest = {weight.name for weight in trained}, max(weight.depth for weight in trained)
        known = {weight.name for weight in weights_of(self)}
        flops = 6.0 * sum(math.prod(weight.shape) for weight in trained if weight.name not in known)
        for weight in own:
            passed = weight.layout == "vocab" or weight.depth <= lowest  # the tied head stands above all blocks
            flops += math.prod(weight.shape) * (2.0 + 2.0 * passed + 2.0 * (weight.name in names))
        return flops + (4.0 * self.layers + 8.0 * min(lowest, self.layers)) * self.width * length


def shape_of(config: ModelConfig, *, vocab: int, end: int, length: int | None = None) -> Shape:
    """The shape that the `model` section describes; a named size trained on a shorter `length` has no more positions than that."""
    if isinstance(config.shape, str):
        path = Path(config.shape)
        path = path / "config.json" if path.is_dir() else path
        numbers = vars(shape_of_hf(read_json(path), str(path))) | {"vocab": vocab, "end": end}
        return Shape(**numbers)
    numbers = dict(shape_numbers(config))
    dropout = numbers.pop("dropout")
    if length and config.shape.positions is None:
        numbers["positions"] = length  # a position that training never reaches would be noise when text is made
    numbers.setdefault("inner", 4 * numbers["width"])
    return Shape(
        vocab=vocab, end=end, embedding_dropout=dropout, attention_dropout=dropout, residual_dropout=dropout, **numbers
    )


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    """The shape of a transformers config.json; what our net cannot do is refused by name."""
    if not isinstance(hf, dict):
        raise TextmillError(f"{where}: found a {type(hf).__name__}; it is not a GPT-2 config.json")
    for key, wanted in MUST_BE.items():
        if hf.get(key, wanted) != wanted:
            raise TextmillError(f"{where}: {key} is {hf[key]}; textmill's GPT-2 has {key}={wanted} only")
    activation = hf.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in SAME_ACTIVATION:
        raise TextmillError(f"{where}: activation_function is {activation!r}; gelu_new and gelu are known")
    for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"):
        if type(hf.get(key)) is not int or hf[key] < 1:
            raise TextmillError(
                f"{where}: {key} is {hf.get(key)!r}; a GPT-2 config.json has a whole number above 0 there"
            )
    for key in (*DROPOUTS, "layer_norm_epsilon"):
        if not isinstance(value := hf.get(key, 0.1), int | float) or not 0 <= value < 1:
            raise TextmillError(f"{where}: {key} is {value!r}; a GPT-2 config.json has a number from 0 to 1 there")
    if hf.get("n_inner") is not None and (type(hf["n_inner"]) is not int or hf["n_inner"] < 1):
        raise TextmillError(
            f"{where}: n_inner is {hf['n_inner']!r}; a GPT-2 config.json has a whole number above 0 there, or null"
        )
    if hf["n_embd"] % hf["n_head"]:
        raise TextmillError(
            f"{where}: {hf['n_head']} heads do not divide the width {hf['n_embd']}; mend n_head or n_embd"
        )
    return Shape(
        layers=hf["n_layer"], heads=hf["n_head"], width=hf["n_embd"], inner=hf.get("n_inner") or 4 * hf["n_embd"],
        positions=hf["n_positions"], vocab=hf["vocab_size"], end=_end_of(hf, where), activation=SAME_ACTIVATION[activation],
        epsilon=hf.get("layer_norm_epsilon", 1e-5), **{name: hf.get(key, 0.1) for key, name in DROPOUTS.items()},
    )  # fmt: skip


def _end_of(hf: dict[str, Any], where: str) -> int:
    end = hf.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if end is not None and type(end) is not int:
        raise TextmillError(
            f"{where}: eos_token_id is {end!r}; a GPT-2 config.json has the number of a token there, or null"
        )
    return hf["vocab_size"] - 1 if end is None else end


def hf_config_of(shape: Shape) -> dict[str, Any]:
    """The config.json with which transformers opens the checkpoint."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "vocab_size": shape.vocab,
        "n_positions": shape.positions, "n_ctx": shape.positions, "n_embd": shape.width, "n_layer": shape.layers,
        "n_head": shape.heads, "n_inner": None if shape.inner == 4 * shape.width else shape.inner,
        "activation_function": shape.activation, "embd_pdrop": shape.embedding_dropout,
        "attn_pdrop": shape.attention_dropout, "resid_pdrop": shape.residual_dropout,
        "layer_norm_epsilon": shape.epsilon, "initializer_range": 0.02, "bos_token_id": shape.end,
        "eos_token_id": shape.end, "tie_word_embeddings": True, "use_cache": True,
    }  # fmt: skip


def weights_of(shape: Shape) -> list[Weight]:
    """Every weight, under transformers' name and in its layout (matrices are inputs x outputs)."""
    width, inner, residual = shape.width, shape.inner, 0.02 / math.sqrt(2 * shape.layers)

    def norm(name: str) -> list[Weight]:
        return [Weight(f"{name}.weight", (width,), 0, ones=True), Weight(f"{name}.bias", (width,), 0)]

    weights = [
        Weight(
            "transformer.wte.weight", (shape.vocab, width), 0.02, "vocab", decay=True, split=0, depth=shape.layers + 1
        ),
        Weight(
            "transformer.wpe.weight",
            (shape.positions, width),
            0.02,
            decay=True,
            by_position=True,
            depth=shape.layers + 1,
        ),
    ]
    for layer in range(shape.layers):
        h = f"transformer.h.{layer}"
        block = [
            *norm(f"{h}.ln_1"),
            Weight(f"{h}.attn.c_attn.weight", (width, 3 * width), 0.02, "qkv", decay=True, split=0),
            Weight(f"{h}.attn.c_attn.bias", (3 * width,), 0, "qkv_bias", split=0),
            Weight(f"{h}.attn.c_proj.weight", (width, width), residual, "linear", decay=True, split=1),
            Weight(f"{h}.attn.c_proj.bias", (width,), 0),
            *norm(f"{h}.ln_2"),
            Weight(f"{h}.mlp.c_fc.weight", (width, inner), 0.02, "linear", decay=True, split=0),
            Weight(f"{h}.mlp.c_fc.bias", (inner,), 0, split=0),
            Weight(f"{h}.mlp.c_proj.weight", (inner, width), residual, "linear", decay=True, split=1),
            Weight(f"{h}.mlp.c_proj.bias", (width,), 0),
        ]
        weights += [replace(weight, depth=shape.layers - layer) for weight in block]
    return weights + norm("transformer.ln_f")


def first_weights(shape: Shape, seed: int) -> Iterator[tuple[str, Array]]:
    """The weights before the first step."""
    return first_of(weights_of(shape), seed)


def known_weights(named: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Weights of any GPT-2 file under one name: the bare net's lack the prefix, old files hold masks and the tied head."""
    for name, values in named:
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        yield (name if name.startswith("transformer.") else f"transformer.{name}"), values


def memory_name(name: str) -> str:
    """The net's own name of a checkpoint's weight."""
    return name.removeprefix("transformer.")


def to_memory(weight: Weight, values: Array, shape: Shape) -> Array:
    """From checkpoint layout to the net's: outputs x inputs, QKV by head, vocabulary padded with zero rows."""
    heads, head = shape.heads, shape.width // shape.heads
    if weight.layout == "linear":
        return values.T
    if weight.layout == "qkv":
        return values.T.reshape(3, heads, head, -1).swapaxes(0, 1).reshape(3 * shape.width, -1)
    if weight.layout == "qkv_bias":
        return values.reshape(3, heads, head, -1).swapaxes(0, 1).reshape(values.shape)
    if weight.layout == "vocab":
        return np.pad(values, [(0, shape.padded_vocab - shape.vocab), (0, 0)])
    return values


def to_checkpoint(weight: Weight, values: Any, shape: Shape) -> Any:
    """The way back of `to_memory`, exact: of an array or a tensor, and it may be a view of it."""
    heads, head = shape.heads, shape.width // shape.heads
    if weight.layout == "linear":
        values = values.T
    elif weight.layout == "qkv":
        values = values.reshape(heads, 3, head, -1).swapaxes(0, 1).reshape(3 * shape.width, -1).T
    elif weight.layout == "qkv_bias":
        values = values.reshape(heads, 3, head, -1).swapaxes(0, 1).reshape(values.shape)
    elif weight.layout == "vocab":
        values = values[: shape.vocab]
    return values
