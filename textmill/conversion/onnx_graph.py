"""GPT-2 as an ONNX graph with past key values, under the names that Optimum and onnxruntime-genai use."""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.conversion.model import Array

OPSET, IR_VERSION = 20, 9
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


def build_nodes(graph: Graph, shape: Any) -> None:
    """All nodes, from input_ids, attention_mask, position_ids and past_key_values.N to logits and present.N."""
    mask = _mask(graph)
    x = graph.add(
        "Add", graph.add("Gather", "transformer.wte.weight", "input_ids"),
        graph.add("Gather", "transformer.wpe.weight", "position_ids"),
    )  # fmt: skip
    for layer in range(shape.layers):
        h = f"transformer.h.{layer}"
        x = graph.add("Add", x, _attention(graph, _norm(graph, x, f"{h}.ln_1", shape), layer, shape, mask))
        inner = _linear(graph, _norm(graph, x, f"{h}.ln_2", shape), f"{h}.mlp.c_fc")
        active = _activate(graph, inner, shape.activation)
        x = graph.add("Add", x, _linear(graph, active, f"{h}.mlp.c_proj"))
    last = _norm(graph, x, "transformer.ln_f", shape)
    weight = "lm_head.weight" if shape.untied else "transformer.wte.weight"
    head = graph.add("Transpose", weight, perm=[1, 0], name=HEAD)
    graph.add("MatMul", last, head, name="logits")


def _norm(graph: Graph, x: str, stem: str, shape: Any) -> str:
    return graph.add("LayerNormalization", x, f"{stem}.weight", f"{stem}.bias", axis=-1, epsilon=shape.epsilon)


def _linear(graph: Graph, x: str, stem: str) -> str:
    return graph.add("Add", graph.add("MatMul", x, f"{stem}.weight"), f"{stem}.bias")


def _activate(graph: Graph, x: str, activation: str) -> str:
    if activation == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if activation == "relu2":
        rectified = graph.add("Relu", x)
        return graph.add("Mul", rectified, rectified)
    if activation in OTHERS:
        return graph.add(OTHERS[activation], x)
    return graph.add("Gelu", x, approximate=GELU_FORMS[activation])


def _mask(graph: Graph) -> str:
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


def _attention(graph: Graph, x: str, layer: int, shape: Any, mask: str) -> str:
    h, width = f"transformer.h.{layer}.attn", shape.width // shape.heads
    to_heads = graph.constant([0, 0, shape.heads, width], np.int64)
    q, k, v = (
        graph.add("Transpose", graph.add("Reshape", projection, to_heads), perm=[0, 2, 1, 3])
        for projection in graph.split(_linear(graph, x, f"{h}.c_attn"), 3)
    )
    k = graph.add("Concat", f"past_key_values.{layer}.key", k, axis=2, name=f"present.{layer}.key")
    v = graph.add("Concat", f"past_key_values.{layer}.value", v, axis=2, name=f"present.{layer}.value")
    scores = graph.add("MatMul", q, graph.add("Transpose", k, perm=[0, 1, 3, 2]))
    scores = graph.add("Div", scores, graph.constant(width**0.5, np.float32))
    scores = graph.add("Where", mask, scores, graph.constant(np.finfo(np.float32).min, np.float32))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)
    by_token = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
    heads_joined = graph.add("Reshape", by_token, graph.constant([0, 0, shape.width], np.int64))
    return _linear(graph, heads_joined, f"{h}.c_proj")


def run_in_two_parts(run: Any, shape: Any, ids: Any) -> Array:
    """Logits of ids: the first half without past key values, then the second half with those of the first."""
    samples, length = ids.shape
    empty = np.zeros((samples, shape.heads, 0, shape.width // shape.heads), np.float32)
    past = [empty] * (2 * shape.layers)
    past_names = [f"past_key_values.{layer}.{kind}" for layer in range(shape.layers) for kind in ("key", "value")]
    logits_by_half, start = [], 0
    for stop in dict.fromkeys([max(1, length // 2), length]):
        inputs = {
            "input_ids": ids[:, start:stop], "attention_mask": np.ones((samples, stop), np.int64),
            "position_ids": np.tile(np.arange(start, stop), (samples, 1)), **dict(zip(past_names, past, strict=True)),
        }  # fmt: skip
        logits, *past = run(inputs)
        logits_by_half.append(logits)
        start = stop
    all_logits: Array = np.concatenate(logits_by_half, axis=1)
    return all_logits
