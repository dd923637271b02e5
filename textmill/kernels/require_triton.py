"""Imports Triton, or raises ImportError if its kernels cannot be built on this machine."""

from __future__ import annotations

from textmill.kernels.availability import lacking

if lacking():
    raise ImportError(f"missing: {lacking()}")

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
