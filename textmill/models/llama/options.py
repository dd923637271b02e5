"""Options that no class of transformers has. A checkpoint with one has a model_type of its own: only textmill opens it.

They are options of `model.shape`, and have the same names in config.json.
"""

from __future__ import annotations

import sys
from typing import Any

from textmill.errors import TextmillError

MODEL_TYPE = "textmill-llama"
CLASS = "TextmillLlamaForCausalLM"
DEFAULTS: dict[str, Any] = {"gated": True, "value_embeddings": 0, "embedding_residual": False, "logit_softcap": 0.0}
"""Each option and the value with which it changes nothing."""
OTHERS = {"qk_norm": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False}
"""What else config.json has with an option: transformers' classes say it by their name."""
GATE_INPUTS = 32
"""Channels from which a head's gate of its value embeddings is computed."""


def used_options(shape: Any) -> list[str]:
    """The options that a shape uses, as under `model.shape`."""
    return [f"{name}={getattr(shape, name)}" for name, default in DEFAULTS.items() if getattr(shape, name) != default]


def implied_numbers(_: Any) -> dict[str, Any]:
    """Numbers of a shape that runs older than these options had without recording them."""
    return {**DEFAULTS, "zero_init": False}


def write_options(shape: Any, kind: str) -> dict[str, Any]:
    """What config.json has of biases, norms and options."""
    if kind == MODEL_TYPE:
        return {name: getattr(shape, name) for name in (*DEFAULTS, *OTHERS)}
    biases = {} if kind == "qwen2" else {"attention_bias": shape.qkv_bias}
    return biases | ({"mlp_bias": shape.mlp_bias} if kind == "llama" else {"use_sliding_window": False})


def read_options(hf: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The inverse of `write_options`; a value of another type in a config.json of our own is an error."""
    if kind != MODEL_TYPE:
        bias = bool(hf.get("attention_bias", False)) and kind != "qwen2"
        return {
            "qk_norm": kind == "qwen3",
            "qkv_bias": bias or kind == "qwen2",
            "out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)) and kind == "llama",
        }
    found = {}
    for name, default in (DEFAULTS | OTHERS).items():
        value = hf.get(name, default)
        wanted = type(default)
        if type(value) not in (wanted, int if wanted is float else wanted) or not 0 <= value <= sys.float_info.max:
            kinds = {bool: "true or false", int: "a whole number", float: "a number"}
            raise TextmillError(f"{where}: {name} is {value!r}; a {MODEL_TYPE} config.json has {kinds[wanted]} there")
        found[name] = wanted(value)
    if (tables := found["value_embeddings"]) > (layers := hf["num_hidden_layers"]):
        raise TextmillError(f"{where}: value_embeddings is {tables}, more than the {layers} layers; fix it")
    return found


def value_table(layer: int, layers: int, tables: int) -> int | None:
    """Which table of value embeddings a layer adds: the first layers and the last ones have one each; None: none."""
    if layer < tables:
        return layer
    return layer - (layers - tables) if layer >= layers - tables else None
