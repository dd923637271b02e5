"""Pipeline parallelism: ranks have consecutive blocks of the net, and pass the residual stream of micro-batches on.

Of a GPT-2 with 12 blocks, four stages have

    stage 0   embeddings, blocks 0 to 2
    stage 1   blocks 3 to 5
    stage 2   blocks 6 to 8
    stage 3   blocks 9 to 11, the last norm, the head; a tied head is a copy of the embedding

The schedule is 1F1B of torch.distributed.pipelining: with four stages and m micro-batches a step takes as long as m + 3
of them, and the first stage keeps the activations of four. Each stage has the whole net as modules; parameters of the
other stages stay on the meta device, without memory (`BaseNet.absent`), and `owner` has the values for a checkpoint.

Shapes in names: N samples, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.devices import attention_order, autocast
from textmill.engines.heads_torch import HeadStates, LabelStates, forward_heads, join_sums
from textmill.engines.micro_batches import MicroBatch
from textmill.engines.parallel_torch import Parallel
from textmill.models.base_torch import BaseNet


class Pipeline:
    """This rank's stage of a net, and the passes over the micro-batches of a step."""

    def __init__(self, net: BaseNet, parallel: Parallel, device: torch.device, precision: torch.dtype) -> None:
        self.net = net
        self.parallel = parallel
        self.device = device
        self.precision = precision
        self.stage = parallel.stage
        self.count = parallel.mesh.pipeline
        self.group = parallel.group("pipeline")
        self._schedules: dict[tuple[int, ...], tuple[Any, StageModule]] = {}
        """By what the micro-batches of a step look like: torch's schedules have fixed shapes."""

    def train(
        self, micro_batches: list[MicroBatch], loss_of: Callable[[HeadStates | LabelStates], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Forward and backward of all micro-batches; the sum of what `loss_of` reports, on the last stage only."""
        schedule, module = self._schedule_of(micro_batches)
        module.micro_batches = micro_batches
        module.loss_of = loss_of
        module.reported = []
        numbers = torch.arange(len(micro_batches))
        with attention_order(self.device):
            schedule.step(
                *([numbers] if self.net.has_embedding else []),
                number=numbers,
                target=numbers if self.net.has_head else None,
                return_outputs=False,
            )
        module.micro_batches = []
        return torch.stack(module.reported).sum(0) if module.reported else None

    def _schedule_of(self, micro_batches: list[MicroBatch]) -> tuple[Any, StageModule]:
        """The schedule for micro-batches of this number and size, and its module."""
        # Imported here: it takes a second, which runs without a pipeline need not wait for.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        samples, tokens = micro_batches[0].inputs.shape
        key = len(micro_batches), samples, tokens
        if key not in self._schedules:
            module = StageModule(self.net, self.device, self.precision)
            states_NTE = self._empty_states(samples, tokens, "meta").requires_grad_()
            stage = PipelineStage(
                module,
                self.stage,
                self.count,
                self.device,
                input_args=(torch.zeros(1, dtype=torch.int64),) if self.net.has_embedding else (states_NTE,),
                output_args=(states_NTE,),
                group=self.group,
            )
            # Token weights are those of the global batch, so gradients are summed, never averaged.
            schedule = Schedule1F1B(stage, len(micro_batches), loss_fn=module.loss, scale_grads=False)
            self._schedules[key] = schedule, module
        return self._schedules[key]

    def _empty_states(self, samples: int, tokens: int, device: torch.device | str) -> Tensor:
        """The residual stream between two stages; with sequence parallelism, this rank's tokens of it."""
        tensor = self.parallel.tensor
        tokens = tokens // tensor.count if tensor and tensor.sequence else tokens
        return torch.empty(samples, tokens, self.net.shape.width, dtype=self.precision, device=device)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> list[float]:
        """The sums of all micro-batches, as if each stage had counted them: all on the last one, zeros elsewhere."""
        sums = []
        for micro_batch in micro_batches:
            states_NTE = None
            if not self.net.has_embedding:
                samples, tokens = micro_batch.inputs.shape
                states_NTE = self._empty_states(samples, tokens, self.device)
                dist.recv(states_NTE, self._rank_of(self.stage - 1), group=self.group)
            with autocast(self.device, self.precision):
                states_NTE = micro_batch.hidden_states(self.net, None, states_NTE=states_NTE)
                heads = None
                if self.net.has_head:
                    heads = forward_heads(self.net, micro_batch, self.precision, states=states_NTE)
            if heads:
                sums.append(heads.sums(self.parallel.tensor))
            else:
                dist.send(states_NTE.to(self.precision), self._rank_of(self.stage + 1), group=self.group)
                none = torch.zeros((), device=self.device)
                sums.append([none] * (2 if micro_batch.pair_positions is None else 4))
        return [self.count * value for value in join_sums(sums)]

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage)

    def join_tied_gradient(self, gradient: Tensor) -> None:
        """Add the gradient that the other end of the pipeline has for a tied head; equal bits on both."""
        other = torch.empty_like(gradient)
        other_rank = self._rank_of(self.count - 1 - self.stage)
        operations = [
            dist.P2POp(dist.isend, gradient.contiguous(), other_rank, self.group),
            dist.P2POp(dist.irecv, other, other_rank, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(other)


class StageModule(nn.Module):
    """The blocks of a stage as the module that torch's schedules call with the number of a micro-batch."""

    def __init__(self, net: BaseNet, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        self.net = net
        self.device = device
        self.precision = precision
        self.micro_batches: list[MicroBatch] = []
        self.loss_of: Callable[[HeadStates | LabelStates], tuple[Tensor, Tensor]]
        self.reported: list[Tensor] = []

    def forward(self, states_NTE: Tensor, number: Tensor) -> Tensor:
        """From the stage before to the next one; the first stage gets the number a second time instead of states."""
        before = {} if self.net.has_embedding else {"states_NTE": states_NTE}
        with autocast(self.device, self.precision):
            states_NTE = self.micro_batches[int(number)].hidden_states(self.net, None, **before)
        return states_NTE if self.net.has_head else states_NTE.to(self.precision)

    def loss(self, states_NTE: Tensor, number: Tensor) -> Tensor:
        """The loss of a micro-batch, on the last stage."""
        with autocast(self.device, self.precision):
            heads = forward_heads(self.net, self.micro_batches[int(number)], self.precision, states=states_NTE)
        loss, report = self.loss_of(heads)
        self.reported.append(report)
        return loss
