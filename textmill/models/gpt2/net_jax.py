"""GPT-2's net in JAX: a flat dict of arrays under checkpoint names, in the layout of `to_memory`.

Shapes in names: N samples, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from textmill.checkpoints.adapters import A, B
from textmill.config import LoraConfig
from textmill.kernels.dropout_jax import drop
from textmill.models.gpt2.facts import Shape
from textmill.models.lora import sites_of

Weights = dict[str, Array]

HEAD = "transformer.wte.weight"
"""The matrix that scores a token's successors: the embedding, with its padding rows."""
SPLIT = {
    ".c_attn.weight": 0,
    ".c_attn.bias": 0,
    ".c_fc.weight": 0,
    ".c_fc.bias": 0,
    ".c_proj.weight": 1,
    ".wte.weight": 0,
}
"""By the end of a weight's name, the axis along which tensor-parallel devices share it; others are whole on each."""


@dataclass(frozen=True)
class Way:
    """How the net is computed: nothing of it but adapters changes what comes out, except for rounding."""

    precision: jnp.dtype
    """Of the matrix products and of the stream between them."""
    recompute: int = 0
    """Blocks at a time whose inner states are made again in backward; 0: none."""
    fused: bool = False
    """Attention by cuDNN's kernels."""
    lora: LoraConfig | None = None
    """What the adapters beside matrices are, where the weights have some."""
    whole: Callable[[str, Array], Array] | None = None
    """A weight as a product needs it, where devices hold parts."""
    by_sample: Callable[[Array], Array] = lambda x: x
    """An array [samples, ...] laid out so that each device has samples of its own."""


def splits_of(shape: Shape) -> dict[str, int]:
    """What tensor-parallel devices share out, and how many of each there are."""
    return {"heads": shape.heads, "inner channels": shape.inner, "rows of the embedding": shape.padded_vocab}


def narrowed(weights: Weights, precision: jnp.dtype) -> Weights:
    """The weights as the products read them, made once a step; LayerNorms and embeddings stay as they are."""
    return {
        name: values.astype(precision) if ".attn." in name or ".mlp." in name else values
        for name, values in weights.items()
    }


def states(
    weights: Weights,
    shape: Shape,
    way: Way,
    ids_NT: Array,
    keys_N: Array | None = None,
    documents_NT: Array | None = None,
) -> Array:
    """Hidden states of every token [N, T, E]; `keys_N` asks for dropout, documents are kept apart if given."""
    positions = jnp.arange(ids_NT.shape[1])
    mask_N1TT = None
    if documents_NT is not None:
        mask_N1TT = _apart(documents_NT)
        positions = positions - _begins(documents_NT)
    table = weights[HEAD] if way.whole is None else way.whole(HEAD, weights[HEAD])
    embedded = table[ids_NT] + weights["transformer.wpe.weight"][positions]
    x_NTE = way.by_sample(drop(embedded.astype(way.precision), shape.embedding_dropout, keys_N, 0))
    for start in range(0, shape.layers, way.recompute or shape.layers):
        layers = range(start, min(shape.layers, start + (way.recompute or shape.layers)))
        blocks = partial(_blocks, layers, shape, way)
        # Dropout is a hash of places, so that nothing random needs to be kept and replayed.
        x_NTE = (jax.checkpoint(blocks) if way.recompute else blocks)(weights, x_NTE, keys_N, mask_N1TT)
    return _norm(weights, "transformer.ln_f", shape, x_NTE)


def _blocks(
    layers: range, shape: Shape, way: Way, weights: Weights, x_NTE: Array, keys_N: Array | None, mask_N1TT: Array | None
) -> Array:
    for layer in layers:
        h, share = f"transformer.h.{layer}", shape.residual_dropout
        y_NTE = _attention(weights, layer, shape, way, _norm(weights, f"{h}.ln_1", shape, x_NTE), keys_N, mask_N1TT)
        x_NTE = way.by_sample(x_NTE + drop(y_NTE, share, keys_N, 3 * layer + 2))
        y_NTE = _mlp(weights, f"{h}.mlp", shape, way, _norm(weights, f"{h}.ln_2", shape, x_NTE), keys_N)
        x_NTE = way.by_sample(x_NTE + drop(y_NTE, share, keys_N, 3 * layer + 3))
    return x_NTE


def _norm(weights: Weights, name: str, shape: Shape, x_NTE: Array) -> Array:
    # Only what came in is kept for backward: the rest is read faster from x than from memory of its own.
    normed: Array = jax.checkpoint(partial(_normed, shape.epsilon))(
        x_NTE, weights[f"{name}.weight"], weights[f"{name}.bias"]
    )
    return normed


def _normed(epsilon: float, x: Array, scale: Array, shift: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale + shift).astype(x.dtype)


