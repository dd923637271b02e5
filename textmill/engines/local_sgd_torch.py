"""Local SGD (DiLoCo): each replica is a worker that trains alone for `engine.sync_every` steps, then all agree.

Every H steps the workers average how far each has moved, and a Nesterov step with that average as its gradient moves
the shared weights, from which all go on. So the weights are sent once in H steps, instead of the gradients in each.

    worker 0   w  ->  step  ->  step  ->  ...  ->  w - d0
    worker 1   w  ->  step  ->  step  ->  ...  ->  w - d1
    all        d = (d0 + d1) / 2;   v = momentum v + d;   w = w - rate (d + momentum v)

The optimizer's state stays with its worker. Between two synchronisations the model, for evaluation and checkpoints, is
the mean of the workers; a checkpoint has what each worker needs to go on, so that a resume is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.meshes import LocalSteps
from textmill.engines.parallel_torch import Parallel, fill_buckets
from textmill.models import Weight
from textmill.models.nets_torch import LOCAL

States = list[tuple[str, dict[nn.Parameter, Tensor]]]
ANCHOR = f"{LOCAL}.anchor"
MOMENTUM = f"{LOCAL}.momentum"
WEIGHTS = "weights"
"""Kinds of state in a checkpoint. That of worker 0 has the names of a run without local SGD (m, v), that of worker 1
local1.m and so on."""


class LocalSgd:
    """The shared weights, the outer momentum, and this worker's weights, which are those of the net."""

    def __init__(self, parameters: list[nn.Parameter], steps: LocalSteps, parallel: Parallel) -> None:
        self.steps = steps
        self.parallel = parallel
        self.workers = parallel.mesh.replicate
        self.worker = parallel.data_rank
        self.parameters = parameters
        self.anchors = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        """The shared weights, as of the last synchronisation."""
        self.momenta = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        self.buckets = fill_buckets(parameters)
        self.drifted = False
        """Whether workers have other weights than the shared ones."""
        self._own: list[Tensor] = []
        """This worker's weights, while the net has the mean of all."""

    @torch.no_grad()
    def reset(self) -> None:
        """All workers start from the net's weights."""
        self.drifted = False
        self._own = []
        for parameter in self.parameters:
            self.anchors[parameter].copy_(parameter)
            self.momenta[parameter].zero_()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step `step`, counted from 0: synchronise if it is due."""
        self.drifted = (step + 1) % self.steps.every != 0
        if self.drifted:
            return
        for bucket in self.buckets:
            moves = self._mean([self.anchors[parameter] - parameter for parameter in bucket])
            for parameter, move in zip(bucket, moves, strict=True):
                momentum = self.momenta[parameter].mul_(self.steps.momentum).add_(move)
                anchor = self.anchors[parameter]
                anchor.sub_(move.add_(momentum, alpha=self.steps.momentum), alpha=self.steps.rate)
                parameter.copy_(anchor)

    @torch.no_grad()
    def put_in_net(self, mean: bool) -> None:
        """Make the net compute with the mean of the workers, or again with this worker's weights."""
        if not mean:
            for parameter, own in zip(self.parameters, self._own, strict=bool(self._own)):
                parameter.copy_(own)
            self._own = []
        elif self.drifted and not self._own:
            self._own = [parameter.clone() for parameter in self.parameters]
            for bucket in self.buckets:
                for parameter, value in zip(bucket, self._mean([*bucket]), strict=True):
                    parameter.copy_(value)

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mean of the workers' tensors, as one all-reduce; views of a new tensor."""
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.parallel.group("replicate"))
        flat /= self.workers
        parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def gather_from(self, worker: int, _weight: Weight, _parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A worker's tensor, on all of them."""
        return self.parallel.broadcast("replicate", worker, tensor)

    def shared_states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """What a checkpoint has once: the outer momentum, and the shared weights if they are not the model's."""
        yield MOMENTUM, self.momenta
        if self.drifted:
            yield ANCHOR, self.anchors

    def own_states(self, states: States) -> States:
        """What a checkpoint has of each worker: the optimizer's state, and its weights if they are not the model's."""
        return [*states, (WEIGHTS, dict(zip(self.parameters, self._own, strict=True)))] if self.drifted else states

    def kind_of(self, worker: int, kind: str) -> str:
        """The kind of a worker's state in a checkpoint."""
        return kind if worker == 0 and kind != WEIGHTS else f"{LOCAL}{worker}.{kind}"

    @torch.no_grad()
    def load(self, kind: str, parameter: nn.Parameter, values: Tensor) -> str | None:
        """Set state of this kind; the optimizer's kind, if it is that of this worker's optimizer."""
        if kind == ANCHOR:
            self.drifted = True  # also on a worker that the checkpoint does not have: it starts from the mean
            self.anchors[parameter].copy_(values)
        elif kind == MOMENTUM:
            self.momenta[parameter].copy_(values)
        elif kind.startswith(LOCAL):
            worker, _, kind = kind.removeprefix(LOCAL).partition(".")
            if int(worker) != self.worker:
                return None
            if kind != WEIGHTS:
                return kind
            parameter.copy_(values)
        else:
            return kind
        return None

    def describe(self) -> str:
        """A line for the log."""
        every = self.steps.every
        size = 2 * (self.workers - 1) / self.workers * sum(parameter.nbytes for parameter in self.parameters)
        return (
            f"{self.workers} workers synchronise every {every} steps: "
            f"{size / every / 1e6:,.2f} MB a step sent by each, instead of {size / 1e6:,.2f} MB"
        )
