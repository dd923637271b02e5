"""Data parallelism: all-reduce gradients bucket by bucket while backward still computes earlier layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
"""Bytes of gradients in one all-reduce."""


class DataParallel:
    """Sums gradients over a group. Buckets are fixed, so the order of summation is the same after a resume."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        self.group = group
        self.active = False
        self.pending: list[tuple[Tensor, Any]] = []
        self.buckets = _fill_buckets([parameter for parameter in parameters if parameter.requires_grad])
        self.bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def during_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; the last pass of a step all-reduces the accumulated gradients."""
        return self._all_reducing() if last else nullcontext()

    @contextmanager
    def _all_reducing(self) -> Any:
        self.active = True
        self.pending = []
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients of each bucket that are not complete
        yield
        self.active = False
        for bucket, (flat, work) in zip(self.buckets, self.pending, strict=True):
            work.wait()
            gradients = torch.split_with_sizes(flat, [parameter.numel() for parameter in bucket])
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def repeat_pass(self) -> None:
        """Expect the gradients of the last pass once more; buckets that are sent already had all of theirs."""
        if self.active:
            self.missing = [len(bucket) for bucket in self.buckets]

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called when a gradient is complete; all-reduces complete buckets in the same order on every rank."""
        if not self.active:
            return
        self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
        while len(self.pending) < len(self.buckets) and not self.missing[len(self.pending)]:
            bucket = self.buckets[len(self.pending)]
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket if parameter.grad is not None])
            self.pending.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))


def _fill_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in buckets, last to first: the order in which backward computes their gradients."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0
    for parameter in reversed(parameters):
        if free_bytes < parameter.nbytes:
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets
