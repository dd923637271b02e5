"""BERT's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, K or P some of them, E width, H heads, D head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from textmill.kernels.dropout_jax import drop
from textmill.models.base_jax import (
    ACTIVATIONS,
    Weights,
    attention,
    embedding_table,
    linear,
    norm,
    run_blocks,
    token_positions,
)
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.bert.facts import Shape

EMBEDDING = "bert.embeddings.word_embeddings.weight"
HEAD_BIAS = "cls.predictions.bias"
"""The head's bias, one number for each token."""
FEW_LABELS = True
"""The head is computed for labelled tokens alone."""
MATRICES = (".dense.", ".attention.self.")
"""What the names of matrices have in them; their biases are cast with them."""


def head_name(shape: Shape) -> str:
    """The matrix that turns hidden states into logits, with its padding rows: the embedding."""
    return EMBEDDING


def has_pair_head(shape: Shape) -> bool:
    """Whether `pair_logits` predicts a class for each packed sentence pair."""
    return shape.pair_head


def states(
    weights: Weights,
    shape: Shape,
    options: NetOptions,
    ids_NT: Array,
    keys_N: Array | None = None,
    documents_NT: Array | None = None,
    types_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; `keys_N` turns dropout on, attention stays inside documents if given."""
    mask_N1TT = None
    if documents_NT is not None:
        mask_N1TT = (documents_NT[:, :, None] == documents_NT[:, None, :])[:, None]
    positions = token_positions(ids_NT, documents_NT)
    table = embedding_table(weights, EMBEDDING, options)
    types = weights["bert.embeddings.token_type_embeddings.weight"]
    embedded = table[ids_NT] + (types[0] if types_NT is None else types[types_NT])
    embedded = embedded + weights["bert.embeddings.position_embeddings.weight"][positions]
    if shape.norm == "post":
        embedded = norm(weights, "bert.embeddings.LayerNorm", shape, embedded)
    x_NTE = options.by_sample(drop(embedded.astype(options.precision), shape.dropout, keys_N, 0))
    x_NTE = run_blocks(_blocks, shape, options, weights, x_NTE, keys_N, mask_N1TT)
    return norm(weights, "bert.encoder.ln", shape, x_NTE) if shape.norm == "pre" else x_NTE


def head_input(weights: Weights, shape: Shape, options: NetOptions, x_NKE: Array) -> Array:
    """What the head multiplies: a matrix, the activation and a LayerNorm."""
    name = "cls.predictions.transform"
    y_NKE = ACTIVATIONS[shape.activation](linear(weights, f"{name}.dense", shape, options, x_NKE, None))
    return norm(weights, f"{name}.LayerNorm", shape, y_NKE)


def pair_logits(weights: Weights, shape: Shape, options: NetOptions, x_NPE: Array) -> Array:
    """The logits [N, P, 2], from the hidden states of each pair's first token."""
    pooled_NPE = jnp.tanh(linear(weights, "bert.pooler.dense", shape, options, x_NPE, None))
    return linear(weights, "cls.seq_relationship", shape, options, pooled_NPE, None)


def _blocks(
    layers: range,
    shape: Shape,
    options: NetOptions,
    weights: Weights,
    x_NTE: Array,
    keys_N: Array | None,
    mask_N1TT: Array | None,
) -> Array:
    pre = shape.norm == "pre"
    for layer in layers:
        h = f"bert.encoder.layer.{layer}"
        y_NTE = norm(weights, f"{h}.attention.ln", shape, x_NTE) if pre else x_NTE
        y_NTE = _attention(weights, layer, shape, options, y_NTE, keys_N, mask_N1TT)
        x_NTE = _add(weights, f"{h}.attention.output", 3 * layer + 2, shape, options, x_NTE, y_NTE, keys_N)
        y_NTE = norm(weights, f"{h}.ln", shape, x_NTE) if pre else x_NTE
        activate = jax.checkpoint(ACTIVATIONS[shape.activation])
        y_NTF = activate(linear(weights, f"{h}.intermediate.dense", shape, options, y_NTE, keys_N))
        x_NTE = _add(weights, f"{h}.output", 3 * layer + 3, shape, options, x_NTE, y_NTF, keys_N)
    return x_NTE


def _add(
    weights: Weights,
    name: str,
    site: int,
    shape: Shape,
    options: NetOptions,
    x_NTE: Array,
    y: Array,
    keys_N: Array | None,
) -> Array:
    """The residual stream after a branch: its last matrix, the sum, and the LayerNorm if the net has it there."""
    y_NTE = drop(linear(weights, f"{name}.dense", shape, options, y, keys_N), shape.dropout, keys_N, site)
    x_NTE = options.by_sample(x_NTE + y_NTE)
    return norm(weights, f"{name}.LayerNorm", shape, x_NTE) if shape.norm == "post" else x_NTE


def _attention(
    weights: Weights,
    layer: int,
    shape: Shape,
    options: NetOptions,
    x_NTE: Array,
    keys_N: Array | None,
    mask_N1TT: Array | None,
) -> Array:
    """Attention in both directions, before its last matrix."""
    name, (N, T, E) = f"bert.encoder.layer.{layer}.attention.self", x_NTE.shape
    q, k, v = (
        linear(weights, f"{name}.{part}", shape, options, x_NTE, keys_N).reshape(N, T, shape.heads, -1)
        for part in ("query", "key", "value")
    )
    dropout = shape.attention_dropout
    site = 3 * layer + 1
    return attention(q, k, v, dropout, options, keys_N, site, mask_N1TT, causal=False).reshape(N, T, E)
