"""What a model family offers: Shape (the numbers of a net) and Family (functions over a shape)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from textmill.config import ModelConfig
from textmill.models.hf_config import pad_vocab
from textmill.models.weights import Weight, count_flops, count_parameters


@dataclass(frozen=True)
class Shape:
    """Every number that a net is built from; a run resumes only if they are unchanged. These are what every net has: a
    family's Shape extends it with its own numbers, its name, and the list of its weights."""

    layers: int
    heads: int
    """Attention heads (of queries)."""
    width: int
    """Channels of the residual stream."""
    inner: int
    positions: int
    """The longest context in tokens."""
    vocab: int
    """Vocabulary size without padding."""
    eos_id: int
    """The end-of-text token; of a BERT, the token after each segment, [SEP]."""

    @property
    def family(self) -> str:
        """The NAME of its family."""
        raise NotImplementedError

    @property
    def attention_dropout(self) -> float:
        """Dropout rate of attention weights; above 0 they must be kept for the backward pass."""
        return 0.0

    def weights(self) -> list[Weight]:
        """Every weight of the net."""
        raise NotImplementedError

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.width

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding in memory."""
        return pad_vocab(self.vocab)

    @property
    def parameters(self) -> int:
        """The number of parameters in a checkpoint."""
        return count_parameters(self.weights())

    @property
    def uses_dropout(self) -> bool:
        """True if training uses dropout anywhere."""
        return any(getattr(self, name) for name in self._dropouts())

    def with_dropout(self, fraction: float) -> Self:
        """The same shape with this dropout rate everywhere."""
        rates: dict[str, Any] = dict.fromkeys(self._dropouts(), fraction)
        return replace(self, **rates)

    def flops_per_token(self, length: int, trained: Iterable[Weight] | None = None) -> float:
        """FLOPs of the forward and backward pass for one token of a sample of this length."""
        return count_flops(self.weights(), self.layers, self.attention_width, length, trained)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Sizes that the tensor-parallel ranks must divide, by the key under `model.shape`."""
        return {"heads": self.heads, "inner": self.inner}

    def _dropouts(self) -> list[str]:
        """The fields with dropout rates."""
        return [field.name for field in fields(self) if field.name.endswith("dropout")]


class Family(Protocol):
    """A model family: models/NAME/family.py in the package, or the user's own file.

    Its torch net is the class `Net` (a `textmill.models.base_torch.BaseNet`) in models/NAME/net_torch.py, or in the
    user's file. A family in the package may add net_jax.py (for `engine.kind: jax`) and decode_torch.py (faster
    decoding).
    """

    NAME: str
    """The family's name: its folder, or in a file of your own also the model_type of config.json."""
    OBJECTIVE: str
    """What the net is trained for: next_token or masked; only next_token models generate text."""
    BATCH_FIELDS: frozenset[str]
    """Optional fields of a Batch that the net or its loss uses: documents, types, pair_labels."""

    def shape_of(self, config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
        """The shape of the `model` section; `length` limits the positions unless `model.shape.positions` is set."""
        ...

    def shape_of_hf(self, hf: dict[str, Any], where: str) -> Shape:
        """The shape in a config.json; an unsupported setting is an error that names it."""
        ...

    def hf_config_of(self, shape: Any) -> dict[str, Any]:
        """The config.json of a checkpoint."""
        ...

    def known_weights(
        self, named: Iterable[tuple[str, NDArray[np.float32]]]
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The weights of any checkpoint of this family, named as in `Shape.weights`, without those it does not need."""
        ...

    def small_shape(self, shape: Any, tensor: int) -> dict[str, Any]:
        """Keys of `model.shape` for a tiny net of the same kind, for `verify`; `tensor` ranks can divide its sizes."""
        ...
