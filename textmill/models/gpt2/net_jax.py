"""GPT-2's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from textmill.checkpoints.adapters import LORA_B
from textmill.kernels.dropout_jax import drop
from textmill.models.base_jax import (
    ACTIVATIONS,
    Weights,
    attention,
    document_mask,
    embedding_table,
    linear,
    matmul,
    narrow,
    norm,
    run_blocks,
    token_positions,
)
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.gpt2.facts import HEAD, Shape

EMBEDDING = "transformer.wte.weight"
MATRICES = (".attn.", ".mlp.")
"""What the names of matrices have in them; their biases are cast with them."""


def head_name(shape: Shape) -> str:
    """The matrix that turns hidden states into logits, with its padding rows: the embedding if the head is tied."""
    return HEAD if shape.untied else EMBEDDING


def states(
    weights: Weights,
    shape: Shape,
    options: NetOptions,
    ids_NT: Array,
    keys_N: Array | None = None,
    documents_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; `keys_N` turns dropout on, attention stays inside documents if given."""
    mask_N1TT = None if documents_NT is None else document_mask(documents_NT)
    positions = token_positions(ids_NT, documents_NT)
    embedded = embedding_table(weights, EMBEDDING, options)[ids_NT] + weights["transformer.wpe.weight"][positions]
    x_NTE = options.by_sample(drop(embedded.astype(options.precision), shape.embedding_dropout, keys_N, 0))
    x_NTE = run_blocks(_blocks, shape, options, weights, x_NTE, keys_N, mask_N1TT)
    return norm(weights, "transformer.ln_f", shape, x_NTE)


def _blocks(
    layers: range,
    shape: Shape,
    options: NetOptions,
    weights: Weights,
    x_NTE: Array,
    keys_N: Array | None,
    mask_N1TT: Array | None,
) -> Array:
    for layer in layers:
        h = f"transformer.h.{layer}"
        dropout = shape.residual_dropout
        y_NTE = _attention(weights, layer, shape, options, norm(weights, f"{h}.ln_1", shape, x_NTE), keys_N, mask_N1TT)
        x_NTE = options.by_sample(x_NTE + drop(y_NTE, dropout, keys_N, 3 * layer + 2))
        y_NTE = _mlp(weights, f"{h}.mlp", shape, options, norm(weights, f"{h}.ln_2", shape, x_NTE), keys_N)
        x_NTE = options.by_sample(x_NTE + drop(y_NTE, dropout, keys_N, 3 * layer + 3))
    return x_NTE


def _attention(
    weights: Weights,
    layer: int,
    shape: Shape,
    options: NetOptions,
    x_NTE: Array,
    keys_N: Array | None,
    mask_N1TT: Array | None,
) -> Array:
    name, (N, T, E), H = f"transformer.h.{layer}.attn", x_NTE.shape, shape.heads
    bias_H3D = weights[f"{name}.c_attn.bias"].reshape(H, 3, -1)
    narrow_NTR = narrow(weights, f"{name}.c_attn", shape, options, x_NTE, keys_N)

    def part(which: int, x_NTE: Array, weight: Array) -> Array:
        return jnp.einsum("nte,hde->nthd", x_NTE, weight.reshape(H, 3, -1, x_NTE.shape[-1])[:, which])

    def projected(which: int) -> Array:
        y_NTHD = matmul(weights, f"{name}.c_attn.weight", options, partial(part, which), x_NTE) + bias_H3D[:, which]
        return (
            y_NTHD
            if narrow_NTR is None
            else y_NTHD + matmul(weights, f"{name}.c_attn{LORA_B}", options, partial(part, which), narrow_NTR)
        )

    # Three matmuls give contiguous queries, keys and values, as the attention kernels need them.
    q, k, v = map(projected, range(3))
    dropout = shape.attention_dropout
    site = 3 * layer + 1
    y_NTHD = attention(q, k, v, dropout, options, keys_N, site, mask_N1TT, causal=True)
    return linear(weights, f"{name}.c_proj", shape, options, y_NTHD.reshape(N, T, E), keys_N)


def _mlp(weights: Weights, name: str, shape: Shape, options: NetOptions, x_NTE: Array, keys_N: Array | None) -> Array:
    activate = jax.checkpoint(ACTIVATIONS[shape.activation])
    inner = activate(linear(weights, f"{name}.c_fc", shape, options, x_NTE, keys_N))
    return linear(weights, f"{name}.c_proj", shape, options, inner, keys_N)
