"""The optimizer step in JAX, and its result.

optax's AdamW for all weights, or Muon for block matrices with AdamW for the rest. Pure functions of weights and state.
The state is `count`, and `m`, `v` and `momentum` by weight name.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from textmill.config import LoraConfig, TrainConfig
from textmill.engines import Step, StepValues
from textmill.engines.optimizers.muon_torch import ADAM_SCALE, MIN_NORM
from textmill.errors import TextmillError
from textmill.models import Shape, Weight
from textmill.models.lora import weights_with_adapters
from textmill.models.parameter_groups import rules_of

State = dict[str, Any]


def new_step(loss: Array, norm: Array, loss_tokens: Array, terms: dict[str, Array], note: str | None) -> Step:
    """The result of a step from arrays on the device; reading a value waits for it."""

    def read() -> StepValues:
        named = {name: float(value) for name, value in terms.items()}
        return StepValues(float(loss), float(norm), int(loss_tokens), named)

    return Step(lambda: bool(norm.is_ready()), read, note)


def check_optimizer(train: TrainConfig) -> None:
    """Refuse an optimizer that the JAX engine does not have."""
    if train.optimizer not in ("adamw", "muon"):
        raise TextmillError(f"train.optimizer: the JAX engine has no {train.optimizer}; set engine.kind=torch")


class Optimizer:
    """The update of all weights; a non-finite gradient skips it."""

    def __init__(self, shape: Shape, train: TrainConfig, lora: LoraConfig | None, precision: Any) -> None:
        """`precision` is that of Muon's orthogonalisation."""
        self.train = train
        self.rules = rules_of(shape, train, lora)
        self.precision = precision
        trained = [weight for weight in weights_with_adapters(shape, lora) if self.rules[weight.name].trained]
        self.matrices = {weight.name: weight for weight in trained if train.optimizer == "muon" and weight.muon}
        self.rest = [weight.name for weight in trained if weight.name not in self.matrices]
        self.trained = {weight.name: math.prod(weight.shape) for weight in trained}
        self.adam = optax.scale_by_adam(train.betas[0], train.betas[1], train.epsilon)
        # Newton-Schulz only: unlike torch's Muon, optax's momentum has a bias correction.
        axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        self.orthogonal = optax.contrib.scale_by_muon(
            beta=0.0, nesterov=False, eps=MIN_NORM, weight_dimension_numbers=lambda _: axes
        )

    def kinds(self) -> dict[str, list[str]]:
        """The weights of each kind of state, by its name in a checkpoint."""
        return {"m": self.rest, "v": self.rest, **({"momentum": list(self.matrices)} if self.matrices else {})}

    def step(
        self, weights: dict[str, Array], state: State, grads: dict[str, Array], lr: Array
    ) -> tuple[dict[str, Array], State, Array]:
        """Weights and state after one update, and the gradient norm before clipping.

        Only trained weights have gradients.
        """
        grads = {name: grad.astype(jnp.float32) for name, grad in grads.items()}
        norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in grads.values()))
        if self.train.clip:
            grads = {name: grad * jnp.minimum(1.0, self.train.clip / (norm + 1e-6)) for name, grad in grads.items()}
        rest_rate = lr * self.train.muon.adamw_rate_factor if self.matrices else lr
        new, after = self._adam(weights, state, grads, rest_rate)
        if self.matrices:
            matrices, after["momentum"] = self._muon(weights, state["momentum"], grads, lr)
            new = {**new, **matrices}
        new = {name: new.get(name, values) for name, values in weights.items()}
        updated = jnp.isfinite(norm)
        return *jax.tree.map(lambda one, other: jnp.where(updated, one, other), (new, after), (weights, state)), norm

    def _adam(
        self, weights: dict[str, Array], state: State, grads: dict[str, Array], lr: Array
    ) -> tuple[dict[str, Array], State]:
        before = optax.ScaleByAdamState(state["count"], state["m"], state["v"])
        steps, adam = self.adam.update({name: grads[name] for name in self.rest}, before)
        new = {
            name: self._decayed(name, weights[name], lr) - lr * self.rules[name].rate * steps[name]
            for name in self.rest
        }
        return new, {"count": adam.count, "m": adam.mu, "v": adam.nu}

    def _decayed(self, name: str, weight: Array, lr: Array) -> Array:
        rule = self.rules[name]
        return weight * (1 - lr * rule.rate * rule.decay) if rule.decay else weight

    def _muon(
        self, weights: dict[str, Array], momenta: dict[str, Array], grads: dict[str, Array], lr: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        beta = self.train.muon.momentum
        after = {name: momenta[name] + (1 - beta) * (grads[name] - momenta[name]) for name in self.matrices}
        new = {}
        for name, weight in self.matrices.items():
            ahead = (grads[name] + beta * (after[name] - grads[name])).astype(self.precision)
            steps, scale = self._steps(weight, ahead)
            rate = lr * self.rules[name].rate * ADAM_SCALE * scale
            new[name] = self._decayed(name, weights[name], lr) - rate * steps
        return new, after

    def _steps(self, weight: Weight, ahead: Array) -> tuple[Array, Any]:
        """A weight's orthogonalised matrices, and the root of each one's longer side."""
        columns = ahead.shape[1]
        grouped = ahead.reshape(weight.groups, -1, columns)
        parts = [grouped[:, rows].reshape(-1, columns) for rows in weight.part_rows]
        equal = len({part.shape for part in parts}) == 1
        steps: list[Array] = []
        for batch in [jnp.stack(parts)] if equal else [part[None] for part in parts]:
            orthogonal, _ = self.orthogonal.update(batch, self.orthogonal.init(batch))
            steps += list(orthogonal.astype(jnp.float32))
        sides = [math.sqrt(max(part.shape)) for part in parts]
        group_rows = [rows.stop - rows.start for rows in weight.part_rows]
        by_row = np.tile(np.repeat(np.array(sides, np.float32), group_rows), weight.groups)
        scale = sides[0] if equal else by_row[:, None]
        joined = jnp.concatenate([step.reshape(weight.groups, -1, columns) for step in steps], axis=1)
        return joined.reshape(ahead.shape), scale
