"""The interface of an encoder, which turns texts into token ids."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Encoder(Protocol):
    """Turns texts into ids. Adds no special tokens; text that looks like a special token is encoded as plain text."""

    @property
    def name(self) -> str:
        """The library and its version."""
        ...

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of all texts, concatenated, and the number of ids of each text."""
        ...
