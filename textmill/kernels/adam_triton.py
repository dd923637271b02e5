"""AdamW for many parameters in one Triton kernel; unlike torch's fused kernel it does not write the gradients back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from textmill.kernels.pointers_triton import can_update_in_place, load_pointer
from textmill.kernels.require_triton import tl, triton
from textmill.kernels.transfer_torch import copy_to_device

BLOCK = 2048
WARPS = 8
"""Elements that one program updates, and its warps."""


@triton.jit
def _update_elements(  # type: ignore[no-untyped-def]
    weights, gradients, firsts, seconds, inside, unscale, step, root, decay_factor, rate1, rate2, epsilon
):
    """One AdamW update; `rate1` and `rate2` are 1 - beta1 and 1 - beta2."""
    gradient = tl.load(gradients, mask=inside) * unscale
    weight = tl.load(weights, mask=inside)
    first = tl.load(firsts, mask=inside)
    second = tl.load(seconds, mask=inside)
    first += (gradient - first) * rate1
    second += (gradient * gradient - second) * rate2
    tl.store(weights, weight * decay_factor - step * first / (tl.sqrt(second) * root + epsilon), mask=inside)
    tl.store(firsts, first, mask=inside)
    tl.store(seconds, second, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _update_block(  # type: ignore[no-untyped-def]
    addresses, blocks, sizes, scale, skipped, corrections, count, lr, decay, rate1, rate2, epsilon, N: tl.constexpr
):
    """Update one block of one parameter; do nothing if the step is skipped."""
    which = tl.load(blocks + tl.program_id(0) * 2)
    block = tl.load(blocks + tl.program_id(0) * 2 + 1)
    at = block * N + tl.arange(0, N)
    size = tl.load(sizes + which)
    weights = load_pointer(addresses, which) + at
    gradients = load_pointer(addresses, count + which) + at
    firsts = load_pointer(addresses, 2 * count + which) + at
    seconds = load_pointer(addresses, 3 * count + which) + at
    unscale = 1 / tl.load(scale)
    step = lr / tl.load(corrections)
    root = 1 / tl.load(corrections + 1)
    decay_factor = 1 - lr * decay
    if tl.load(skipped) == 0:
        if (block + 1) * N <= size:  # unmasked loads are vectorised
            _update_elements(
                weights, gradients, firsts, seconds, None, unscale, step, root, decay_factor, rate1, rate2, epsilon
            )
        else:
            _update_elements(
                weights, gradients, firsts, seconds, at < size, unscale, step, root, decay_factor, rate1, rate2, epsilon
            )


class FusedAdamW:
    """AdamW for one parameter group; keeps device tables of its blocks and of the address of each tensor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.known_pointers: tuple[int, ...] = ()

    def step(
        self,
        tensors: Sequence[list[Tensor]],
        scale: Tensor,
        skipped: Tensor,
        corrections: Tensor,
        rates: tuple[float, ...],
    ) -> None:
        """One AdamW step. `tensors`: parameters, gradients (divided by `scale`), first and second moments.

        `rates`: learning rate, weight decay, 1 - beta1, 1 - beta2, epsilon. `corrections`: the bias correction
        1 - beta1^steps of the first moment, and the square root of that of the second."""
        device = tensors[0][0].device
        sizes = [tensor.numel() for tensor in tensors[0]]
        if sizes != self.sizes:
            counts = [triton.cdiv(size, BLOCK) for size in sizes]
            blocks = np.stack(
                [np.repeat(np.arange(len(sizes)), counts), np.concatenate([np.arange(count) for count in counts])], 1
            )
            self.sizes, self.tables = sizes, [copy_to_device(table, device) for table in (blocks, np.array(sizes))]
        pointers = tuple(tensor.data_ptr() for kind in tensors for tensor in kind)
        if pointers != self.known_pointers:
            self.known_pointers, self.addresses = pointers, copy_to_device(pointers, device, torch.int64)
        given = self.addresses, *self.tables, scale, skipped, corrections, len(sizes), *map(float, rates)
        _update_block[(len(self.tables[0]),)](*given, N=BLOCK, num_warps=WARPS)


def can_update_all(tensors: Sequence[list[Tensor]]) -> bool:
    """True if the kernel can update all these tensors in place."""
    return all(can_update_in_place(tensor) for kind in tensors for tensor in kind)
