"""Tables of tensor addresses, so that one Triton kernel can work on many tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

ALIGNMENT = 16
"""Alignment in bytes that kernels assume of every load_pointer."""


@triton.jit
def load_pointer(addresses, which):  # type: ignore[no-untyped-def]
    """Pointer to the tensor with this number."""
    return tl.multiple_of(tl.load(addresses + which).to(tl.pointer_type(tl.float32)), 16)


def can_update_in_place(tensor: Tensor) -> bool:
    """True if kernels can work on this tensor in place."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
