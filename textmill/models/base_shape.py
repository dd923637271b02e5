"""What the shapes of all families in the package share: the numbers that every net has, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from textmill.models.hf_config import pad_vocab
from textmill.models.weights import Weight, count_flops, count_parameters


@dataclass(frozen=True)
class BaseShape:
    """The numbers that every net has. A family's Shape adds its own numbers, and the list of its weights."""

    layers: int
    heads: int
    width: int
    inner: int
    positions: int
    vocab: int
    end: int
    """The end-of-text token; of a BERT, the token after each segment, [SEP]."""

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
        """FLOPs of the forward and backward pass for one token."""
        return count_flops(self.weights(), self.layers, self.attention_width, length, trained)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Attention heads and the MLP's inner width."""
        return {"heads": self.heads, "inner": self.inner}

    def _dropouts(self) -> list[str]:
        """The fields with dropout rates."""
        return [field.name for field in fields(self) if field.name.endswith("dropout")]
