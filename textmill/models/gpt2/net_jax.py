"""GPT-2's net in JAX: a flat dict of arrays under checkpoint names, in memory layout.

Shapes in names: N samples, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array

from textmill.checkpoints.adapters import LORA_B
from textmill.models.base_jax import Layers, Weights, document_mask, token_positions
from textmill.models.base_jax import NetOptions as NetOptions
from textmill.models.gpt2.family import HEAD, Shape

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
    dropout_keys: Array | None = None,
    documents_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; attention stays inside documents if given."""
    layers = Layers(weights, shape, options, dropout_keys, document_mask(documents_NT))
    positions = token_positions(ids_NT, documents_NT)
    embedded = layers.embedding(EMBEDDING)[ids_NT] + weights["transformer.wpe.weight"][positions]
    x_NTE = options.by_sample(layers.drop(embedded.astype(options.precision), shape.embedding_dropout, 0))
    return layers.layer_norm("transformer.ln_f", layers.run_blocks(_block, x_NTE))


def _block(layers: Layers, number: int, x_NTE: Array) -> Array:
    """x + attention(norm(x)), then x + MLP(norm(x))."""
    h = f"transformer.h.{number}"
    dropout = layers.shape.residual_dropout
    y_NTE = _attention(layers, number, layers.layer_norm(f"{h}.ln_1", x_NTE))
    x_NTE = layers.add(x_NTE, y_NTE, dropout, 3 * number + 2)
    inner = layers.activation(layers.linear(f"{h}.mlp.c_fc", layers.layer_norm(f"{h}.ln_2", x_NTE)))
    return layers.add(x_NTE, layers.linear(f"{h}.mlp.c_proj", inner), dropout, 3 * number + 3)


def _attention(layers: Layers, number: int, x_NTE: Array) -> Array:
    """Causal self-attention. Three matmuls give contiguous queries, keys and values, as the kernels need them."""
    name = f"transformer.h.{number}.attn"
    H = layers.shape.heads
    bias_H3D = layers.weights[f"{name}.c_attn.bias"].reshape(H, 3, -1)
    narrow_NTR = layers.adapter_input(f"{name}.c_attn", x_NTE)

    def part(which: int, x_NTE: Array, weight: Array) -> Array:
        return jnp.einsum("nte,hde->nthd", x_NTE, weight.reshape(H, 3, -1, x_NTE.shape[-1])[:, which])

    def projected(which: int) -> Array:
        y_NTHD = layers.matmul(f"{name}.c_attn.weight", partial(part, which), x_NTE) + bias_H3D[:, which]
        if narrow_NTR is None:
            return y_NTHD
        return y_NTHD + layers.matmul(f"{name}.c_attn{LORA_B}", partial(part, which), narrow_NTR)

    q, k, v = map(projected, range(3))
    return layers.linear(f"{name}.c_proj", layers.attention(q, k, v, 3 * number + 1))
