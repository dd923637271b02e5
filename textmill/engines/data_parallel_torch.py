"""Data parallelism: gradients of replicas are all-reduced, bucket by bucket, while backward still computes earlier layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 25 << 20
"""Bytes of gradients in one all-reduce."""


class DataParallel:
    """Sums gradients over a group. The buckets never change, so that the order of sums is the same after every resume."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        self.group, self.active = group, False
        self.pending: list[tuple[Tensor, Any]] = []
        self.buckets = _buckets([parameter for parameter in parameters if parameter.requires_grad])
        self.bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def during_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; after the last of a step the gradients are summed over all replicas."""
        return self._summing() if last else nullcontext()

    @contextmanager
    def _summing(self) -> Any:
        self.active, self.pending = True, []
        self.missing = [len(bucket) for bucket in self.buckets]
        yield
        self.active = False
        for bucket, (flat, work) in zip(self.buckets, self.pending, strict=True):
            work.wait()
            for parameter, values in zip(
                bucket, torch.split_with_sizes(flat, [one.numel() for one in bucket]), strict=True
            ):
                parameter.grad = values.view_as(parameter)

    def _ready(self, parameter: Tensor) -> None:
        """A gradient of this rank is complete; full buckets are sent, in the same order on every rank."""
        if not self.active:
            return
        self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
        while len(self.pending) < len(self.buckets) and not self.missing[len(self.pending)]:
            bucket = self.buckets[len(self.pending)]
            flat = torch.cat([one.grad.flatten() for one in bucket if one.grad is not None])
            self.pending.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters from the last to the first, as backward meets them."""
    buckets: list[list[nn.Parameter]] = []
    left = 0
    for parameter in reversed(parameters):
        if left < parameter.nbytes:
            buckets.append([])
            left = BUCKET
        buckets[-1].append(parameter)
        left -= parameter.nbytes
    return buckets
