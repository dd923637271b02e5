"""A Llama, Qwen2 or Qwen3 as an ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.conversion.onnx_graph import Graph, activate, add_attention, add_causal_mask, add_head
from textmill.models.llama.net_torch import frequencies_of


def cache_shape(shape: Any) -> tuple[int, int]:
    """Heads of keys, and their width."""
    return shape.kv_heads, shape.head_width


def build_nodes(graph: Graph, shape: Any) -> None:
    """All nodes, from input_ids, attention_mask, position_ids and past_key_values.N to logits and present.N."""
    mask = add_causal_mask(graph)
    angles = _angles(graph, shape)
    x = graph.add("Gather", "model.embed_tokens.weight", "input_ids")
    for layer in range(shape.layers):
        h = f"model.layers.{layer}"
        normed = _norm(graph, x, f"{h}.input_layernorm", shape)
        x = graph.add("Add", x, _attention(graph, normed, layer, shape, mask, angles))
        normed = _norm(graph, x, f"{h}.post_attention_layernorm", shape)
        gate, up = (_linear(graph, normed, f"{h}.mlp.{part}_proj", shape.mlp_bias) for part in ("gate", "up"))
        inner = graph.add("Mul", activate(graph, gate, shape.activation), up)
        x = graph.add("Add", x, _linear(graph, inner, f"{h}.mlp.down_proj", shape.mlp_bias))
    weight = "lm_head.weight" if shape.untied else "model.embed_tokens.weight"
    add_head(graph, _norm(graph, x, "model.norm", shape), weight)


def _angles(graph: Graph, shape: Any) -> tuple[str, str]:
    """Cosine and sine of every position's angles, [batch, 1, tokens, head width / 2]."""
    frequencies, scale = frequencies_of(shape)
    positions = graph.add("Cast", "position_ids", to=1)  # 1 is fp32
    column = graph.add("Unsqueeze", positions, graph.constant([1, 3], np.int64))
    angles = graph.add("Mul", column, graph.constant(frequencies, np.float32))
    factor = graph.constant(scale, np.float32)
    return (graph.add("Mul", graph.add("Cos", angles), factor), graph.add("Mul", graph.add("Sin", angles), factor))


def _norm(graph: Graph, x: str, stem: str, shape: Any) -> str:
    """RMSNorm, which has no node of its own in this opset."""
    squares = graph.add("ReduceMean", graph.add("Mul", x, x), graph.constant([-1], np.int64), keepdims=1)
    root = graph.add("Sqrt", graph.add("Add", squares, graph.constant(shape.epsilon, np.float32)))
    return graph.add("Mul", graph.add("Div", x, root), f"{stem}.weight")


def _linear(graph: Graph, x: str, stem: str, has_bias: bool) -> str:
    product = graph.add("MatMul", x, graph.add("Transpose", f"{stem}.weight", perm=[1, 0]))
    return graph.add("Add", product, f"{stem}.bias") if has_bias else product


def _attention(graph: Graph, x: str, layer: int, shape: Any, mask: str, angles: tuple[str, str]) -> str:
    h = f"model.layers.{layer}.self_attn"
    parts = []
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        to_heads = graph.constant([0, 0, heads, shape.head_width], np.int64)
        by_head = graph.add("Reshape", _linear(graph, x, f"{h}.{part}_proj", shape.qkv_bias), to_heads)
        if shape.qk_norm and part != "v":
            by_head = _norm(graph, by_head, f"{h}.{part}_norm", shape)
        by_head = graph.add("Transpose", by_head, perm=[0, 2, 1, 3])
        parts.append(by_head if part == "v" else _rotate(graph, by_head, *angles))
    q, k, v = parts
    mixed = add_attention(graph, (q, k, v), layer, (shape.heads, shape.kv_heads, shape.head_width), mask)
    return _linear(graph, mixed, f"{h}.o_proj", shape.out_bias)


def _rotate(graph: Graph, x: str, cos: str, sin: str) -> str:
    """Turn pairs of channels (i, i + D / 2) of a head by the angles of their positions."""
    first, second = graph.split(x, 2)
    return graph.add(
        "Concat",
        graph.add("Sub", graph.add("Mul", first, cos), graph.add("Mul", second, sin)),
        graph.add("Add", graph.add("Mul", second, cos), graph.add("Mul", first, sin)),
        axis=-1,
    )
