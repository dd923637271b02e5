"""Triton, where its kernels can be built; elsewhere this cannot be imported, as Triton itself where it is not installed."""

from __future__ import annotations

from textmill.kernels.availability import lacking

if lacking():
    raise ImportError(f"there is no {lacking()}")

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
