"""Tells the operating system how a memory-mapped file will be read.

Read-ahead speeds up reading in order and slows down random access.
"""

from __future__ import annotations

import mmap
from typing import Any

from numpy.typing import NDArray


def advise(array: NDArray[Any], *, random: bool) -> None:
    """Announce random or sequential reads of a memory-mapped array; no effect on an array in memory."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_RANDOM"):
        base.madvise(mmap.MADV_RANDOM if random else mmap.MADV_NORMAL)
