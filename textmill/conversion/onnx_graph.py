"""What the ONNX graphs of all families share.

Inputs and outputs have the names that Optimum and onnxruntime-genai use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.conversion.model import Array

OPSET = 20
IR_VERSION = 9
"""Opset 20 has Gelu in both forms."""
GELU_FORMS = {"gelu_new": "tanh", "gelu": "none"}
OTHERS = {"relu": "Relu", "tanh": "Tanh"}
HEAD = "lm_head.transposed"


class Graph:
    """Nodes in the order in which they run; every value gets a name of its own."""

    def __init__(self, helper: Any) -> None:
        self.helper = helper
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        output = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def split(self, value: str, count: int) -> list[str]:
        """Cut the last axis into equal parts."""
        names = [f"Split_{len(self.nodes)}_{part}" for part in range(count)]
        self.nodes.append(self.helper.make_node("Split", [value], names, axis=-1, num_outputs=count))
        return names

    def constant(self, values: Any, kind: Any) -> str:
        """A constant array."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(values, kind)
        return name


def activate(graph: Graph, x: str, activation: str) -> str:
    """Add the nodes of an activation."""
    if activation == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if activation == "relu2":
        rectified = graph.add("Relu", x)
        return graph.add("Mul", rectified, rectified)
    if activation in OTHERS:
        return graph.add(OTHERS[activation], x)
    return graph.add("Gelu", x, approximate=GELU_FORMS[activation])


def add_causal_mask(graph: Graph) -> str:
    """True where a token may look: not into the future, not at padding; [batch, 1, tokens, past + tokens]."""
    zero, one, axis_0 = (graph.constant(value, np.int64) for value in (0, 1, [0]))
    past = graph.add("Gather", graph.add("Shape", "past_key_values.0.key"), graph.constant(2, np.int64))
    total = graph.add("Add", past, graph.add("Gather", graph.add("Shape", "input_ids"), one))
    # The positions of keys as a row, those of queries as a column: comparing them gives the causal mask.
    key_positions = graph.add("Unsqueeze", graph.add("Range", zero, total, one), axis_0)
    query_positions = graph.add("Unsqueeze", graph.add("Range", past, total, one), graph.constant([1], np.int64))
    is_past = graph.add("LessOrEqual", key_positions, query_positions)
    is_token = graph.add("Cast", "attention_mask", to=9)  # 9 is bool
    return graph.add("And", is_past, graph.add("Unsqueeze", is_token, graph.constant([1, 2], np.int64)))


def add_attention(graph: Graph, parts: tuple[str, str, str], layer: int, sizes: tuple[int, int, int], mask: str) -> str:
    """The weighted values of all heads side by side, [batch, tokens, heads x width].

    `parts`: queries, keys and values, [batch, heads, tokens, width]. `sizes`: heads of queries, heads of keys, and the
    width of a head.
    """
    (q, k, v), (heads, key_heads, width) = parts, sizes
    k = graph.add("Concat", f"past_key_values.{layer}.key", k, axis=2, name=f"present.{layer}.key")
    v = graph.add("Concat", f"past_key_values.{layer}.value", v, axis=2, name=f"present.{layer}.value")
    if heads != key_heads:
        k, v = (_repeat(graph, part, heads, heads // key_heads, width) for part in (k, v))
    scores = graph.add("MatMul", q, graph.add("Transpose", k, perm=[0, 1, 3, 2]))
    scores = graph.add("Div", scores, graph.constant(width**0.5, np.float32))
    scores = graph.add("Where", mask, scores, graph.constant(np.finfo(np.float32).min, np.float32))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)
    by_token = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
    return graph.add("Reshape", by_token, graph.constant([0, 0, heads * width], np.int64))


def _repeat(graph: Graph, part: str, heads: int, times: int, width: int) -> str:
    """Keys or values once for each head of queries."""
    column = graph.add("Unsqueeze", part, graph.constant([2], np.int64))
    repeated = graph.add("Expand", column, graph.constant([1, 1, times, 1, 1], np.int64))
    return graph.add("Reshape", repeated, graph.constant([0, heads, -1, width], np.int64))


def add_head(graph: Graph, x: str, weight: str) -> None:
    """The logits, from the last norm's output and the weight of the head."""
    graph.add("MatMul", x, graph.add("Transpose", weight, perm=[1, 0], name=HEAD), name="logits")


def run_in_two_parts(run: Any, layers: int, cache_shape: tuple[int, int], ids: Any) -> Array:
    """Logits of ids: the first half without past key values, then the second half with those of the first."""
    samples, length = ids.shape
    heads, width = cache_shape
    empty = np.zeros((samples, heads, 0, width), np.float32)
    past = [empty] * (2 * layers)
    past_names = [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    logits_by_half = []
    start = 0
    for stop in dict.fromkeys([max(1, length // 2), length]):
        inputs = {
            "input_ids": ids[:, start:stop],
            "attention_mask": np.ones((samples, stop), np.int64),
            "position_ids": np.tile(np.arange(start, stop), (samples, 1)),
            **dict(zip(past_names, past, strict=True)),
        }
        logits, *past = run(inputs)
        logits_by_half.append(logits)
        start = stop
    all_logits: Array = np.concatenate(logits_by_half, axis=1)
    return all_logits
