"""Distillation in JAX: the terms that compare logits, in chunks of tokens with their gradient computed in forward, and
the teachers, frozen nets that every device has in full.

Shapes in names: N samples, T tokens, E width, V padded vocabulary, K most likely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from textmill.checkpoints.adapters import read_weights
from textmill.config import TrainConfig
from textmill.engines.distillation.teachers import Terms, check_teacher, check_top_k, chunk_tokens, teacher_folder
from textmill.engines.losses_jax import add_bias, by_chunks, label_logits
from textmill.engines.mesh_jax import Shardings
from textmill.models import Shape, lay_out_weights, read_shape, weights_of
from textmill.tokens.batches.batch import IGNORED

LOW = -1e30
"""The logit of a padding row: its probability is 0, and differences of two stay finite."""


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def distillation_loss(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    weights_NT: Array,
    bias_V: Array | None,
    teacher_output: dict[str, Any],
    vocab: int,
    tokens: int,
    terms: Terms,
) -> tuple[Array, Array]:
    """The weighted sum of all terms; and the labels' losses, the divergence and the squared difference, unweighted.

    `teacher_output` has `top`, the teachers' most likely tokens and their log-probabilities, or `x` and `heads`, what
    gives the logits of each teacher, with as many rows as the model's head.
    """
    return _forward(x_NTE, head_VE, labels_NT, weights_NT, bias_V, teacher_output, vocab, tokens, terms)[0]


def _forward(
    x_NTE: Array,
    head_VE: Array,
    labels_NT: Array,
    weights_NT: Array,
    bias_V: Array | None,
    teacher_output: dict[str, Any],
    vocab: int,
    tokens: int,
    terms: Terms,
) -> tuple[tuple[Array, Array], Any]:
    head = head_VE.astype(x_NTE.dtype)
    heads = teacher_output.get("heads", [])

    def compute(sums: tuple[Any, ...], chunk: tuple[Array, ...]) -> tuple[tuple[Any, ...], Array]:
        x, labels, weights, *of_teachers = chunk
        logits_NTV = add_bias(jnp.einsum("nte,ve->ntv", x, head), bias_V)
        teachers: list[Array] = []
        top = (of_teachers[0], of_teachers[1]) if "top" in teacher_output else None
        for x_teacher, (teacher_head, teacher_bias) in zip(of_teachers, heads, strict=not top):
            logits = jnp.einsum("nte,ve->ntv", x_teacher, teacher_head.astype(x_teacher.dtype))
            teachers.append(_masked(add_bias(logits, teacher_bias), vocab))
        loss_of_logits = partial(_chunk_loss, teachers, top, labels, weights, vocab, terms)
        (loss, term_sums), grad_NTV = jax.value_and_grad(loss_of_logits, has_aux=True)(logits_NTV)
        grad_head = jnp.einsum("ntv,nte->ve", grad_NTV, x, preferred_element_type=head_VE.dtype)
        grad_bias = None if bias_V is None else sums[3] + grad_NTV.sum((0, 1), dtype=bias_V.dtype)
        grad_x = jnp.einsum("ntv,ve->nte", grad_NTV, head)
        return (sums[0] + loss, sums[1] + term_sums, sums[2] + grad_head, grad_bias), grad_x

    no_bias = None if bias_V is None else jnp.zeros_like(bias_V)
    zeros = (jnp.zeros(()), jnp.zeros(3), jnp.zeros_like(head_VE), no_bias)
    arrays = (
        x_NTE,
        labels_NT,
        weights_NT,
        *(teacher_output["top"] if "top" in teacher_output else teacher_output["x"]),
    )
    (loss, term_sums, grad_head, grad_bias), grad_x = by_chunks(compute, zeros, arrays, tokens)
    return (loss, term_sums), (grad_x, grad_head, grad_bias)


def _backward(vocab: int, tokens: int, terms: Terms, saved: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """`saved` are the gradients that forward computed; only the loss, and not the sums to report, has a gradient."""
    grad_x, grad_head, grad_bias = saved
    grad_loss, _ = gradients
    bias = None if grad_bias is None else grad_bias * grad_loss
    return (grad_x * grad_loss).astype(grad_x.dtype), grad_head * grad_loss, None, None, bias, None


distillation_loss.defvjp(_forward, _backward)


def cosine_loss(student_NTE: Array, teachers: list[Array], weights_NT: Array) -> Array:
    """The weighted sum of 1 - cosine between hidden states, the mean over the teachers."""
    student = student_NTE.astype(jnp.float32)
    cosines = []
    for teacher_NTE in teachers:
        teacher = teacher_NTE.astype(jnp.float32)
        norms = jnp.linalg.norm(student, axis=-1) * jnp.linalg.norm(teacher, axis=-1)
        cosines.append((student * teacher).sum(-1) / jnp.maximum(norms, 1e-8))
    return ((1 - jnp.stack(cosines).mean(0)) * weights_NT).sum()


def _masked(logits_NTV: Array, vocab: int) -> Array:
    """The logits in fp32, padding rows with probability 0."""
    return jnp.where(jnp.arange(logits_NTV.shape[-1]) < vocab, logits_NTV.astype(jnp.float32), LOW)


def _chunk_loss(
    teachers: list[Array],
    top: tuple[Array, Array] | None,
    labels_NT: Array,
    weights_NT: Array,
    vocab: int,
    terms: Terms,
    logits_NTV: Array,
) -> tuple[Array, Array]:
    """The weighted sum of the terms of a chunk, and each without its weight."""
    real = jnp.arange(logits_NTV.shape[-1]) < vocab
    student = _masked(logits_NTV, vocab)
    log_sum = jax.nn.logsumexp(student, axis=-1)
    losses = log_sum - (1 - terms.smoothing) * label_logits(student, labels_NT) + terms.z * jnp.square(log_sum)
    losses -= terms.smoothing * jnp.where(real, student, 0).sum(-1) / vocab
    losses = jnp.where(labels_NT != IGNORED, losses, 0)
    divergence = square = jnp.zeros_like(losses)
    if terms.kl:
        student_logs = jax.nn.log_softmax(student / terms.temperature, axis=-1)
        if top is None:
            teacher_logs = _mean_log(teachers, terms.temperature)
            top = _top_of(teacher_logs, terms.top_k) if terms.top_k else None
        if top is not None:
            ids_NTK, teacher_logs = top
            student_logs = _outcomes(student_logs, ids_NTK)
        divergence = _divergence(student_logs, teacher_logs, terms.divergence) * terms.temperature**2
    if terms.mse:
        square = jnp.where(real, jnp.square(student - jnp.stack(teachers).mean(0)), 0).sum(-1)
    sums = jnp.stack([(values * weights_NT).sum() for values in (losses, divergence, square)])
    return terms.labels * sums[0] + terms.kl * sums[1] + terms.mse * sums[2], sums


def _mean_log(teachers: list[Array], temperature: float) -> Array:
    """The log of the mean of the teachers' distributions."""
    logs = jnp.stack([jax.nn.log_softmax(logits / temperature, axis=-1) for logits in teachers])
    return jax.nn.logsumexp(logs, axis=0) - math.log(len(teachers))


