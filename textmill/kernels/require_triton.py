"""Imports Triton, or raises ImportError if its kernels cannot be built on this machine."""

from __future__ import annotations

from textmill.kernels.availability import missing_requirement

if missing_requirement():
    raise ImportError(f"missing: {missing_requirement()}")

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
