"""What JAX nets are written with: their options, and `Layers`, the layers of one forward pass, called by name.

Weights are a flat dict of arrays under checkpoint names, in memory layout. Shapes in names: N samples, T tokens, E
width, R rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from textmill.checkpoints.adapters import LORA_A, LORA_B
from textmill.config import LoraConfig
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
    activation_checkpointing: int = 0
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


@dataclass(frozen=True)
class Layers:
    """The layers of one forward pass; each is called with the name of its weights."""

    weights: Weights
    shape: Any
    options: NetOptions
    dropout_keys: Array | None = None
    """A key for each sample, from which dropout is computed; None: no dropout."""
    mask_N1TT: Array | None = None
    """Which tokens each one attends to; None: all, or in a causal net all before it."""
    extra: tuple[Array, ...] = ()
    """What a family adds, such as rotary angles."""

    def embedding(self, name: str) -> Array:
        """The rows of all tokens; a sharded table is gathered."""
        gathered = self.options.gathered
        return self.weights[name] if gathered is None else gathered(name, self.weights[name])

    def linear(self, name: str, x_NTE: Array) -> Array:
        """A linear layer (its matrix is outputs x inputs), with its bias and its adapter if it has them."""
        work = partial(jnp.einsum, "nti,oi->nto")
        y_NTE = self.matmul(f"{name}.weight", work, x_NTE)
        y_NTE = y_NTE + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y_NTE
        narrow_NTR = self.adapter_input(name, x_NTE)
        return y_NTE if narrow_NTR is None else y_NTE + self.matmul(name + LORA_B, work, narrow_NTR)

    def adapter_input(self, name: str, x_NTE: Array) -> Array | None:
        """The input of an adapter's second matrix: scale dropout(x) A; None if the layer has no adapter."""
        lora = self.options.lora
        if lora is None or name + LORA_A not in self.weights:
            return None
        seen_NTE = self.drop(x_NTE, lora.dropout, dropout_sites(self.shape)[name])
        return self.matmul(name + LORA_A, partial(jnp.einsum, "nti,ri->ntr"), seen_NTE) * (lora.alpha / lora.rank)

    def matmul(self, name: str, work: Callable[[Array, Array], Array], x_NTE: Array) -> Array:
        """A matmul with a weight; a sharded weight is gathered for it, and again in the backward pass, not kept."""
        if self.options.gathered is None:
            return work(x_NTE, self.weights[name])
        gather = partial(self.options.gathered, name)
        out: Array = jax.checkpoint(lambda x, weight: work(x, gather(weight)))(x_NTE, self.weights[name])
        return out

    def activation(self, x: Array) -> Array:
        """The shape's activation; only its input is kept for the backward pass."""
        out: Array = jax.checkpoint(ACTIVATIONS[self.shape.activation])(x)
        return out

    def layer_norm(self, name: str, x: Array) -> Array:
        """A LayerNorm, computed in fp32; recomputing it in the backward pass is faster than reading it from memory."""
        normed: Array = jax.checkpoint(partial(_layer_norm, self.shape.epsilon))(
            x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        )
        return normed

    def rms_norm(self, name: str, x: Array) -> Array:
        """An RMSNorm, computed in fp32; only its input is kept for the backward pass."""
        normed: Array = jax.checkpoint(partial(_rms_norm, self.shape.epsilon))(x, self.weights[f"{name}.weight"])
        return normed

    def drop(self, x: Array, fraction: float, site: int) -> Array:
        """Dropout, if there are keys for it."""
        return drop(x, fraction, self.dropout_keys, site)

    def add(self, x_NTE: Array, y_NTE: Array, dropout: float, site: int) -> Array:
        """The residual stream plus a branch, with dropout."""
        return self.options.by_sample(x_NTE + self.drop(y_NTE, dropout, site))

    def attention(self, q: Array, k: Array, v: Array, site: int, *, causal: bool = True) -> Array:
        """Attention [N, T, H x D] of queries to keys where the mask allows it; without one to all, or earlier ones.

        There may be fewer key heads than query heads (grouped-query attention)."""
        mask = self.mask_N1TT
        causal = causal and mask is None
        if self.dropout_keys is not None and self.shape.attention_dropout:
            return self._attention_with_dropout(q, k, v, site, causal).reshape(*q.shape[:2], -1)
        fused = self.options.fused and (mask is None or q.shape[1] % 2 == 0)
        kernel = "cudnn" if fused else "xla"
        y_NTHD = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=kernel)
        return y_NTHD.reshape(*q.shape[:2], -1)

    def _attention_with_dropout(self, q: Array, k: Array, v: Array, site: int, causal: bool) -> Array:
        """Attention with explicit weights; dropout is drawn for every head of queries."""
        if (repeats := q.shape[2] // k.shape[2]) > 1:
            k, v = (jnp.repeat(part, repeats, axis=2) for part in (k, v))
        scores_NHTT = jnp.einsum("nthd,nshd->nhts", q, k) * q.shape[-1] ** -0.5
        mask = causal_mask(scores_NHTT.shape[-1]) if causal else self.mask_N1TT
        scores_NHTT = scores_NHTT if mask is None else jnp.where(mask, scores_NHTT, -jnp.inf)
        weights_NHTT = self.drop(jax.nn.softmax(scores_NHTT.astype(jnp.float32)), self.shape.attention_dropout, site)
        return jnp.einsum("nhts,nshd->nthd", weights_NHTT.astype(q.dtype), v)

    def run_blocks(self, block: Callable[[Layers, int, Array], Array], x_NTE: Array) -> Array:
        """The residual stream after all blocks, some at a time with activation checkpointing.

        `block` gets the layers, the number of the block and the residual stream."""
        count = self.shape.layers
        step = self.options.activation_checkpointing or count

        def run(
            numbers: range, weights: Weights, x_NTE: Array, keys: Array | None, mask: Array | None, extra: Any
        ) -> Array:
            layers = Layers(weights, self.shape, self.options, keys, mask, extra)
            for number in numbers:
                x_NTE = block(layers, number, x_NTE)
            return x_NTE

        for start in range(0, count, step):
            some = partial(run, range(start, min(count, start + step)))
            # Dropout is a hash of positions, so that no random state needs to be kept and replayed.
            some = jax.checkpoint(some) if self.options.activation_checkpointing else some
            x_NTE = some(self.weights, x_NTE, self.dropout_keys, self.mask_N1TT, self.extra)
        return x_NTE


def _layer_norm(epsilon: float, x: Array, scale: Array, shift: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale + shift).astype(x.dtype)


def _rms_norm(epsilon: float, x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype)


def token_positions(ids_NT: Array, documents_NT: Array | None) -> Array:
    """The position of each token, [T]; [N, T] and from 0 in every document, if documents are given."""
    positions = jnp.arange(ids_NT.shape[1])
    return positions if documents_NT is None else positions - document_starts(documents_NT)


def document_starts(documents_NT: Array) -> Array:
    """The position at which each token's document starts."""
    new_NT = jnp.pad(documents_NT[:, 1:] != documents_NT[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(new_NT, jnp.arange(new_NT.shape[1]), 0), axis=1)


def document_mask(documents_NT: Array | None, *, causal: bool = True) -> Array | None:
    """Which tokens of its document each one attends to: those before it and itself, or all; None without documents."""
    if documents_NT is None:
        return None
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    return (same_NTT & causal_mask(same_NTT.shape[1]))[:, None] if causal else same_NTT[:, None]


def causal_mask(length: int) -> Array:
    """Each token attends to itself and to those before it."""
    return jnp.tril(jnp.ones((length, length), bool))


# Dropout: the same hash as in kernels/dropout_torch.py, so the same elements are dropped.

PRIME = 0x9E3779B1
FIRST = 0x85EBCA6B
SECOND = 0xC2B2AE35


def drop(x: Array, fraction: float, dropout_keys_N: Array | None, site: int) -> Array:
    """Zero a fraction of x [samples, ...] and scale up the rest; no dropout without keys."""
    if dropout_keys_N is None or fraction == 0:
        return x
    counters = jnp.arange(math.prod(x.shape[1:]), dtype=jnp.uint32).reshape(x.shape[1:])
    keys = _mix(dropout_keys_N + jnp.uint32(site * PRIME % (1 << 32))).reshape(-1, *[1] * (x.ndim - 1))
    keep = (_mix(counters * (keys | 1) + keys) >> 8) >= jnp.uint32(int(fraction * (1 << 24)))
    return x * keep * (1 / (1 - fraction))


def _mix(x: Array) -> Array:
    """Murmur3's finaliser on 32-bit integers."""
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)
