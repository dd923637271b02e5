"""BERT's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, K or P some of them, E width, H heads, D head width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from textmill.models.base_jax import ACTIVATIONS, Layers, Weights, document_mask, token_positions
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.bert.family import Shape

EMBEDDING = "bert.embeddings.word_embeddings.weight"
HEAD_BIAS = "cls.predictions.bias"
"""The head's bias, one number for each token."""
HEAD_FOR_LABELS_ONLY = True
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
    dropout_keys: Array | None = None,
    documents_NT: Array | None = None,
    types_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; attention stays inside documents if given."""
    layers = Layers(weights, shape, options, dropout_keys, document_mask(documents_NT, causal=False))
    positions = token_positions(ids_NT, documents_NT)
    types = weights["bert.embeddings.token_type_embeddings.weight"]
    embedded = layers.embedding(EMBEDDING)[ids_NT] + (types[0] if types_NT is None else types[types_NT])
    embedded = embedded + weights["bert.embeddings.position_embeddings.weight"][positions]
    if shape.norm == "post":
        embedded = layers.layer_norm("bert.embeddings.LayerNorm", embedded)
    x_NTE = options.by_sample(layers.drop(embedded.astype(options.precision), shape.dropout, 0))
    x_NTE = layers.run_blocks(_block, x_NTE)
    return layers.layer_norm("bert.encoder.ln", x_NTE) if shape.norm == "pre" else x_NTE


def head_input(weights: Weights, shape: Shape, options: NetOptions, x_NKE: Array) -> Array:
    """What the head multiplies: a matrix, the activation and a LayerNorm."""
    layers = Layers(weights, shape, options)
    y_NKE = ACTIVATIONS[shape.activation](layers.linear("cls.predictions.transform.dense", x_NKE))
    return layers.layer_norm("cls.predictions.transform.LayerNorm", y_NKE)


def pair_logits(weights: Weights, shape: Shape, options: NetOptions, x_NPE: Array) -> Array:
    """The logits [N, P, 2], from the hidden states of each pair's first token."""
    layers = Layers(weights, shape, options)
    return layers.linear("cls.seq_relationship", jnp.tanh(layers.linear("bert.pooler.dense", x_NPE)))


def _block(layers: Layers, number: int, x_NTE: Array) -> Array:
    """norm(x + attention(x)), then norm(x + MLP(x)); with `norm: pre` the norms are inside the branches."""
    h = f"bert.encoder.layer.{number}"
    pre = layers.shape.norm == "pre"
    y_NTE = layers.layer_norm(f"{h}.attention.ln", x_NTE) if pre else x_NTE
    y_NTE = _attention(layers, number, y_NTE)
    x_NTE = _add(layers, f"{h}.attention.output", 3 * number + 2, x_NTE, y_NTE)
    y_NTE = layers.layer_norm(f"{h}.ln", x_NTE) if pre else x_NTE
    y_NTF = layers.activation(layers.linear(f"{h}.intermediate.dense", y_NTE))
    return _add(layers, f"{h}.output", 3 * number + 3, x_NTE, y_NTF)


def _add(layers: Layers, name: str, site: int, x_NTE: Array, y: Array) -> Array:
    """The residual stream after a branch: its last matrix, the sum, and the LayerNorm if the net has it there."""
    x_NTE = layers.add(x_NTE, layers.linear(f"{name}.dense", y), layers.shape.dropout, site)
    return layers.layer_norm(f"{name}.LayerNorm", x_NTE) if layers.shape.norm == "post" else x_NTE


def _attention(layers: Layers, number: int, x_NTE: Array) -> Array:
    """Attention in both directions, before its last matrix."""
    name, (N, T, _) = f"bert.encoder.layer.{number}.attention.self", x_NTE.shape
    q, k, v = (
        layers.linear(f"{name}.{part}", x_NTE).reshape(N, T, layers.shape.heads, -1)
        for part in ("query", "key", "value")
    )
    return layers.attention(q, k, v, 3 * number + 1, causal=False)
