"""Models that are a Llama with other weights: `textmill import` reads Granite, the first Gemma and Phi-3 as one.

The factors of a Granite and a Gemma are multiplied into the weights, the joined matrices of a Phi-3 are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from textmill.errors import TextmillError
from textmill.models.llama.family import HEAD
from textmill.storage.tensor_files import Named

Tree = dict[str, Any]
Change = Callable[[Iterable[Named]], Iterator[Named]]
EMBEDDING = "embed_tokens.weight"


def as_llama(hf: Tree, where: str) -> tuple[Tree, Change] | None:
    """The config.json of the Llama that computes the same, and what makes its weights; None for other models."""
    kind = hf.get("model_type")
    readers = {"granite": _granite, "gemma": _gemma, "phi3": _phi3}
    if not isinstance(kind, str) or kind not in readers:
        return None
    try:
        changed, change = readers[kind](hf, where)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TextmillError(
            f"{where}: not a usable config.json of a {kind} ({type(error).__name__}: {error}); copy it again"
        ) from None
    return {**changed, "model_type": "llama"}, change


def _granite(hf: Tree, where: str) -> tuple[Tree, Change]:
    """Factors of embeddings, attention, both branches and logits; these are transformers' defaults."""
    embedding, attention, branch, logits = (
        float(hf.get(key, 1.0))
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    head_width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    factors = {"q_proj": attention * math.sqrt(head_width), "o_proj": branch, "down_proj": branch}
    is_tied = bool(hf.get("tie_word_embeddings", False))

    def change(named: Iterable[Named]) -> Iterator[Named]:
        for name, values in named:
            if name.endswith(EMBEDDING):
                yield name, values * np.float32(embedding)
                if is_tied:
                    yield HEAD, values / np.float32(logits)
            elif name == HEAD:
                if not is_tied:
                    yield name, values / np.float32(logits)
            else:
                yield name, values * np.float32(factors.get(name.split(".")[-2], 1.0))

    return {**hf, "tie_word_embeddings": False}, change


def _gemma(hf: Tree, where: str) -> tuple[Tree, Change]:
    """Norms multiply by 1 + weight, embeddings by the root of the width; gelu is the tanh form, always."""
    factor = np.float32(math.sqrt(hf["hidden_size"]))

    def change(named: Iterable[Named]) -> Iterator[Named]:
        for name, values in named:
            if name.endswith(EMBEDDING):
                yield name, values * factor
                yield HEAD, values
            elif name != HEAD:
                yield name, values + np.float32(1) if name.endswith("norm.weight") else values

    usual = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    return {**usual, **hf, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": False}, change


def _phi3(hf: Tree, where: str) -> tuple[Tree, Change]:
    """Queries, keys and values are one matrix, gate and up another."""
    window = hf.get("sliding_window")
    positions = hf.get("max_position_embeddings", 4096)
    if window is not None and window < positions:
        raise TextmillError(f"{where}: sliding_window is {window}; textmill attends to the whole context")
    rotated = hf.get("partial_rotary_factor", (hf.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise TextmillError(f"{where}: partial_rotary_factor is {rotated}; textmill turns all channels of a head")
    heads = hf["num_attention_heads"]
    head_width = hf.get("head_dim") or hf["hidden_size"] // heads
    queries = heads * head_width
    keys = (hf.get("num_key_value_heads") or heads) * head_width
    cuts = {"qkv_proj": ("q_proj k_proj v_proj".split(), [queries, queries + keys])}
    cuts["gate_up_proj"] = ("gate_proj up_proj".split(), [hf["intermediate_size"]])

    def change(named: Iterable[Named]) -> Iterator[Named]:
        for name, values in named:
            joined = name.split(".")[-2] if "." in name else name
            if joined not in cuts:
                yield name, values
                continue
            parts, places = cuts[joined]
            for part, rows in zip(parts, np.split(values, places), strict=True):
                yield name.replace(joined, part), rows

    return {"max_position_embeddings": positions, **hf}, change
