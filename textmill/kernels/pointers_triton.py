"""Parameters and their gradients as Triton kernels find them: by addresses that lie in a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

ALIGNED = 16
"""Bytes: what kernels may count on of every address."""


@triton.jit
def address(addresses, which):  # type: ignore[no-untyped-def]
    """Where the tensor of this number begins."""
    return tl.multiple_of(tl.load(addresses + which).to(tl.pointer_type(tl.float32)), 16)


def fits(tensor: Tensor) -> bool:
    """Whether the kernels can work on a tensor where it lies."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0
