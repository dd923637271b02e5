"""Encoder: what turns texts into token ids."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Encoder(Protocol):
    """Texts to ids; nothing added, and what looks like a special token is plain text."""

    @property
    def name(self) -> str:
        """The library and its version."""
        ...

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of all texts, one after the other, and how many each has."""
        ...
