"""A GPT-2 as an ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.conversion.onnx_graph import Graph, activate, add_attention, add_causal_mask, add_head


def cache_shape(shape: Any) -> tuple[int, int]:
    """Heads of keys, and their width."""
    return shape.heads, shape.width // shape.heads


def build_nodes(graph: Graph, shape: Any) -> None:
    """All nodes, from input_ids, attention_mask, position_ids and past_key_values.N to logits and present.N."""
    mask = add_causal_mask(graph)
    x = graph.add(
        "Add",
        graph.add("Gather", "transformer.wte.weight", "input_ids"),
        graph.add("Gather", "transformer.wpe.weight", "position_ids"),
    )
    for layer in range(shape.layers):
        h = f"transformer.h.{layer}"
        x = graph.add("Add", x, _attention(graph, _norm(graph, x, f"{h}.ln_1", shape), layer, shape, mask))
        inner = _linear(graph, _norm(graph, x, f"{h}.ln_2", shape), f"{h}.mlp.c_fc")
        x = graph.add("Add", x, _linear(graph, activate(graph, inner, shape.activation), f"{h}.mlp.c_proj"))
    weight = "lm_head.weight" if shape.untied else "transformer.wte.weight"
    add_head(graph, _norm(graph, x, "transformer.ln_f", shape), weight)


def _norm(graph: Graph, x: str, stem: str, shape: Any) -> str:
    return graph.add("LayerNormalization", x, f"{stem}.weight", f"{stem}.bias", axis=-1, epsilon=shape.epsilon)


def _linear(graph: Graph, x: str, stem: str) -> str:
    return graph.add("Add", graph.add("MatMul", x, f"{stem}.weight"), f"{stem}.bias")


def _attention(graph: Graph, x: str, layer: int, shape: Any, mask: str) -> str:
    h = f"transformer.h.{layer}.attn"
    width = shape.width // shape.heads
    to_heads = graph.constant([0, 0, shape.heads, width], np.int64)
    q, k, v = (
        graph.add("Transpose", graph.add("Reshape", projection, to_heads), perm=[0, 2, 1, 3])
        for projection in graph.split(_linear(graph, x, f"{h}.c_attn"), 3)
    )
    return _linear(
        graph, add_attention(graph, (q, k, v), layer, (shape.heads, shape.heads, width), mask), f"{h}.c_proj"
    )
