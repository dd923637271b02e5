"""Llama without a framework: its shape, its weights under transformers' names, its config.json.

A checkpoint is transformers' `llama`; with biases of queries, keys and values only it is `qwen2`, with norms of queries
and keys it is `qwen3`. `seed_oss` has all biases of `llama` and `qwen2`, each with a setting of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import ModelConfig, shape_numbers
from textmill.errors import TextmillError
from textmill.models.family import Shape as BaseShape
from textmill.models.hf_config import WHOLE_NUMBERS, HfConfig, read_config_file
from textmill.models.llama.rotary import DEFAULT_BASE, read_rotary
from textmill.models.weights import Weight

Array = NDArray[np.float32]

NAME = "llama"
OBJECTIVE = "next_token"
BATCH_FIELDS = frozenset({"documents"})
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}
"""Transformers' classes by the `model_type` of config.json."""
MISTRAL = "mistral"
"""A model_type that is read as a llama."""
MUST_BE = {"use_sliding_window": False}
INNER_MULTIPLE = 64
"""The MLP's inner width is 8/3 of the width, rounded up to a multiple of this: three matrices are as large as GPT-2's
two."""


@dataclass(frozen=True)
class Shape(BaseShape):
    """Every number that the net is built from."""

    kv_heads: int
    """Heads of keys and values; each serves the same number of query heads."""
    head_width: int
    activation: str = "silu"
    """Of the gate: silu makes it SwiGLU."""
    qk_norm: bool = False
    """True if every head's queries and keys are normalised (Qwen3)."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases (Qwen2)."""
    out_bias: bool = False
    """True if attention's last matrix has one too (llama's and qwen3's attention_bias)."""
    mlp_bias: bool = False
    untied: bool = False
    """True if the head has weights of its own."""
    rotary_base: float = DEFAULT_BASE
    rotary_scaling: str = ""
    """The scaling of rotary positions as JSON text; empty: none."""
    dropout: float = 0.0
    """On embeddings and both residual branches."""
    attention_dropout: float = 0.0
    epsilon: float = 1e-5
    family: str = NAME

    @property
    def model_type(self) -> str:
        """The kind of model as config.json has it."""
        if self.qk_norm:
            return "qwen3"
        if self.qkv_bias == self.out_bias:
            return "llama"
        return "qwen2" if self.qkv_bias and not self.mlp_bias else "seed_oss"

    @property
    def activation_factor(self) -> float:
        """Activations that backward needs, as a multiple of the 16 per channel of a GPT-2: four of the MLP's width, and
        rotated queries and keys. Counted for the eager net."""
        mlp = 4 * self.inner / self.width
        return (11 + mlp + 4 * self.qk_norm) / 16

    def weights(self) -> list[Weight]:
        """Every weight, under transformers' name."""
        by_token: Any = {"by_token": True, "padded_rows": self.padded_vocab, "split": 0, "decay": True}
        table = Weight(EMBEDDING, (self.vocab, self.width), 0.02, copies=() if self.untied else (HEAD,), **by_token)
        weights = [replace(table, depth=self.layers + 1, looked_up=self.untied)]
        for layer in range(self.layers):
            weights += [replace(weight, depth=self.layers - layer) for weight in _block(self, layer)]
        weights.append(Weight("model.norm.weight", (self.width,), ones=True))
        if self.untied:
            weights.append(Weight(HEAD, (self.vocab, self.width), 0.02, **by_token))
        return [replace(weight, parameter=weight.name.removeprefix("model.")) for weight in weights]

    @property
    def attention_width(self) -> int:
        """The width of all heads of queries together, which may differ from the net's."""
        return self.heads * self.head_width

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Heads of keys, which divide those of queries, and the MLP's inner width."""
        return {"kv_heads": self.kv_heads, "inner": self.inner}


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    """The shape that the `model` section describes; `length` limits positions unless `model.shape.positions` is set."""
    if isinstance(config.shape, str):
        return replace(shape_of_hf(*read_config_file(config.shape)), vocab=vocab, eos_id=eos_id)
    numbers = {name: value for name, value in shape_numbers(config).items() if value is not None}
    if length and config.shape.positions is None:
        numbers["positions"] = length
    numbers.setdefault("kv_heads", numbers["heads"])
    numbers.setdefault("head_width", numbers["width"] // numbers["heads"])
    numbers.setdefault("inner", -(-8 * numbers["width"] // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE)
    if numbers["heads"] % numbers["kv_heads"]:
        raise TextmillError(
            f"model.shape.kv_heads: {numbers['kv_heads']} do not divide {numbers['heads']} heads; set "
            "model.shape.kv_heads to a divisor of model.shape.heads"
        )
    if numbers["head_width"] % 2:
        raise TextmillError(
            f"model.shape.heads: a head has {numbers['head_width']} channels, and rotary positions turn pairs of them; "
            "set model.shape.heads or model.shape.head_width so that it is even"
        )
    if numbers["qk_norm"] and numbers["qkv_bias"]:
        raise TextmillError("model.shape.qk_norm: no model of transformers has it with qkv_bias; remove one of them")
    return Shape(vocab=vocab, eos_id=eos_id, **numbers)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    """The shape of a transformers config.json; an unsupported setting is an error that names it."""
    hf = HfConfig(hf, where, "Llama").hf
    if hf.get("model_type") == MISTRAL:
        hf = _as_llama(hf, where)
    hf = {key: value for key, value in hf.items() if value is not None}
    kind = hf.get("model_type") or NAME
    if kind not in list(CLASSES):
        raise TextmillError(f"{where}: model_type is {kind!r}; textmill's {NAME} reads {', '.join(CLASSES)}, {MISTRAL}")
    if "num_attention_heads" in hf:
        hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    if kind in ("qwen3", "seed_oss"):
        hf.setdefault("head_dim", 128)
    if kind == "seed_oss":
        hf = {"attention_dropout": 0.1, "residual_dropout": 0.1, **hf}
    config = HfConfig(hf, where, "Llama")
    whole = {**dict.fromkeys(WHOLE_NUMBERS), "num_key_value_heads": None, "head_dim": 1}
    fractions = ("attention_dropout", "residual_dropout", "rms_norm_eps")
    config.check(MUST_BE, whole, fractions, "num_attention_heads", "hidden_size")
    heads = hf["num_attention_heads"]
    kv_heads = hf["num_key_value_heads"]
    if heads % kv_heads:
        raise TextmillError(f"{where}: {kv_heads} key heads do not divide {heads} heads; fix num_key_value_heads")
    layers = hf.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise TextmillError(f"{where}: layer_types is {layers}; textmill has full_attention only")
    head_width = hf.get("head_dim", hf["hidden_size"] // heads)
    if head_width % 2:
        raise TextmillError(f"{where}: a head has {head_width} channels; rotary positions turn pairs; fix head_dim")
    base, scaling = read_rotary(hf, where, hf["max_position_embeddings"])
    return Shape(
        kv_heads=kv_heads,
        head_width=head_width,
        eos_id=config.eos_id(),
        activation=config.activation("hidden_act", "silu"),
        **_read_options(hf, kind),
        untied=not hf.get("tie_word_embeddings", False),
        rotary_base=base,
        rotary_scaling=scaling,
        dropout=hf.get("residual_dropout", 0.0),
        attention_dropout=hf.get("attention_dropout", 0.0),
        epsilon=hf.get("rms_norm_eps", 1e-6),
        **{ours: hf[key] for key, ours in WHOLE_NUMBERS.items()},
    )


def _as_llama(hf: dict[str, Any], where: str) -> dict[str, Any]:
    """A Mistral whose window is not shorter than its context is a Llama; these are its defaults."""
    window = hf.get("sliding_window", 4096)
    positions = hf.get("max_position_embeddings", 131072)
    if window is not None and not (isinstance(window, int) and isinstance(positions, int) and window >= positions):
        raise TextmillError(
            f"{where}: sliding_window is {window!r}; textmill attends to the whole context; set it to null if "
            "the model has no window"
        )
    return {"num_key_value_heads": 8, "max_position_embeddings": positions, **hf, "model_type": NAME}


def hf_config_of(shape: Shape, kind: str | None = None) -> dict[str, Any]:
    """The config.json with which transformers opens the checkpoint; `kind`: another model_type that holds the net."""
    kind = kind or shape.model_type
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "dtype": "float32",
        **{key: getattr(shape, ours) for key, ours in WHOLE_NUMBERS.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": shape.activation,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rotary_base,
        "rope_scaling": json.loads(shape.rotary_scaling) if shape.rotary_scaling else None,
        **_write_options(shape, kind),
        "attention_dropout": shape.attention_dropout,
        "residual_dropout": shape.dropout,
        "initializer_range": 0.02,
        "bos_token_id": shape.eos_id,
        "eos_token_id": shape.eos_id,
        "tie_word_embeddings": not shape.untied,
        "use_cache": True,
    }


def _block(shape: Shape, layer: int) -> list[Weight]:
    name = f"model.layers.{layer}"
    width = shape.width
    residual = 0.02 / math.sqrt(2 * shape.layers)
    queries = shape.heads * shape.head_width
    keys = shape.kv_heads * shape.head_width
    attention = f"{name}.self_attn"
    mlp = f"{name}.mlp"
    norms = [
        # A tensor-parallel rank has some of the heads, and so a part of the gradient.
        Weight(f"{attention}.{part}_norm.weight", (shape.head_width,), ones=True, partial_gradient=True)
        for part in ("q", "k")
        if shape.qk_norm
    ]
    return [
        Weight(f"{name}.input_layernorm.weight", (width,), ones=True),
        *_linear(f"{attention}.q_proj", width, queries, 0.02, 0, bias=shape.qkv_bias),
        *_linear(f"{attention}.k_proj", width, keys, 0.02, 0, bias=shape.qkv_bias),
        *_linear(f"{attention}.v_proj", width, keys, 0.02, 0, bias=shape.qkv_bias),
        *norms,
        *_linear(f"{attention}.o_proj", queries, width, residual, 1, bias=shape.out_bias),
        Weight(f"{name}.post_attention_layernorm.weight", (width,), ones=True),
        *_linear(f"{mlp}.gate_proj", width, shape.inner, 0.02, 0, bias=shape.mlp_bias),
        *_linear(f"{mlp}.up_proj", width, shape.inner, 0.02, 0, bias=shape.mlp_bias),
        *_linear(f"{mlp}.down_proj", shape.inner, width, residual, 1, bias=shape.mlp_bias),
    ]


def _linear(name: str, inputs: int, outputs: int, std: float, split: int, *, bias: bool) -> list[Weight]:
    flags: Any = {"decay": True, "muon": True, "lora": True}
    matrix = Weight(f"{name}.weight", (outputs, inputs), std, split=split, **flags)
    # A row-parallel matrix's bias is added after the sum over ranks, so every rank has all of it.
    return [matrix, *([Weight(f"{name}.bias", (outputs,), split=0 if split == 0 else None)] if bias else [])]


def known_weights(named: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Weights of any such file under transformers' names: adds a missing prefix, drops rotary rates."""
    for name, values in named:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        yield (name if name.startswith("model.") or name == HEAD else f"model.{name}"), values


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    """A tiny net of the same kind, with grouped key heads if the net has them, and the larger dropout rate."""
    heads = 4 * tensor
    head_width = 8
    width = heads * head_width
    return {
        "layers": 2,
        "heads": heads,
        "kv_heads": heads if shape.kv_heads == shape.heads else 2 * tensor,
        "width": width,
        "inner": 2 * width,
        "head_width": head_width,
        "activation": shape.activation,
        "qk_norm": shape.qk_norm,
        "qkv_bias": shape.model_type == "qwen2",
        "untied": shape.untied,
        "dropout": max(shape.dropout, shape.attention_dropout),
    }


def _write_options(shape: Any, kind: str) -> dict[str, Any]:
    """What config.json has of biases, norms and options."""
    if kind == "seed_oss":
        return {"attention_bias": shape.qkv_bias, "attention_out_bias": shape.out_bias, "mlp_bias": shape.mlp_bias}
    biases = {} if kind == "qwen2" else {"attention_bias": shape.qkv_bias}
    return biases | ({"mlp_bias": shape.mlp_bias} if kind == "llama" else {"use_sliding_window": False})


def _read_options(hf: dict[str, Any], kind: str) -> dict[str, Any]:
    """The inverse of `_write_options`."""
    if kind == "seed_oss":
        return {
            "qkv_bias": bool(hf.get("attention_bias", True)),
            "out_bias": bool(hf.get("attention_out_bias", False)),
            "mlp_bias": bool(hf.get("mlp_bias", False)),
        }
    bias = bool(hf.get("attention_bias", False)) and kind != "qwen2"
    return {
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias", False)) and kind == "llama",
    }
