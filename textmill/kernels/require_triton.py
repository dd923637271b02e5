"""Imports Triton, or raises ImportError if its kernels cannot be built or used on this machine."""

from __future__ import annotations

import torch

from textmill.kernels.availability import INTERPRETED, missing_requirement

if missing_requirement():
    raise ImportError(f"missing: {missing_requirement()}")
if torch.version.cuda is None and torch.version.hip is None and not INTERPRETED:
    raise ImportError("this torch is built without support for GPUs")  # and importing Triton takes time

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["libdevice", "tl", "triton"]
