"""The head and its cross-entropy in one, in JAX: by pieces of a batch, so that its logits are never held.

Shapes in names: N samples, T tokens, E width, V padded vocabulary. The gradient is made with the loss, while a piece's logits are at
hand. Pieces are stretches of every sample, so that devices that share out the samples work on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from textmill.tokens.batches.batch import IGNORED

CPU_SCORES = 1 << 24
"""Logits at a time on a CPU."""
GPU_ROWS = 32768
"""Tokens at a time on an accelerator: enough to fill it."""


def token_weights(labels: Array, loss: str) -> tuple[Array, Array]:
    """What each token's loss counts for, so that summing gives the step's loss; and how many tokens are asked for, over all devices."""
    asked = labels != IGNORED
    counts, total = asked.sum(-1, keepdims=True), asked.sum()
    whole = (
        jnp.maximum(counts, 1) * jnp.maximum((counts > 0).sum(), 1) if loss == "sample_mean" else jnp.maximum(total, 1)
    )
    return asked / whole.astype(jnp.float32), total


def tokens_at_once(platform: str, vocab: int) -> int:
    """Tokens whose logits are there at a time."""
    return max(1, CPU_SCORES // vocab) if platform == "cpu" else GPU_ROWS


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def summed_loss(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    shares_NT: Array,
    vocab: int,
    tokens: int,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> Array:
    """The sum of each asked token's loss times its share; rows of the head from `vocab` on have no part; `tokens` at a time."""
    return _forward(x_NTE, head_VE, labels_NT, shares_NT, vocab, tokens, smoothing, z)[0]


def _forward(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    shares_NT: Array,
    vocab: int,
    tokens: int,
    smoothing: float,
    z: float,
) -> tuple[Array, tuple[Array, Array]]:
    head = head_VE.astype(x_NTE.dtype)

    def work(sums: tuple[Array, Array], piece: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        x, labels, shares = piece
        losses, slopes_NTV = _grade(jnp.einsum("nte,ve->ntv", x, head), labels, shares, vocab, smoothing, z)
        slope_head = jnp.einsum("ntv,nte->ve", slopes_NTV, x, preferred_element_type=head_VE.dtype)
        return (sums[0] + (losses * shares).sum(), sums[1] + slope_head), jnp.einsum("ntv,ve->nte", slopes_NTV, head)

    nothing = (jnp.zeros(()), jnp.zeros_like(head_VE))
    (loss, slope_head), slope_x = _by_pieces(work, nothing, (x_NTE, labels_NT, shares_NT), tokens)
    return loss, (slope_x, slope_head)


def _backward(
    vocab: int, tokens: int, smoothing: float, z: float, slopes: tuple[Array, Array], slope: Array
) -> tuple[Array | None, ...]:
    slope_x, slope_head = slopes
    return (slope_x * slope).astype(slope_x.dtype), slope_head * slope, None, None


summed_loss.defvjp(_forward, _backward)


def scored(x_NTE: Array, head_VE: Array, labels_NT: Array, vocab: int, tokens: int) -> tuple[Array, Array]:
    """The loss of each sample, summed over its asked tokens, and how many of those have the highest score."""
    head = head_VE.astype(x_NTE.dtype)

    def work(sums: tuple[Array, Array], piece: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        x, labels = piece
        scores = jnp.einsum("nte,ve->ntv", x, head).astype(jnp.float32)
        scores = jnp.where(jnp.arange(scores.shape[-1]) < vocab, scores, -jnp.inf)
        losses = jax.nn.logsumexp(scores, axis=-1) - _picked(scores, labels)
        asked, right = labels != IGNORED, scores.argmax(-1) == labels
        return (sums[0] + jnp.where(asked, losses, 0).sum(1), sums[1] + (asked & right).sum(1)), None

    nothing = (jnp.zeros(len(x_NTE)), jnp.zeros(len(x_NTE), jnp.int32))
    return _by_pieces(work, nothing, (x_NTE, labels_NT), tokens)[0]  # type: ignore[no-any-return]


def _by_pieces(work: Callable[..., Any], sums: Any, arrays: tuple[Array, ...], tokens: int) -> Any:
    """Do the work on stretches of at most so many tokens; return the sums, and what came of each stretch side by side."""
    N, T = arrays[0].shape[:2]
    count = -(-T // max(1, tokens // N))
    if count == 1:
        return work(sums, arrays)
    long = -(-T // count)
    filled = [_filled(array, count * long - T) for array in arrays]
    stretches = tuple(jnp.moveaxis(array.reshape(N, count, long, *array.shape[2:]), 1, 0) for array in filled)
    sums, results = jax.lax.scan(work, sums, stretches)
    if results is None:
        return sums, None
    return sums, jnp.moveaxis(results, 0, 1).reshape(N, count * long, *results.shape[3:])[:, :T]


def _filled(array: Array, more: int) -> Array:
    """So many tokens more, which ask for nothing."""
    return jnp.pad(
        array,
        [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)],
        constant_values=IGNORED if array.dtype == jnp.int32 else 0,
    )


def _grade(
    logits_NTV: Array, labels_NT: Array, shares_NT: Array, vocab: int, smoothing: float, z: float
) -> tuple[Array, Array]:
    """The loss of each token, and the gradient of their sum by shares in the precision of the logits."""
    real = jnp.arange(logits_NTV.shape[-1]) < vocab
    scores = jnp.where(real, logits_NTV.astype(jnp.float32), -jnp.inf)
    spread = jax.nn.logsumexp(scores, axis=-1)
    losses = spread - (1 - smoothing) * _picked(scores, labels_NT) + z * jnp.square(spread)
    if smoothing:
        losses -= smoothing * jnp.where(real, scores, 0).sum(-1) / vocab
    asked = labels_NT != IGNORED
    share = jnp.where(asked, shares_NT, 0)[..., None]
    slopes = jnp.exp(scores - spread[..., None]) * (share * (1 + 2 * z * spread[..., None]))
    if smoothing:
        slopes -= jnp.where(real, share * (smoothing / vocab), 0)
    slopes -= jnp.where(_is_label(scores, labels_NT), (1 - smoothing) * share, 0)
    return jnp.where(asked, losses, 0), slopes.astype(logits_NTV.dtype)


def _picked(scores_NTV: Array, labels_NT: Array) -> Array:
    """The label's score; by comparing, since a vocabulary that devices share has no single place to look it up."""
    return jnp.where(_is_label(scores_NTV, labels_NT), scores_NTV, 0).sum(-1)


def _is_label(scores_NTV: Array, labels_NT: Array) -> Array:
    return jnp.arange(scores_NTV.shape[-1], dtype=labels_NT.dtype) == labels_NT[..., None]