def _top_of(logs_NTV: Array, count: int) -> tuple[Array, Array]:
    """The most likely tokens, and their log-probabilities with that of all others."""
    _, ids_NTK = jax.lax.top_k(logs_NTV, count)
    return ids_NTK, _outcomes(logs_NTV, ids_NTK)


def _outcomes(logs_NTV: Array, ids_NTK: Array) -> Array:
    """The log-probabilities of these tokens, then that of all others: [N, T, K + 1]."""
    ids_NTK = jnp.maximum(ids_NTK, 0)  # tokens that fill up a chunk have none
    chosen = jnp.take_along_axis(logs_NTV, ids_NTK, -1)
    others = jnp.put_along_axis(logs_NTV, ids_NTK, LOW, -1, inplace=False)
    return jnp.concatenate([chosen, jax.nn.logsumexp(others, axis=-1, keepdims=True)], -1)


def _divergence(student_logs: Array, teacher_logs: Array, kind: str) -> Array:
    """The divergence of two log-distributions."""
    student = jnp.exp(student_logs)
    teacher = jnp.exp(teacher_logs)
    if kind == "forward":
        return (teacher * (teacher_logs - student_logs)).sum(-1)
    if kind == "reverse":
        return (student * (student_logs - teacher_logs)).sum(-1)
    mean_logs = jnp.logaddexp(teacher_logs, student_logs) - math.log(2)
    return (teacher * (teacher_logs - mean_logs) + student * (student_logs - mean_logs)).sum(-1) / 2


class Teachers:
    """The teachers of a run: how to run them, and their weights, which a step takes as an argument."""

    def __init__(
        self, train: TrainConfig, shape: Shape, options: Any, shardings: Shardings, new_heads: Callable[..., Any]
    ) -> None:
        """`new_heads` builds the heads of a net, from its shape and options."""
        distil = train.distil
        check_top_k(distil, shape)
        self.heads: list[Any] = []
        self.weights: list[dict[str, Array]] = []
        self.rows = shape.padded_vocab
        self.chunk = chunk_tokens(shape.vocab, compiled=True) * shardings.data_devices
        """Most tokens of a chunk of the loss on all devices: it has several matrices of logits."""
        for name in [] if distil.cache else distil.teachers:
            folder = teacher_folder(name)
            teacher = read_shape(folder)
            check_teacher(name, teacher, shape, train)
            head_width = getattr(teacher, "head_width", teacher.width // teacher.heads)
            fused = options.fused and head_width % 8 == 0 and head_width <= 128
            heads = new_heads(
                teacher, replace(options, lora=None, activation_checkpointing=0, gathered=None, fused=fused)
            )
            self.heads.append(heads)
            weights = heads.cast_matrices(_read_teacher(teacher, folder))
            self.weights.append({name: shardings.replicate(np.asarray(values)) for name, values in weights.items()})

    def read(self, weights: list[dict[str, Array]], part: dict[str, Array]) -> tuple[dict[str, Any], list[Array]]:
        """What `distillation_loss` takes of the teachers, and their last hidden states."""
        if "teacher_ids" in part:
            return {"top": (part["teacher_ids"], part["teacher_logs"])}, []
        without_dropout = {name: values for name, values in part.items() if name != "keys"}
        head_inputs = []
        matrices = []
        last_states = []
        for heads, teacher_weights in zip(self.heads, weights, strict=True):
            states = heads.states(teacher_weights, without_dropout)
            head_inputs.append(states.head_input)
            matrices.append(self._rows(*heads.head(teacher_weights)))
            last_states.append(states.labelled)
        return {"x": head_inputs, "heads": matrices}, last_states

    def _rows(self, head_VE: Array, bias_V: Array | None) -> tuple[Array, Array | None]:
        """The head with as many rows as the model's: rows beyond both vocabularies are padding."""
        return _resize(head_VE, self.rows), None if bias_V is None else _resize(bias_V, self.rows)


def _resize(values: Array, rows: int) -> Array:
    missing = max(0, rows - len(values))
    return jnp.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)])[:rows]


def _read_teacher(shape: Shape, folder: Path) -> dict[str, Array]:
    laid = lay_out_weights(weights_of(shape), shape, read_weights(folder), str(folder))
    return {weight.name: jnp.asarray(values) for weight, values in laid}
