"""Llama's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, E width, H heads, D head width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from textmill.kernels.dropout_jax import drop
from textmill.models.base_jax import (
    ACTIVATIONS,
    Weights,
    attention,
    document_mask,
    embedding_table,
    linear,
    run_blocks,
    token_positions,
)
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.llama.facts import EMBEDDING, HEAD, Shape
from textmill.models.llama.rotary import rotary_frequencies

MATRICES = ("_proj.",)
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
    cos, sin = _angles(shape, jnp.atleast_2d(token_positions(ids_NT, documents_NT)))
    embedded = embedding_table(weights, EMBEDDING, options)[ids_NT].astype(options.precision)
    x_NTE = options.by_sample(drop(embedded, shape.dropout, keys_N, 0))
    x_NTE = run_blocks(_blocks, shape, options, weights, x_NTE, keys_N, mask_N1TT, cos, sin)
    return _norm(weights, "model.norm", shape, x_NTE)


def _angles(shape: Shape, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of every position's angles [N or 1, T, 1, D / 2]."""
    D = shape.head_width
    powers_D = np.float32(shape.rotary_base) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    frequencies_D, scale = rotary_frequencies(powers_D, shape.rotary_base, shape.rotary_scaling)
    angles = (positions[..., None].astype(jnp.float32) * frequencies_D)[:, :, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _blocks(
    layers: range,
    shape: Shape,
    options: NetOptions,
    weights: Weights,
    x_NTE: Array,
    keys_N: Array | None,
    mask_N1TT: Array | None,
    cos: Array,
    sin: Array,
) -> Array:
    for layer in layers:
        name = f"model.layers.{layer}"
        dropout = shape.dropout
        y_NTE = _norm(weights, f"{name}.input_layernorm", shape, x_NTE)
        y_NTE = _attention(weights, layer, shape, options, y_NTE, keys_N, mask_N1TT, cos, sin)
        x_NTE = options.by_sample(x_NTE + drop(y_NTE, dropout, keys_N, 3 * layer + 2))
        y_NTE = _norm(weights, f"{name}.post_attention_layernorm", shape, x_NTE)
        y_NTE = _mlp(weights, f"{name}.mlp", shape, options, y_NTE, keys_N)
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
    cos: Array,
    sin: Array,
) -> Array:
    name, (N, T, _) = f"model.layers.{layer}.self_attn", x_NTE.shape
    q, k, v = (
        linear(weights, f"{name}.{part}_proj", shape, options, x_NTE, keys_N).reshape(N, T, -1, shape.head_width)
        for part in ("q", "k", "v")
    )
    if shape.qk_norm:
        q = _norm(weights, f"{name}.q_norm", shape, q)
        k = _norm(weights, f"{name}.k_norm", shape, k)
    q = _apply_rotary(q, cos, sin)
    k = _apply_rotary(k, cos, sin)
    if keys_N is not None and shape.attention_dropout:
        # Dropout is drawn for every head of queries.
        k, v = (jnp.repeat(part, shape.heads // shape.kv_heads, axis=2) for part in (k, v))
    dropout = shape.attention_dropout
    site = 3 * layer + 1
    y_NTHD = attention(q, k, v, dropout, options, keys_N, site, mask_N1TT, causal=True)
    return linear(weights, f"{name}.o_proj", shape, options, y_NTHD.reshape(N, T, -1), keys_N)


def _apply_rotary(x_NTHD: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x_NTHD.astype(jnp.float32), 2, -1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x_NTHD.dtype)


def _mlp(weights: Weights, name: str, shape: Shape, options: NetOptions, x_NTE: Array, keys_N: Array | None) -> Array:
    gate, up = (linear(weights, f"{name}.{part}_proj", shape, options, x_NTE, keys_N) for part in ("gate", "up"))
    gated = jax.checkpoint(lambda gate, up: ACTIVATIONS[shape.activation](gate) * up)(gate, up)
    return linear(weights, f"{name}.down_proj", shape, options, gated, keys_N)


def _norm(weights: Weights, name: str, shape: Shape, x: Array) -> Array:
    """An RMSNorm, computed in fp32; only its input is kept for the backward pass."""
    normed: Array = jax.checkpoint(partial(_normed, shape.epsilon))(x, weights[f"{name}.weight"])
    return normed


def _normed(epsilon: float, x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype)
