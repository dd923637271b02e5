"""Teachers in JAX: frozen nets that every device has in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from textmill.checkpoints.adapters import read_weights
from textmill.config import TrainConfig
from textmill.engines.distillation.folders import teacher_folder
from textmill.engines.distillation.sizes import chunk_tokens
from textmill.engines.distillation.terms import check_teacher, check_top_k
from textmill.engines.mesh_jax import Shardings
from textmill.models import Shape, read_shape, weights_of
from textmill.models.memory_layout import lay_out_weights

Arrays = dict[str, Array]


class Teachers:
    """The teachers of a run: how to run them, and their weights, which a step takes as an argument."""

    def __init__(
        self, train: TrainConfig, shape: Shape, options: Any, shardings: Shardings, open_heads: Callable[..., Any]
    ) -> None:
        """`open_heads` builds the heads of a net, from its shape and options."""
        distil = train.distil
        check_top_k(distil, shape)
        self.heads: list[Any] = []
        self.weights: list[Arrays] = []
        self.rows = shape.padded_vocab
        self.chunk = chunk_tokens(shape.vocab, compiled=True) * shardings.data_devices
        """Most tokens of a chunk of the loss on all devices: it has several matrices of logits."""
        for name in [] if distil.cache else distil.teachers:
            folder = teacher_folder(name)
            teacher = read_shape(folder)
            check_teacher(name, teacher, shape, train)
            head_width = getattr(teacher, "head_width", teacher.width // teacher.heads)
            fused = options.fused and head_width % 8 == 0 and head_width <= 128
            heads = open_heads(teacher, replace(options, lora=None, recompute=0, gathered=None, fused=fused))
            self.heads.append(heads)
            weights = heads.cast_matrices(_read(teacher, folder))
            self.weights.append({name: shardings.replicate(np.asarray(values)) for name, values in weights.items()})

    def read(self, weights: list[Arrays], part: Arrays) -> tuple[dict[str, Any], list[Array]]:
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


def _read(shape: Shape, folder: Path) -> Arrays:
    laid = lay_out_weights(weights_of(shape), shape, read_weights(folder), str(folder))
    return {weight.name: jnp.asarray(values) for weight, values in laid}
