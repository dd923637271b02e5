"""The losses of a micro-batch in JAX: the head's cross-entropy, and that of a pair head if the net has one.

Shapes in names: N samples, T tokens, K labelled tokens of a sample, P pairs of a sample, E width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from textmill.config import TrainConfig
from textmill.engines.distillation.loss_jax import cosine_loss, distillation_loss
from textmill.engines.distillation.teachers_jax import Teachers
from textmill.engines.distillation.terms import terms_of
from textmill.engines.losses_jax import loss_and_correct, summed_loss
from textmill.engines.objective.labels import PAIR_LOSS
from textmill.errors import TextmillError
from textmill.models import Shape, find_family_module, own_options
from textmill.models.base_jax import cast_matrices
from textmill.tokens.batches.batch import IGNORED

Arrays = dict[str, Array]


class States(NamedTuple):
    """Hidden states of a micro-batch."""

    all: Array
    """[N, T, E]."""
    labelled: Array
    """[N, K, E]: those of tokens that may have a label."""
    head_input: Array
    """What the head multiplies for these."""


class Heads:
    """The heads of a family's JAX net; only net_jax.py's functions that it has are used."""

    def __init__(self, net: Any, shape: Any, options: Any, chunk: int) -> None:
        """`chunk` is how many tokens have logits at the same time."""
        self.net = net
        self.shape = shape
        self.options = options
        self.chunk = chunk
        self.few_labels = getattr(net, "FEW_LABELS", False)
        self.has_pairs = hasattr(net, "has_pair_head") and net.has_pair_head(shape)

    def training_loss(
        self,
        weights: Arrays,
        part: Arrays,
        train: TrainConfig,
        teachers: Teachers | None,
        teacher_weights: list[Arrays],
    ) -> tuple[Array, Array]:
        """The loss to minimise, and what to report: the labels' loss, and all of `term_names` behind it as [1 + terms].

        `part` are the arrays of a micro-batch.
        """
        states = self.states(weights, part)
        terms = list[Array]()
        head, bias = self.head(weights)
        head_and_labels = (states.head_input, head, part["labels"], part["weights"], bias)
        if teachers is None:
            loss = summed_loss(*head_and_labels, self.shape.vocab, self.chunk, train.label_smoothing, train.z_loss)
            label_loss = loss
        else:
            teacher_output, teacher_states = jax.lax.stop_gradient(teachers.read(teacher_weights, part))
            chunk = min(self.chunk, teachers.chunk)
            loss, sums = distillation_loss(*head_and_labels, teacher_output, self.shape.vocab, chunk, terms_of(train))
            label_loss = sums[0]
            kl = sums[1]
            mse = sums[2]
            by_name = {"kl": kl, "mse": mse}
            if train.distil.cosine:
                by_name["cosine"] = cosine_loss(states.labelled, teacher_states, part["weights"])
                loss += train.distil.cosine * by_name["cosine"]
            terms = [by_name[name] for name in train.distil.terms]
        if self.has_pairs:
            pair_loss = (self._pair_losses(weights, part, states.all)[0] * part["pair_weights"]).sum()
            loss = loss + pair_loss
            terms = [pair_loss, *terms]
        return loss, jnp.stack([label_loss, *terms]) if terms else label_loss

    def term_names(self, train: TrainConfig) -> list[str]:
        """The names of what `training_loss` reports behind the labels' loss."""
        return [*([PAIR_LOSS] if self.has_pairs else []), *(f"distil_{name}" for name in train.distil.terms)]

    def cast_matrices(self, weights: Arrays) -> Arrays:
        """The weights with matrices in the precision of the matmuls."""
        return cast_matrices(weights, self.net.MATRICES, self.options.precision)

    def sums(self, weights: Arrays, part: Arrays) -> list[Array]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        narrow = self.cast_matrices(weights)
        states = self.states(narrow, part)
        head, bias = self.head(weights)
        losses, correct = loss_and_correct(states.head_input, head, part["labels"], self.shape.vocab, self.chunk, bias)
        found = [losses.sum(), correct.sum()]
        pairs = self._pair_losses(narrow, part, states.all) if self.has_pairs else ()
        return [*found, *(one.sum() for one in pairs)]

    def states(self, weights: Arrays, part: Arrays) -> States:
        """The hidden states of a micro-batch."""
        types = [part["types"]] if "types" in part else []
        keys = part.get("keys")
        documents = part.get("documents")
        x_NTE = self.net.states(weights, self.shape, self.options, part["inputs"], keys, documents, *types)
        x_NKE = jnp.take_along_axis(x_NTE, part["positions"][..., None], 1) if self.few_labels else x_NTE
        head_input = x_NKE
        if hasattr(self.net, "head_input"):
            head_input = self.net.head_input(weights, self.shape, self.options, x_NKE)
        return States(x_NTE, x_NKE, head_input)

    def _pair_losses(self, weights: Arrays, part: Arrays, x_NTE: Array) -> tuple[Array, Array]:
        """The loss of each pair, 0 without a label, and whether its label has the higher logit."""
        x_NPE = jnp.take_along_axis(x_NTE, part["pair_positions"][..., None], 1)
        logits = self.net.pair_logits(weights, self.shape, self.options, x_NPE).astype(jnp.float32)
        labels = part["pair_labels"]
        labelled = labels != IGNORED
        chosen = jnp.take_along_axis(logits, jnp.where(labelled, labels, 0)[..., None], -1)[..., 0]
        losses = jnp.where(labelled, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
        return losses, logits.argmax(-1) == labels

    def head(self, weights: Arrays) -> tuple[Array, Array | None]:
        """The head's matrix and its bias, gathered from the devices that divide them."""
        gather = self.options.gathered or (lambda _, values: values)
        name = self.net.head_name(self.shape)
        bias = getattr(self.net, "HEAD_BIAS", None)
        return gather(name, weights[name]), None if bias is None else gather(bias, weights[bias])


def open_jax_net(shape: Shape) -> Any:
    """The module of the family's JAX net: models/FAMILY/net_jax.py with head_name, NetOptions, MATRICES and states."""
    module = find_family_module(shape, "net_jax")
    if module is None:
        options = ", ".join(own_options(shape))
        name = f"{shape.family} with {options}" if options else shape.family
        raise TextmillError(f"engine.kind: the family {name} has no JAX net; set engine.kind=torch")
    return module


def open_teacher_heads(chunk: int, shape: Shape, options: Any) -> Heads:
    """The heads of a teacher's net."""
    return Heads(open_jax_net(shape), shape, options, chunk)
