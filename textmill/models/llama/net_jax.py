"""Llama's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, E width, H heads, D head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from textmill.models.base_jax import ACTIVATIONS, Layers, Weights, document_mask, token_positions
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.llama.family import EMBEDDING, HEAD, Shape
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
    dropout_keys: Array | None = None,
    documents_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; attention stays inside documents if given."""
    angles = _angles(shape, jnp.atleast_2d(token_positions(ids_NT, documents_NT)))
    layers = Layers(weights, shape, options, dropout_keys, document_mask(documents_NT), angles)
    embedded = layers.embedding(EMBEDDING)[ids_NT].astype(options.precision)
    x_NTE = options.by_sample(layers.drop(embedded, shape.dropout, 0))
    return layers.rms_norm("model.norm", layers.run_blocks(_block, x_NTE))


def _angles(shape: Shape, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of every position's angles [N or 1, T, 1, D / 2]."""
    D = shape.head_width
    powers_D = np.float32(shape.rotary_base) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    frequencies_D, scale = rotary_frequencies(powers_D, shape.rotary_base, shape.rotary_scaling)
    angles = (positions[..., None].astype(jnp.float32) * frequencies_D)[:, :, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _block(layers: Layers, number: int, x_NTE: Array) -> Array:
    """x + attention(norm(x)), then x + MLP(norm(x))."""
    name = f"model.layers.{number}"
    dropout = layers.shape.dropout
    y_NTE = _attention(layers, number, layers.rms_norm(f"{name}.input_layernorm", x_NTE))
    x_NTE = layers.add(x_NTE, y_NTE, dropout, 3 * number + 2)
    y_NTE = _mlp(layers, f"{name}.mlp", layers.rms_norm(f"{name}.post_attention_layernorm", x_NTE))
    return layers.add(x_NTE, y_NTE, dropout, 3 * number + 3)


def _attention(layers: Layers, number: int, x_NTE: Array) -> Array:
    """Causal self-attention with rotary positions."""
    name, (N, T, _) = f"model.layers.{number}.self_attn", x_NTE.shape
    q, k, v = (
        layers.linear(f"{name}.{part}_proj", x_NTE).reshape(N, T, -1, layers.shape.head_width)
        for part in ("q", "k", "v")
    )
    if layers.shape.qk_norm:
        q = layers.rms_norm(f"{name}.q_norm", q)
        k = layers.rms_norm(f"{name}.k_norm", k)
    q, k = (_apply_rotary(part, *layers.extra) for part in (q, k))
    return layers.linear(f"{name}.o_proj", layers.attention(q, k, v, 3 * number + 1))


def _apply_rotary(x_NTHD: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x_NTHD.astype(jnp.float32), 2, -1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x_NTHD.dtype)


def _mlp(layers: Layers, name: str, x_NTE: Array) -> Array:
    gate, up = (layers.linear(f"{name}.{part}_proj", x_NTE) for part in ("gate", "up"))
    activate = ACTIVATIONS[layers.shape.activation]
    gated = jax.checkpoint(lambda gate, up: activate(gate) * up)(gate, up)
    return layers.linear(f"{name}.down_proj", gated)
