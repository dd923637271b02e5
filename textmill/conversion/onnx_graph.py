"""The nodes of a GPT-2, Llama, Qwen2, Qwen3 or BERT as an ONNX graph.

Inputs and outputs have the names that Optimum and onnxruntime-genai use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.models.bert.family import ANSWERS, SEQUENCES
from textmill.models.llama.net_torch import frequencies_of

OPSET = 20
IR_VERSION = 9
"""Opset 20 has Gelu in both forms."""
GELU_FORMS = {"gelu_new": "tanh", "gelu": "none"}
OTHERS = {"relu": "Relu", "tanh": "Tanh"}
HEAD = "lm_head.transposed"
FAMILIES = ("gpt2", "llama", "bert")


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


def cache_shape(shape: Any) -> tuple[int, int]:
    """Heads of keys, and their width."""
    return getattr(shape, "kv_heads", shape.heads), getattr(shape, "head_width", shape.width // shape.heads)


Sizes = list[int | str]


def build_nodes(graph: Graph, shape: Any) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """Add all nodes; return the inputs and outputs with their sizes."""
    if shape.family == "bert":
        return _build_encoder(graph, shape)
    mask = _add_causal_mask(graph)
    build_layers = _gpt2_layers if shape.family == "gpt2" else _llama_layers
    x, embedding = build_layers(graph, shape, mask)
    weight = "lm_head.weight" if shape.untied else embedding
    graph.add("MatMul", x, graph.add("Transpose", weight, perm=[1, 0], name=HEAD), name="logits")
    heads, width = cache_shape(shape)
    cached = [f"{layer}.{part}" for layer in range(shape.layers) for part in ("key", "value")]
    tokens: Sizes = ["batch", "tokens"]
    inputs: dict[str, Sizes] = {"input_ids": tokens, "attention_mask": ["batch", "total"], "position_ids": tokens}
    inputs |= {f"past_key_values.{name}": ["batch", heads, "past", width] for name in cached}
    present: dict[str, Sizes] = {f"present.{name}": ["batch", heads, "total", width] for name in cached}
    return inputs, {"logits": [*tokens, shape.vocab], **present}


def _gpt2_layers(graph: Graph, shape: Any, mask: str) -> tuple[str, str]:
    """The states after the last norm, and the name of the token embedding."""
    embedding = "transformer.wte.weight"
    x = graph.add(
        "Add",
        graph.add("Gather", embedding, "input_ids"),
        graph.add("Gather", "transformer.wpe.weight", "position_ids"),
    )
    to_heads = [0, 0, *cache_shape(shape)]

    def norm(x: str, stem: str) -> str:
        return graph.add("LayerNormalization", x, f"{stem}.weight", f"{stem}.bias", axis=-1, epsilon=shape.epsilon)

    def linear(x: str, stem: str) -> str:
        return graph.add("Add", graph.add("MatMul", x, f"{stem}.weight"), f"{stem}.bias")

    for layer in range(shape.layers):
        h = f"transformer.h.{layer}"
        normed = norm(x, f"{h}.ln_1")
        by_head = graph.constant(to_heads, np.int64)
        q, k, v = (
            graph.add("Transpose", graph.add("Reshape", part, by_head), perm=[0, 2, 1, 3])
            for part in graph.split(linear(normed, f"{h}.attn.c_attn"), 3)
        )
        x = graph.add("Add", x, linear(_add_attention(graph, q, k, v, layer, shape, mask), f"{h}.attn.c_proj"))
        inner = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        x = graph.add("Add", x, linear(_activate(graph, inner, shape.activation), f"{h}.mlp.c_proj"))
    return norm(x, "transformer.ln_f"), embedding


def _llama_layers(graph: Graph, shape: Any, mask: str) -> tuple[str, str]:
    """The states after the last norm, and the name of the token embedding."""
    embedding = "model.embed_tokens.weight"
    angles = _angles(graph, shape)
    x = graph.add("Gather", embedding, "input_ids")

    def norm(x: str, stem: str) -> str:
        """RMSNorm, which has no node of its own in this opset."""
        squares = graph.add("ReduceMean", graph.add("Mul", x, x), graph.constant([-1], np.int64), keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", squares, graph.constant(shape.epsilon, np.float32)))
        return graph.add("Mul", graph.add("Div", x, root), f"{stem}.weight")

    def linear(x: str, stem: str, has_bias: bool) -> str:
        product = graph.add("MatMul", x, graph.add("Transpose", f"{stem}.weight", perm=[1, 0]))
        return graph.add("Add", product, f"{stem}.bias") if has_bias else product

    def project(x: str, stem: str, heads: int, has_norm: bool) -> str:
        to_heads = graph.constant([0, 0, heads, shape.head_width], np.int64)
        by_head = graph.add("Reshape", linear(x, f"{stem}_proj", shape.qkv_bias), to_heads)
        by_head = norm(by_head, f"{stem}_norm") if has_norm else by_head
        return graph.add("Transpose", by_head, perm=[0, 2, 1, 3])

    for layer in range(shape.layers):
        h = f"model.layers.{layer}"
        normed = norm(x, f"{h}.input_layernorm")
        q = _rotate(graph, project(normed, f"{h}.self_attn.q", shape.heads, shape.qk_norm), *angles)
        k = _rotate(graph, project(normed, f"{h}.self_attn.k", shape.kv_heads, shape.qk_norm), *angles)
        v = project(normed, f"{h}.self_attn.v", shape.kv_heads, False)
        mixed = _add_attention(graph, q, k, v, layer, shape, mask)
        x = graph.add("Add", x, linear(mixed, f"{h}.self_attn.o_proj", shape.out_bias))
        normed = norm(x, f"{h}.post_attention_layernorm")
        gate, up = (linear(normed, f"{h}.mlp.{part}_proj", shape.mlp_bias) for part in ("gate", "up"))
        inner = graph.add("Mul", _activate(graph, gate, shape.activation), up)
        x = graph.add("Add", x, linear(inner, f"{h}.mlp.down_proj", shape.mlp_bias))
    return norm(x, "model.norm"), embedding


def _build_encoder(graph: Graph, shape: Any) -> tuple[dict[str, Sizes], dict[str, Sizes]]:
    """The nodes of a BERT: last_hidden_state, and what its heads compute, under the names that Optimum uses."""
    tokens: Sizes = ["batch", "tokens"]
    outputs: dict[str, Sizes] = {"last_hidden_state": [*tokens, shape.width]}
    is_pre = shape.norm == "pre"
    is_token = graph.add("Cast", "attention_mask", to=9)  # 9 is bool
    mask = graph.add("Unsqueeze", is_token, graph.constant([1, 2], np.int64))
    count = graph.add("Gather", graph.add("Shape", "input_ids"), graph.constant(1, np.int64))
    zero, one = (graph.constant(value, np.int64) for value in (0, 1))
    x = graph.add("Gather", "bert.embeddings.word_embeddings.weight", "input_ids")
    for table, ids in (("token_type", "token_type_ids"), ("position", graph.add("Range", zero, count, one))):
        x = graph.add("Add", x, graph.add("Gather", f"bert.embeddings.{table}_embeddings.weight", ids))

    def norm(x: str, stem: str, name: str | None = None) -> str:
        weights = f"{stem}.weight", f"{stem}.bias"
        return graph.add("LayerNormalization", x, *weights, axis=-1, epsilon=shape.epsilon, name=name)

    def linear(x: str, stem: str, name: str | None = None) -> str:
        product = graph.add("MatMul", x, graph.add("Transpose", f"{stem}.weight", perm=[1, 0]))
        return graph.add("Add", product, f"{stem}.bias", name=name)

    def to_heads(x: str) -> str:
        by_head = graph.constant([0, 0, shape.heads, shape.width // shape.heads], np.int64)
        return graph.add("Transpose", graph.add("Reshape", x, by_head), perm=[0, 2, 1, 3])

    def head(name: str, sizes: Sizes) -> str:
        outputs[name] = sizes
        return name

    x = x if is_pre else norm(x, "bert.embeddings.LayerNorm")
    for layer in range(shape.layers):
        h = f"bert.encoder.layer.{layer}"
        normed = norm(x, f"{h}.attention.ln") if is_pre else x
        q, k, v = (to_heads(linear(normed, f"{h}.attention.self.{part}")) for part in ("query", "key", "value"))
        mixed = _attend(graph, q, k, v, shape.heads, shape.width // shape.heads, mask)
        x = graph.add("Add", x, linear(mixed, f"{h}.attention.output.dense"))
        x = x if is_pre else norm(x, f"{h}.attention.output.LayerNorm")
        inner = linear(norm(x, f"{h}.ln") if is_pre else x, f"{h}.intermediate.dense")
        x = graph.add("Add", x, linear(_activate(graph, inner, shape.activation), f"{h}.output.dense"))
        x = x if is_pre else norm(x, f"{h}.output.LayerNorm")
    x = norm(x, "bert.encoder.ln") if is_pre else x
    x = graph.add("Identity", x, name="last_hidden_state")
    if shape.masked_head:
        stem = "cls.predictions.transform"
        y = norm(_activate(graph, linear(x, f"{stem}.dense"), shape.activation), f"{stem}.LayerNorm")
        product = graph.add("MatMul", y, graph.add("Transpose", "bert.embeddings.word_embeddings.weight", perm=[1, 0]))
        graph.add("Add", product, "cls.predictions.bias", name=head("logits", [*tokens, shape.vocab]))
    if shape.pooler:
        first = graph.add("Gather", x, zero, axis=1)
        pooled = graph.add(
            "Tanh", linear(first, "bert.pooler.dense"), name=head("pooler_output", ["batch", shape.width])
        )
        if shape.pair_head:
            linear(pooled, "cls.seq_relationship", head("seq_relationship_logits", ["batch", 2]))
    if shape.labels:
        of_text = shape.task == SEQUENCES
        sizes: Sizes = ["batch"] if of_text else tokens
        linear(pooled if of_text else x, "classifier", head("logits", [*sizes, len(shape.labels)]))
    if shape.task == ANSWERS:
        both = linear(x, "qa_outputs")
        for number, name in enumerate(("start_logits", "end_logits")):
            graph.add("Gather", both, graph.constant(number, np.int64), axis=-1, name=head(name, tokens))
    return dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), tokens), outputs


def _angles(graph: Graph, shape: Any) -> tuple[str, str]:
    """Cosine and sine of every position's angles, [batch, 1, tokens, head width / 2]."""
    frequencies, scale = frequencies_of(shape)
    positions = graph.add("Cast", "position_ids", to=1)  # 1 is fp32
    column = graph.add("Unsqueeze", positions, graph.constant([1, 3], np.int64))
    angles = graph.add("Mul", column, graph.constant(frequencies, np.float32))
    factor = graph.constant(scale, np.float32)
    return (graph.add("Mul", graph.add("Cos", angles), factor), graph.add("Mul", graph.add("Sin", angles), factor))


