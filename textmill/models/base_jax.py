"""What JAX nets share: their options, linear layers with adapters, LayerNorms, packed documents.

Weights are a flat dict of arrays under checkpoint names, in memory layout. Shapes in names: N samples, T tokens, E
width, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from textmill.checkpoints.adapters import LORA_A, LORA_B
from textmill.config import LoraConfig
from textmill.kernels.dropout_jax import drop
from textmill.models.lora import dropout_sites

Weights = dict[str, Array]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclass(frozen=True)
class NetOptions:
    """How the net is computed; except for adapters and rounding, the result does not depend on it."""

    precision: jnp.dtype
    """The dtype of the matmuls and of the residual stream."""
    recompute: int = 0
    """Activation checkpointing: this many blocks at a time are recomputed in the backward pass; 0: none."""
    fused: bool = False
    """Use cuDNN's attention kernels."""
    lora: LoraConfig | None = None
    """The settings of the LoRA adapters, if there are any."""
    gathered: Callable[[str, Array], Array] | None = None
    """Gathers a weight of which each device has a shard (FSDP); None: weights are not sharded."""
    by_sample: Callable[[Array], Array] = lambda x: x
    """Shards an array [samples, ...] so that each device has different samples."""


def cast_matrices(weights: Weights, parts: tuple[str, ...], precision: jnp.dtype) -> Weights:
    """The weights with matrices cast to the matmuls' precision, once per step; norms and embeddings stay fp32.

    `parts` are what the names of matrices have in them: the net's MATRICES.
    """
    return {
        name: values.astype(precision) if any(part in name for part in parts) else values
        for name, values in weights.items()
    }


def norm(weights: Weights, name: str, shape: Any, x_NTE: Array) -> Array:
    """A LayerNorm, computed in fp32."""
    # Only the input is kept for the backward pass: recomputing the rest is faster than reading it from memory.
    normed: Array = jax.checkpoint(partial(_normed, shape.epsilon))(
        x_NTE, weights[f"{name}.weight"], weights[f"{name}.bias"]
    )
    return normed


def _normed(epsilon: float, x: Array, scale: Array, shift: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale + shift).astype(x.dtype)


def linear(weights: Weights, name: str, shape: Any, options: NetOptions, x_NTE: Array, keys_N: Array | None) -> Array:
    """A linear layer (its matrix is outputs x inputs), with its bias and its adapter if it has them."""
    work = partial(jnp.einsum, "nti,oi->nto")
    y_NTE = matmul(weights, f"{name}.weight", options, work, x_NTE)
    y_NTE = y_NTE + weights[f"{name}.bias"] if f"{name}.bias" in weights else y_NTE
    narrow_NTR = narrow(weights, name, shape, options, x_NTE, keys_N)
    return y_NTE if narrow_NTR is None else y_NTE + matmul(weights, name + LORA_B, options, work, narrow_NTR)


def narrow(
    weights: Weights, name: str, shape: Any, options: NetOptions, x_NTE: Array, keys_N: Array | None
) -> Array | None:
    """The input of an adapter's second matrix: scale dropout(x) A; None if the layer has no adapter."""
    if options.lora is None or name + LORA_A not in weights:
        return None
    seen_NTE = drop(x_NTE, options.lora.dropout, keys_N, dropout_sites(shape)[name])
    return matmul(weights, name + LORA_A, options, partial(jnp.einsum, "nti,ri->ntr"), seen_NTE) * (
        options.lora.alpha / options.lora.rank
    )


def matmul(
    weights: Weights, name: str, options: NetOptions, work: Callable[[Array, Array], Array], x_NTE: Array
) -> Array:
    """A matmul with a weight; a sharded weight is gathered for it, and again in the backward pass, instead of kept."""
    if options.gathered is None:
        return work(x_NTE, weights[name])
    gather = partial(options.gathered, name)
    out: Array = jax.checkpoint(lambda x, weight: work(x, gather(weight)))(x_NTE, weights[name])
    return out


def embedding_table(weights: Weights, name: str, options: NetOptions) -> Array:
    """The rows of all tokens; a sharded table is gathered."""
    return weights[name] if options.gathered is None else options.gathered(name, weights[name])


def token_positions(ids_NT: Array, documents_NT: Array | None) -> Array:
    """The position of each token, [T]; [N, T] and from 0 in every document, if documents are given."""
    positions = jnp.arange(ids_NT.shape[1])
    return positions if documents_NT is None else positions - document_starts(documents_NT)


def document_starts(documents_NT: Array) -> Array:
    """The position at which each token's document starts."""
    new_NT = jnp.pad(documents_NT[:, 1:] != documents_NT[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(new_NT, jnp.arange(new_NT.shape[1]), 0), axis=1)


def run_blocks(
    blocks: Callable[..., Array],
    shape: Any,
    options: NetOptions,
    weights: Weights,
    x_NTE: Array,
    *context: Array | None,
) -> Array:
    """The residual stream after all blocks, some at a time with activation checkpointing.

    `blocks` gets the numbers of the layers, shape, options, weights, the residual stream and the context.
    """
    step = options.recompute or shape.layers
    for start in range(0, shape.layers, step):
        some = partial(blocks, range(start, min(shape.layers, start + step)), shape, options)
        # Dropout is a hash of positions, so that no random state needs to be kept and replayed.
        x_NTE = (jax.checkpoint(some) if options.recompute else some)(weights, x_NTE, *context)
    return x_NTE


def attention(
    q: Array,
    k: Array,
    v: Array,
    dropout: float,
    options: NetOptions,
    keys_N: Array | None,
    site: int,
    mask_N1TT: Array | None,
    *,
    causal: bool,
) -> Array:
    """Attention [N, T, H, D] of queries to keys where the mask allows it; without a mask to all, or to earlier ones."""
    causal = causal and mask_N1TT is None
    if keys_N is not None and dropout:
        # Attention weights are written out, for dropout on them.
        scores_NHTT = jnp.einsum("nthd,nshd->nhts", q, k) * q.shape[-1] ** -0.5
        mask = causal_mask(scores_NHTT.shape[-1]) if causal else mask_N1TT
        scores_NHTT = scores_NHTT if mask is None else jnp.where(mask, scores_NHTT, -jnp.inf)
        weights_NHTT = drop(jax.nn.softmax(scores_NHTT.astype(jnp.float32)), dropout, keys_N, site).astype(q.dtype)
        return jnp.einsum("nhts,nshd->nthd", weights_NHTT, v)
    fused = options.fused and (mask_N1TT is None or q.shape[1] % 2 == 0)
    kernel = "cudnn" if fused else "xla"
    return jax.nn.dot_product_attention(q, k, v, mask=mask_N1TT, is_causal=causal, implementation=kernel)


def document_mask(documents_NT: Array) -> Array:
    """Which tokens before it, and itself, each one attends to when attention stays inside its document."""
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    return (same_NTT & causal_mask(same_NTT.shape[1]))[:, None]


def causal_mask(length: int) -> Array:
    """Each token attends to itself and to those before it."""
    return jnp.tril(jnp.ones((length, length), bool))
