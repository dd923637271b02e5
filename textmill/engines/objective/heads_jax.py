"""The losses of a micro-batch in JAX: the head's cross-entropy, and that of a pair head if the net has one.

Shapes in names: N samples, T tokens, K labelled tokens of a sample, P pairs of a sample, E width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from textmill.config import TrainConfig
from textmill.engines.losses_jax import loss_and_correct, summed_loss
from textmill.tokens.batches.batch import IGNORED

Arrays = dict[str, Array]


class Heads:
    """The heads of a family's JAX net; only net_jax.py's functions that it has are used."""

    def __init__(self, net: Any, shape: Any, options: Any, chunk: int) -> None:
        """`chunk` is how many tokens have logits at the same time."""
        self.net, self.shape, self.options, self.chunk = net, shape, options, chunk
        self.few_labels = getattr(net, "FEW_LABELS", False)
        self.has_pairs = hasattr(net, "has_pair_head") and net.has_pair_head(shape)

    def training_loss(self, weights: Arrays, part: Arrays, train: TrainConfig) -> tuple[Array, Array]:
        """The loss to minimise, and the losses to report: the head's, or both heads' as [2]."""
        x_NTE, x_NKE = self._states(weights, part)
        head, bias = self._head(weights)
        given = (x_NKE, head, part["labels"], part["weights"], bias, self.shape.vocab, self.chunk)
        loss = summed_loss(*given, train.label_smoothing, train.z_loss)
        if not self.has_pairs:
            return loss, loss
        pair = (self._pair_losses(weights, part, x_NTE)[0] * part["pair_weights"]).sum()
        return loss + pair, jnp.stack([loss, pair])

    def sums(self, weights: Arrays, part: Arrays) -> list[Array]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        narrow = self.net.cast_matrices(weights, self.options.precision)
        x_NTE, x_NKE = self._states(narrow, part)
        head, bias = self._head(weights)
        losses, correct = loss_and_correct(x_NKE, head, part["labels"], self.shape.vocab, self.chunk, bias)
        found = [losses.sum(), correct.sum()]
        return [*found, *(one.sum() for one in self._pair_losses(narrow, part, x_NTE))] if self.has_pairs else found

    def _states(self, weights: Arrays, part: Arrays) -> tuple[Array, Array]:
        """Hidden states of all tokens, and what the head multiplies."""
        types = [part["types"]] if "types" in part else []
        keys, documents = part.get("keys"), part.get("documents")
        x_NTE = self.net.states(weights, self.shape, self.options, part["inputs"], keys, documents, *types)
        x_NKE = jnp.take_along_axis(x_NTE, part["positions"][..., None], 1) if self.few_labels else x_NTE
        if hasattr(self.net, "head_input"):
            x_NKE = self.net.head_input(weights, self.shape, self.options, x_NKE)
        return x_NTE, x_NKE

    def _pair_losses(self, weights: Arrays, part: Arrays, x_NTE: Array) -> tuple[Array, Array]:
        """The loss of each pair, 0 without a label, and whether its label has the higher logit."""
        x_NPE = jnp.take_along_axis(x_NTE, part["pair_positions"][..., None], 1)
        logits = self.net.pair_logits(weights, self.shape, self.options, x_NPE).astype(jnp.float32)
        labels = part["pair_labels"]
        labelled = labels != IGNORED
        chosen = jnp.take_along_axis(logits, jnp.where(labelled, labels, 0)[..., None], -1)[..., 0]
        losses = jnp.where(labelled, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
        return losses, logits.argmax(-1) == labels

    def _head(self, weights: Arrays) -> tuple[Array, Array | None]:
        """The head's matrix and its bias, gathered from the devices that divide them."""
        gather = self.options.gathered or (lambda _, values: values)
        name, bias = self.net.head_name(self.shape), getattr(self.net, "HEAD_BIAS", None)
        return gather(name, weights[name]), None if bias is None else gather(bias, weights[bias])
