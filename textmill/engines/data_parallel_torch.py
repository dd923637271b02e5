"""Copies of one net: their gradients are summed, bucket by bucket, while backward is still at work on earlier layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 25 << 20
"""Bytes of gradients that travel together."""


class Replicas:
    """Sums over a group. The buckets never change, so that sums are taken in one order in every sitting of a run."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        self.group, self.due = group, False
        self.flying: list[tuple[Tensor, Any]] = []
        self.buckets = _buckets([parameter for parameter in parameters if parameter.requires_grad])
        self.place = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        for parameter in self.place:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def last_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; after the last of a step the gradients are those of all copies."""
        return self._summing() if last else nullcontext()

    @contextmanager
    def _summing(self) -> Any:
        self.due, self.flying = True, []
        self.missing = [len(bucket) for bucket in self.buckets]
        yield
        self.due = False
        for bucket, (flat, work) in zip(self.buckets, self.flying, strict=True):
            work.wait()
            for parameter, values in zip(
                bucket, torch.split_with_sizes(flat, [one.numel() for one in bucket]), strict=True
            ):
                parameter.grad = values.view_as(parameter)

    def _ready(self, parameter: Tensor) -> None:
        """A gradient is whole on this process; full buckets leave, in one order on every process."""
        if not self.due:
            return
        self.missing[self.place[parameter]] -= 1  # type: ignore[index]
        while len(self.flying) < len(self.buckets) and not self.missing[len(self.flying)]:
            bucket = self.buckets[len(self.flying)]
            flat = torch.cat([one.grad.flatten() for one in bucket if one.grad is not None])
            self.flying.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters from the last to the first, as backward meets them."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        if room < parameter.nbytes:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets
