"""The head and its cross-entropy in JAX, computed in chunks of tokens, so that all logits never exist at once.

Shapes in names: N samples, T tokens, E width, V padded vocabulary. The gradient is computed in forward, while a chunk's
logits exist. A chunk has some tokens of every sample, so that devices that divide the samples all work on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from textmill.engines.losses_torch import CPU_LOGITS, GPU_TOKENS
from textmill.tokens.batches.batch import IGNORED


def token_weights(labels: Array, loss: str) -> tuple[Array, Array]:
    """The weight of each token's loss, so that their sum is the step's loss; and the loss tokens on all devices."""
    labelled = labels != IGNORED
    counts = labelled.sum(-1, keepdims=True)
    total = labelled.sum()
    divisor = (
        jnp.maximum(counts, 1) * jnp.maximum((counts > 0).sum(), 1) if loss == "sample_mean" else jnp.maximum(total, 1)
    )
    return labelled / divisor.astype(jnp.float32), total


def chunk_tokens(platform: str, vocab: int) -> int:
    """Tokens of a chunk on one device."""
    return max(1, CPU_LOGITS // vocab) if platform == "cpu" else GPU_TOKENS


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def summed_loss(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    weights_NT: Array,
    bias_V: Array | None,
    vocab: int,
    tokens: int,
    smoothing: float = 0.0,
) -> Array:
    """The weighted sum of the labelled tokens' losses, in chunks of `tokens`; head rows from `vocab` on are padding."""
    return _forward(x_NTE, head_VE, labels_NT, weights_NT, bias_V, vocab, tokens, smoothing)[0]


def _forward(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    weights_NT: Array,
    bias_V: Array | None,
    vocab: int,
    tokens: int,
    smoothing: float,
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    head = head_VE.astype(x_NTE.dtype)

    def compute(sums: tuple[Any, ...], chunk: tuple[Array, ...]) -> tuple[tuple[Any, ...], Array]:
        x, labels, weights = chunk
        logits_NTV = add_bias(jnp.einsum("nte,ve->ntv", x, head), bias_V)
        losses, grad_NTV = _loss_and_gradient(logits_NTV, labels, weights, vocab, smoothing)
        grad_head = jnp.einsum("ntv,nte->ve", grad_NTV, x, preferred_element_type=head_VE.dtype)
        grad_bias = None if bias_V is None else sums[2] + grad_NTV.sum((0, 1), dtype=bias_V.dtype)
        total = sums[0] + (losses * weights).sum()
        return (total, sums[1] + grad_head, grad_bias), jnp.einsum("ntv,ve->nte", grad_NTV, head)

    zeros = (jnp.zeros(()), jnp.zeros_like(head_VE), None if bias_V is None else jnp.zeros_like(bias_V))
    (loss, grad_head, grad_bias), grad_x = by_chunks(compute, zeros, (x_NTE, labels_NT, weights_NT), tokens)
    return loss, (grad_x, grad_head, grad_bias)


def add_bias(logits_NTV: Array, bias_V: Array | None) -> Array:
    """Add the head's bias, if it has one."""
    return logits_NTV if bias_V is None else logits_NTV + bias_V.astype(logits_NTV.dtype)


def _backward(
    vocab: int, tokens: int, smoothing: float, gradients: tuple[Array, Array, Array | None], gradient: Array
) -> tuple[Array | None, ...]:
    grad_x, grad_head, grad_bias = gradients
    bias = None if grad_bias is None else grad_bias * gradient
    return (grad_x * gradient).astype(grad_x.dtype), grad_head * gradient, None, None, bias


summed_loss.defvjp(_forward, _backward)


def loss_and_correct(
    x_NTE: Array, head_VE: Array, labels_NT: Array, vocab: int, tokens: int, bias_V: Array | None = None
) -> tuple[Array, Array]:
    """For each sample: the sum of its labelled tokens' losses, and how many labels have the highest logit."""
    head = head_VE.astype(x_NTE.dtype)

    def compute(sums: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        x, labels = chunk
        logits = add_bias(jnp.einsum("nte,ve->ntv", x, head), bias_V).astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)
        losses = jax.nn.logsumexp(logits, axis=-1) - label_logits(logits, labels)
        labelled = labels != IGNORED
        correct = logits.argmax(-1) == labels
        return (sums[0] + jnp.where(labelled, losses, 0).sum(1), sums[1] + (labelled & correct).sum(1)), None

    zeros = (jnp.zeros(len(x_NTE)), jnp.zeros(len(x_NTE), jnp.int32))
    return by_chunks(compute, zeros, (x_NTE, labels_NT), tokens)[0]  # type: ignore[no-any-return]


def by_chunks(compute: Callable[..., Any], sums: Any, arrays: tuple[Array, ...], tokens: int) -> Any:
    """Call `compute` on chunks of at most so many tokens; return the sums, and the chunks' results concatenated."""
    N, T = arrays[0].shape[:2]
    count = -(-T // max(1, tokens // N))
    if count == 1:
        return compute(sums, arrays)
    length = -(-T // count)
    padded = [_pad_tokens(array, count * length - T) for array in arrays]
    chunks = tuple(jnp.moveaxis(array.reshape(N, count, length, *array.shape[2:]), 1, 0) for array in padded)
    sums, results = jax.lax.scan(compute, sums, chunks)
    if results is None:
        return sums, None
    return sums, jnp.moveaxis(results, 0, 1).reshape(N, count * length, *results.shape[3:])[:, :T]


def _pad_tokens(array: Array, count: int) -> Array:
    """Append tokens without labels."""
    return jnp.pad(
        array,
        [(0, 0), (0, count), *[(0, 0)] * (array.ndim - 2)],
        constant_values=IGNORED if array.dtype == jnp.int32 else 0,
    )


def _loss_and_gradient(
    logits_NTV: Array, labels_NT: Array, weights_NT: Array, vocab: int, smoothing: float
) -> tuple[Array, Array]:
    """The loss of each token, and the gradient of their weighted sum in the precision of the logits."""
    real = jnp.arange(logits_NTV.shape[-1]) < vocab
    logits = jnp.where(real, logits_NTV.astype(jnp.float32), -jnp.inf)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    losses = log_sum - (1 - smoothing) * label_logits(logits, labels_NT)
    if smoothing:
        losses -= smoothing * jnp.where(real, logits, 0).sum(-1) / vocab
    labelled = labels_NT != IGNORED
    weights = jnp.where(labelled, weights_NT, 0)[..., None]
    gradients = jnp.exp(logits - log_sum[..., None]) * weights
    if smoothing:
        gradients -= jnp.where(real, weights * (smoothing / vocab), 0)
    gradients -= jnp.where(_is_label(logits, labels_NT), (1 - smoothing) * weights, 0)
    return jnp.where(labelled, losses, 0), gradients.astype(logits_NTV.dtype)


def label_logits(logits_NTV: Array, labels_NT: Array) -> Array:
    """Each label's logit; by comparison, since indexing would gather a vocabulary that devices divide."""
    return jnp.where(_is_label(logits_NTV, labels_NT), logits_NTV, 0).sum(-1)


def _is_label(logits_NTV: Array, labels_NT: Array) -> Array:
    return jnp.arange(logits_NTV.shape[-1], dtype=labels_NT.dtype) == labels_NT[..., None]
