"""How mapped files are read: the system reads far ahead of a read, which helps a reader in order and drowns a scattered one."""

from __future__ import annotations

import mmap
from typing import Any

from numpy.typing import NDArray


def expect(array: NDArray[Any], *, scattered: bool) -> None:
    """Tell the system whether a mapped array will be read here and there, or in order; an array in memory needs no telling."""
    below: Any = array
    while below is not None and not isinstance(below, mmap.mmap):
        below = getattr(below, "base", None)
    if below is not None and hasattr(mmap, "MADV_RANDOM"):
        below.madvise(mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)
