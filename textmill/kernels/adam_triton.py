"""AdamW over many parameters in one Triton kernel: every number is read once, and gradients, which torch's kernel writes too, are not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from textmill.kernels.pointers_triton import address, fits
from textmill.kernels.require_triton import tl, triton
from textmill.kernels.transfer_torch import on_device

BLOCK, WARPS = 2048, 8
"""Numbers that a program moves, and its warps."""


@triton.jit
def _moved(weights, gradients, firsts, seconds, inside, over, step, root, shrink, share1, share2, epsilon):  # type: ignore[no-untyped-def]
    gradient, weight = tl.load(gradients, mask=inside) * over, tl.load(weights, mask=inside)
    first, second = tl.load(firsts, mask=inside), tl.load(seconds, mask=inside)
    first += (gradient - first) * share1
    second += (gradient * gradient - second) * share2
    tl.store(weights, weight * shrink - step * first / (tl.sqrt(second) * root + epsilon), mask=inside)
    tl.store(firsts, first, mask=inside)
    tl.store(seconds, second, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    addresses, blocks, sizes, scale, skipped, corrections, count, lr, decay, share1, share2, epsilon, N: tl.constexpr
):
    """A block of one parameter; what is skipped stays as it is."""
    which, block = tl.load(blocks + tl.program_id(0) * 2), tl.load(blocks + tl.program_id(0) * 2 + 1)
    at, size = block * N + tl.arange(0, N), tl.load(sizes + which)
    weights, gradients = address(addresses, which) + at, address(addresses, count + which) + at
    firsts, seconds = address(addresses, 2 * count + which) + at, address(addresses, 3 * count + which) + at
    over, step, root = 1 / tl.load(scale), lr / tl.load(corrections), 1 / tl.load(corrections + 1)
    shrink = 1 - lr * decay
    if tl.load(skipped) == 0:
        if (block + 1) * N <= size:  # without a mask numbers come four at a time
            _moved(weights, gradients, firsts, seconds, None, over, step, root, shrink, share1, share2, epsilon)
        else:
            _moved(weights, gradients, firsts, seconds, at < size, over, step, root, shrink, share1, share2, epsilon)


class Places:
    """What the device is told of a group: which block is of which parameter, and where these, their gradients and moments lie."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.known: tuple[int, ...] = ()

    def move(
        self,
        tensors: Sequence[list[Tensor]],
        scale: Tensor,
        skipped: Tensor,
        corrections: Tensor,
        rates: tuple[float, ...],
    ) -> None:
        """One update of parameters by gradients over `scale`, with first and second moments; rates are lr, decay, 1 - betas and epsilon.

        `corrections` are 1 - beta^steps of the first moment, and the root of that of the second."""
        device, sizes = tensors[0][0].device, [tensor.numel() for tensor in tensors[0]]
        if sizes != self.sizes:
            counts = [triton.cdiv(size, BLOCK) for size in sizes]
            blocks = np.stack(
                [np.repeat(np.arange(len(sizes)), counts), np.concatenate([np.arange(count) for count in counts])], 1
            )
            self.sizes, self.tables = sizes, [on_device(table, device) for table in (blocks, np.array(sizes))]
        found = tuple(tensor.data_ptr() for kind in tensors for tensor in kind)
        if found != self.known:
            self.known, self.addresses = found, on_device(found, device, torch.int64)
        given = self.addresses, *self.tables, scale, skipped, corrections, len(sizes), *map(float, rates)
        _move[(len(self.tables[0]),)](*given, N=BLOCK, num_warps=WARPS)


def fit(tensors: Sequence[list[Tensor]]) -> bool:
    """Whether the kernel can work on all of them where they lie."""
    return all(fits(tensor) for kind in tensors for tensor in kind)
