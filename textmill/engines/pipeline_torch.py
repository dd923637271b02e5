"""Pipeline parallelism: ranks have consecutive blocks of the net, and pass the residual stream of micro-batches on.

Of a GPT-2 with 12 blocks, four stages have

    stage 0   embeddings, blocks 0 to 2
    stage 1   blocks 3 to 5
    stage 2   blocks 6 to 8
    stage 3   blocks 9 to 11, the last norm, the head; a tied head is a copy of the embedding

Interleaved, each stage has two chunks of blocks: the first of two stages has blocks 0 to 2 and 6 to 8. The schedules
are those of torch.distributed.pipelining: with s stages and m micro-batches, 1F1B and GPipe take as long as m + s - 1
micro-batches on one stage, interleaved as m + (s - 1) / 2. Each stage has the whole net as modules; parameters of other
stages stay on the meta device, without memory (`BaseNet.absent`).

Shapes in names: N samples, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.devices import attention_order, autocast
from textmill.engines.losses_torch import HeadStates, LabelStates, forward_heads, join_sums
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
        self.mesh = parallel.mesh
        self.group = parallel.group("pipeline")
        self.chunks = [Chunk(net, device, precision, blocks) for blocks in net.stage_blocks or []]
        self._schedules: dict[tuple[int, ...], Any] = {}
        """By what the micro-batches of a step look like: torch's schedules have fixed shapes."""

    def train(
        self, micro_batches: list[MicroBatch], loss_of: Callable[[HeadStates | LabelStates], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Forward and backward of all micro-batches; the sum of what `loss_of` reports, on the last stage only."""
        last = self.chunks[-1]
        last.reported = []
        last.loss_of = loss_of
        for chunk in self.chunks:
            chunk.micro_batches = micro_batches
        numbers = torch.arange(len(micro_batches))
        with attention_order(self.device):
            self._schedule_of(micro_batches).step(
                *([numbers] if self.chunks[0].has_embedding else []),
                number=numbers,
                target=numbers if last.has_head else None,
                return_outputs=False,
            )
        return torch.stack(last.reported).sum(0) if last.reported else None

    def _schedule_of(self, micro_batches: list[MicroBatch]) -> Any:
        """The schedule for micro-batches of this number and size."""
        # Imported here: it takes a second, which runs without a pipeline need not wait for.
        from torch.distributed import pipelining

        samples, tokens = micro_batches[0].inputs.shape
        key = len(micro_batches), samples, tokens
        if key not in self._schedules:
            states_NTE = self._empty_states(samples, tokens, "meta").requires_grad_()
            stages: list[Any] = [
                pipelining.PipelineStage(
                    chunk,
                    self.stage + number * self.mesh.pipeline,
                    len(self.chunks) * self.mesh.pipeline,
                    self.device,
                    input_args=(torch.zeros(1, dtype=torch.int64),) if chunk.has_embedding else (states_NTE,),
                    output_args=(states_NTE,),
                    group=self.group,
                )
                for number, chunk in enumerate(self.chunks)
            ]
            # Token weights are those of the global batch, so gradients are summed, never averaged.
            settings: dict[str, Any] = {
                "n_microbatches": len(micro_batches),
                "loss_fn": self.chunks[-1].loss,
                "scale_grads": False,
            }
            if self.mesh.schedule == "interleaved":
                schedule: Any = pipelining.ScheduleInterleaved1F1B(stages, **settings)
            else:
                kind = pipelining.ScheduleGPipe if self.mesh.schedule == "gpipe" else pipelining.Schedule1F1B
                schedule = kind(stages[0], **settings)
            self._schedules[key] = schedule
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
            samples, tokens = micro_batch.inputs.shape
            none = torch.zeros((), device=self.device)
            found = [none] * (2 if micro_batch.pair_positions is None else 4)
            for chunk in self.chunks:
                chunk.micro_batches = [micro_batch]
                states_NTE = self._empty_states(samples, tokens, self.device)
                if not chunk.has_embedding:
                    dist.recv(states_NTE, self._rank_of(self.stage - 1), group=self.group)
                states_NTE = chunk(states_NTE, torch.tensor(0))
                if chunk.has_head:
                    found = chunk.heads(states_NTE, 0).sums(self.parallel.tensor)
                else:
                    dist.send(states_NTE, self._rank_of(self.stage + 1), group=self.group)
            sums.append(found)
        return [self.mesh.pipeline * value for value in join_sums(sums)]

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % self.mesh.pipeline)

    def join_tied_gradient(self, gradient: Tensor) -> None:
        """Add the gradient that the other end of the pipeline has for a tied head; equal bits on both."""
        other = torch.empty_like(gradient)
        other_rank = self._rank_of(-1 - self.stage)
        operations = [
            dist.P2POp(dist.isend, gradient.contiguous(), other_rank, self.group),
            dist.P2POp(dist.irecv, other, other_rank, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(other)


class Chunk(nn.Module):
    """Consecutive blocks of a stage as the module that torch's schedules call with the number of a micro-batch."""

    def __init__(self, net: BaseNet, device: torch.device, precision: torch.dtype, blocks: range) -> None:
        super().__init__()
        self.net = net
        self.device = device
        self.precision = precision
        self.blocks = blocks
        self.has_embedding = blocks.start == 0
        self.has_head = net.ends_with(blocks)
        self.micro_batches: list[MicroBatch] = []
        self.loss_of: Callable[[HeadStates | LabelStates], tuple[Tensor, Tensor]]
        self.reported: list[Tensor] = []

    def forward(self, states_NTE: Tensor, number: Tensor) -> Tensor:
        """From the chunk before to the next one; the first one embeds the ids of the micro-batch instead."""
        before = None if self.has_embedding else states_NTE
        with autocast(self.device, self.precision):
            micro_batch = self.micro_batches[int(number)]
            states_NTE = micro_batch.hidden_states(self.net, None, states_NTE=before, blocks=self.blocks)
        return states_NTE if self.has_head else states_NTE.to(self.precision)

    def heads(self, states_NTE: Tensor, number: int) -> HeadStates | LabelStates:
        """The heads of a micro-batch after the last block."""
        with autocast(self.device, self.precision):
            return forward_heads(self.net, self.micro_batches[number], self.precision, states_NTE=states_NTE)

    def loss(self, states_NTE: Tensor, number: Tensor) -> Tensor:
        """The loss of a micro-batch after the last block."""
        loss, report = self.loss_of(self.heads(states_NTE, int(number)))
        self.reported.append(report)
        return loss
