"""The prefix cache: keys and values of texts that have ended, for prompts that begin like them.

A chat turn begins with the conversation so far, so that only the new message is computed. The oldest texts leave when
there are too many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class SavedText(NamedTuple):
    """The tokens of a text, and their keys and values as `NetSlots.save` returns them."""

    ids: NDArray[np.int64]
    memory: Tensor


class PrefixCache:
    """Texts of at most `limit` tokens together, the one unused longest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._texts: list[SavedText] = []

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.ids) for text in self._texts)

    def find(self, ids: Sequence[int]) -> tuple[int, Tensor | None]:
        """The most tokens that a text has in common with these from the start, and its keys and values."""
        wanted = np.array(ids, np.int64)
        counts = [count_common(wanted, text.ids) for text in self._texts]
        if not any(counts):
            return 0, None
        best = int(np.argmax(counts))
        self._texts.append(self._texts.pop(best))
        return counts[best], self._texts[-1].memory

    def is_new(self, ids: Sequence[int]) -> bool:
        """Whether a text fits, and no other begins with it."""
        new = np.array(ids, np.int64)
        return len(ids) <= self.limit and all(count_common(new, text.ids) < len(ids) for text in self._texts)

    def add(self, ids: Sequence[int], memory: Tensor) -> None:
        """Keep a text instead of those that it begins with, and of the oldest ones if there are too many tokens."""
        new = np.array(ids, np.int64)
        self._texts = [text for text in self._texts if count_common(new, text.ids) < len(text.ids)]
        self._texts.append(SavedText(new, memory))
        while self.tokens > self.limit:
            self._texts.pop(0)


def count_common(first: Sequence[int] | NDArray[np.int64], second: Sequence[int] | NDArray[np.int64]) -> int:
    """How many tokens two texts have in common from their start."""
    length = min(len(first), len(second))
    if not length or first[0] != second[0]:
        return 0
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length