def _rotate(graph: Graph, x: str, cos: str, sin: str) -> str:
    """Turn pairs of channels (i, i + D / 2) of a head by the angles of their positions."""
    first, second = graph.split(x, 2)
    return graph.add(
        "Concat",
        graph.add("Sub", graph.add("Mul", first, cos), graph.add("Mul", second, sin)),
        graph.add("Add", graph.add("Mul", second, cos), graph.add("Mul", first, sin)),
        axis=-1,
    )


def _activate(graph: Graph, x: str, activation: str) -> str:
    """Add the nodes of an activation."""
    if activation == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if activation == "relu2":
        rectified = graph.add("Relu", x)
        return graph.add("Mul", rectified, rectified)
    if activation in OTHERS:
        return graph.add(OTHERS[activation], x)
    return graph.add("Gelu", x, approximate=GELU_FORMS[activation])


def _add_causal_mask(graph: Graph) -> str:
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


def _add_attention(graph: Graph, q: str, k: str, v: str, layer: int, shape: Any, mask: str) -> str:
    """The weighted values of all heads side by side, [batch, tokens, heads x width].

    Queries, keys and values are [batch, heads, tokens, width].
    """
    heads = shape.heads
    key_heads, width = cache_shape(shape)
    k = graph.add("Concat", f"past_key_values.{layer}.key", k, axis=2, name=f"present.{layer}.key")
    v = graph.add("Concat", f"past_key_values.{layer}.value", v, axis=2, name=f"present.{layer}.value")
    if heads != key_heads:
        k, v = (_repeat(graph, part, heads, heads // key_heads, width) for part in (k, v))
    return _attend(graph, q, k, v, heads, width, mask)


def _attend(graph: Graph, q: str, k: str, v: str, heads: int, width: int, mask: str) -> str:
    """Attention where the mask is true; as many heads of keys as of queries."""
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