def _linear(weights: Weights, name: str, shape: Shape, way: Way, x_NTE: Array, keys_N: Array | None) -> Array:
    """x times the matrix, which is outputs x inputs, and the bias; and what an adapter adds."""
    work = partial(jnp.einsum, "nti,oi->nto")
    y_NTE = _product(weights, f"{name}.weight", way, work, x_NTE) + weights[f"{name}.bias"]
    narrow_NTR = _narrow(weights, name, shape, way, x_NTE, keys_N)
    return y_NTE if narrow_NTR is None else y_NTE + _product(weights, name + B, way, work, narrow_NTR)


def _narrow(weights: Weights, name: str, shape: Shape, way: Way, x_NTE: Array, keys_N: Array | None) -> Array | None:
    """The inputs of an adapter's second matrix: scale drop(x) A; none where the matrix has no adapter."""
    if way.lora is None or name + A not in weights:
        return None
    seen_NTE = drop(x_NTE, way.lora.dropout, keys_N, sites_of(shape)[name])
    return _product(weights, name + A, way, partial(jnp.einsum, "nti,ri->ntr"), seen_NTE) * (
        way.lora.alpha / way.lora.rank
    )


def _product(weights: Weights, name: str, way: Way, work: Callable[[Array, Array], Array], x_NTE: Array) -> Array:
    """A product with a weight; one that lies in parts is put together for it, and once more in backward, rather than kept."""
    if way.whole is None:
        return work(x_NTE, weights[name])
    whole = partial(way.whole, name)
    product: Array = jax.checkpoint(lambda x, weight: work(x, whole(weight)))(x_NTE, weights[name])
    return product


def _attention(
    weights: Weights, layer: int, shape: Shape, way: Way, x_NTE: Array, keys_N: Array | None, mask_N1TT: Array | None
) -> Array:
    name, (N, T, E), H = f"transformer.h.{layer}.attn", x_NTE.shape, shape.heads
    bias_H3D = weights[f"{name}.c_attn.bias"].reshape(H, 3, -1)
    narrow_NTR = _narrow(weights, f"{name}.c_attn", shape, way, x_NTE, keys_N)

    def part(which: int, x_NTE: Array, weight: Array) -> Array:
        return jnp.einsum("nte,hde->nthd", x_NTE, weight.reshape(H, 3, -1, x_NTE.shape[-1])[:, which])

    def projected(which: int) -> Array:
        y_NTHD = _product(weights, f"{name}.c_attn.weight", way, partial(part, which), x_NTE) + bias_H3D[:, which]
        return (
            y_NTHD
            if narrow_NTR is None
            else y_NTHD + _product(weights, f"{name}.c_attn{B}", way, partial(part, which), narrow_NTR)
        )

    # Three products leave queries, keys and values each in one piece, as the attention kernels want them.
    q, k, v = map(projected, range(3))
    if keys_N is not None and shape.attention_dropout:
        y_NTHD = _plain(q, k, v, shape.attention_dropout, keys_N, 3 * layer + 1, mask_N1TT)
    else:
        fused = way.fused and (mask_N1TT is None or T % 2 == 0)
        kernel = "cudnn" if fused else "xla"
        y_NTHD = jax.nn.dot_product_attention(
            q, k, v, mask=mask_N1TT, is_causal=mask_N1TT is None, implementation=kernel
        )
    return _linear(weights, f"{name}.c_proj", shape, way, y_NTHD.reshape(N, T, E), keys_N)


def _plain(q: Array, k: Array, v: Array, share: float, keys_N: Array, site: int, mask_N1TT: Array | None) -> Array:
    """Attention weights written out, for dropout on them."""
    scores_NHTT = jnp.einsum("nthd,nshd->nhts", q, k) * q.shape[-1] ** -0.5
    mask = _causal(scores_NHTT.shape[-1]) if mask_N1TT is None else mask_N1TT
    scores_NHTT = jnp.where(mask, scores_NHTT, -jnp.inf).astype(jnp.float32)
    shares_NHTT = drop(jax.nn.softmax(scores_NHTT), share, keys_N, site).astype(q.dtype)
    return jnp.einsum("nhts,nshd->nthd", shares_NHTT, v)


def _mlp(weights: Weights, name: str, shape: Shape, way: Way, x_NTE: Array, keys_N: Array | None) -> Array:
    gelu = jax.checkpoint(partial(jax.nn.gelu, approximate=shape.activation == "gelu_new"))
    inner = gelu(_linear(weights, f"{name}.c_fc", shape, way, x_NTE, keys_N))
    return _linear(weights, f"{name}.c_proj", shape, way, inner, keys_N)


def _causal(length: int) -> Array:
    """Which tokens each one may look at."""
    return jnp.tril(jnp.ones((length, length), bool))


def _apart(documents_NT: Array) -> Array:
    """Which tokens each one may look at when attention stays inside its document."""
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    return (same_NTT & _causal(same_NTT.shape[1]))[:, None]


def _begins(documents_NT: Array) -> Array:
    """The place at which each token's document begins."""
    new_NT = jnp.pad(documents_NT[:, 1:] != documents_NT[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(new_NT, jnp.arange(new_NT.shape[1]), 0), axis=1)
