"""The torch engine, one process for each device: gradient accumulation, mixed precision, clipping; no step waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.devices import autocast, check_fp8, open_device, peak_flops_of, torch_dtype
from textmill.engines import Mine, Named, Ranks, Sums, every
from textmill.engines.checksum_torch import bit_sums, flip_a_bit
from textmill.engines.compile_torch import Compiling, compiling
from textmill.engines.cuda_graphs_torch import Recorded
from textmill.engines.loss_scale_torch import Scaler
from textmill.engines.losses_tensor_parallel_torch import tensor_parallel_loss, tensor_parallel_scores
from textmill.engines.losses_torch import scored, summed_loss
from textmill.engines.meshes import mesh_of
from textmill.engines.micro_batch_torch import largest_micro_batch
from textmill.engines.optimizers.step_torch import Optimizer
from textmill.engines.parallel_torch import Parallel
from textmill.engines.ranks_torch import TorchRanks, open_ranks
from textmill.engines.shared_torch import attention_order, count_loss_tokens, hidden_states, part_of, token_weights
from textmill.engines.spikes import new_guard
from textmill.engines.step_result_torch import TorchStep
from textmill.kernels.dropout_torch import dropout_keys
from textmill.kernels.transfer_torch import Room, on_device
from textmill.models import Shape
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, compiled_execution
from textmill.models.lora import count_with, drops, saved_of
from textmill.models.nets_torch import fill, moments_in, named_copies, new_net, parameters_of
from textmill.storage import faults
from textmill.tokens.batches.batch import Batch

FAULTS = True


class OnTorch:
    """The Engine of `engine.kind: torch`."""

    def __init__(
        self, net: BaseNet, train: TrainConfig, parallel: Parallel, ranks: Ranks, micro_batch: int, precision: torch.dtype,
        compiled: bool, note: str, requested: bool,
    ) -> None:  # fmt: skip
        """`note` describes compiling for the log; `requested` says that the config requires it."""
        self.note, self.requested = note, requested
        self.net, self.train, self.parallel, self.ranks, self.first = net, train, parallel, ranks, ranks.first
        self.micro_batch, self.precision = micro_batch, precision
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.execution = compiled_execution() if compiled else EAGER
        self.optimizer = Optimizer(net, train, parallel, compiled=compiled and requested)
        parallel.sum_gradients(self.optimizer.parameters)
        self.scaler = Scaler(self.device) if precision == torch.float16 else None
        self.guard = new_guard(train, torch, lambda values: torch.tensor(values, device=self.device))
        # Collectives run in the middle of backward, from hooks that a CUDA graph does not replay.
        recorded = compiled and self.device.type == "cuda" and ranks.world == 1
        self.one_pass = Recorded(self._pass, self.optimizer.parameters) if recorded else self._pass
        self.room: Room | None = None
        """Pinned memory for the copies that a save takes, if this process has all weights and a GPU."""

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each data-parallel rank."""
        rows = batch // self.parallel.mesh.data_ranks
        return slice(self.parallel.data_rank * rows, (self.parallel.data_rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """Forward and backward by micro-batches, then one update; a non-finite gradient or a spike skips the update."""
        with Compiling(self.execution is not EAGER) as compiling:
            loss, norm, tokens, scale = self._step(batch, step, lr, compiling)
        return TorchStep(loss, norm, tokens, scale, compiling.news)

    def _step(
        self, batch: Batch, step: int, lr: float, compiling: Compiling
    ) -> tuple[Tensor, Tensor, int, Tensor | None]:
        if self.room is None and self.device.type == "cuda" and self.ranks.world == 1:  # while the first step compiles
            saved = [*saved_of(self.net.shape, self.net.lora), *self.optimizer.stated()]
            self.room = Room([math.prod(weight.shape) for weight in saved])
        counts = self.ranks.all_reduce(count_loss_tokens(batch))
        tokens, samples = (int(count) // self.parallel.mesh.tensor for count in counts)
        token_weight = token_weights(batch, self.train.loss, tokens, samples)
        if faults.is_due("nan", step):
            token_weight = token_weight * np.float32("nan")
        if faults.is_due("flip", step):
            flip_a_bit(self.parallel.local(self.optimizer.parameters[0]))
        keys_N = (
            dropout_keys(self.train.seed, step, batch.samples).numpy() if drops(self.net.shape, self.net.lora) else None
        )
        total = torch.zeros((), device=self.device)
        scale = self.scaler.scale if self.scaler else None
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            keys = None if keys_N is None else on_device(keys_N[rows], self.device)
            inputs, labels, weights = (
                on_device(array[rows], self.device) for array in (batch.inputs, batch.labels, token_weight)
            )
            # The scale is part of the weights: the head's gradient is computed in fp16 with the loss itself.
            weights = weights if scale is None else weights * scale
            with self.parallel.during_pass(rows.stop >= len(batch.inputs)):
                total += self._try_pass(compiling, inputs, labels, weights, keys, self._documents(batch, rows))
        total = self.parallel.sum_loss(total)
        loss = total if scale is None else total / scale
        spike = self.guard.judged(self.guard.state, loss) if self.guard else None
        norm = self.optimizer.step(lr, scale, spike)
        if self.scaler:
            self.scaler.move(torch.isfinite(norm))
        if self.guard:
            self.guard.state = self.guard.after(self.guard.state, loss, spike, torch.isfinite(norm), step + 1)
        return loss, norm, tokens, scale

    def _try_pass(self, compiling: Compiling, *given: Any) -> Tensor:
        """A pass; if compiling fails and was not requested, it and all later passes run eagerly."""
        if self.requested or not compiling.compiles:
            return self.one_pass(*given)
        before = [parameter.grad for parameter in self.optimizer.parameters]
        try:
            return self.one_pass(*given)
        except Exception as error:
            if not compiling.is_to_blame(error):
                raise
            compiling.leave(error)
        for parameter, gradient in zip(self.optimizer.parameters, before, strict=True):
            parameter.grad = gradient
        self.execution, self.one_pass = EAGER, self._pass
        return self.one_pass(*given)

    def _pass(
        self, inputs: Tensor, labels: Tensor, weights: Tensor, keys: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        """The loss of a micro-batch; its gradients are accumulated."""
        with attention_order(self.device):  # backward too, where activations are computed again
            with autocast(self.device, self.precision):
                x_ME = hidden_states(self.net, inputs, keys, documents, self.precision, self.execution)
            given = (x_ME, self.net.head, labels.flatten(), weights.flatten(), self.net.shape.vocab)
            smoothing, z, tensor = self.train.label_smoothing, self.train.z_loss, self.parallel.tensor
            loss = (
                tensor_parallel_loss(*given, smoothing, z, tensor)
                if tensor
                else summed_loss(*given, smoothing, z, self.net.fp8, ends=True)
            )
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Losses of this rank's part of a batch by micro-batches, without dropout; then summed over ranks."""
        batch = part_of(batch, self.parallel.mesh.data_ranks, self.parallel.data_rank)
        sums, correct = [], []
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            inputs, labels = on_device(batch.inputs[rows], self.device), on_device(batch.labels[rows], self.device)
            with autocast(self.device, self.precision):
                x_ME = hidden_states(self.net, inputs, None, self._documents(batch, rows), self.precision)
            given = (x_ME, self.net.head, labels.flatten(), self.net.shape.vocab)
            losses, right = (
                tensor_parallel_scores(*given, self.parallel.tensor) if self.parallel.tensor else scored(*given)
            )
            sums.append(losses.sum())
            correct.append(right.sum())
        # Sums in fp64 on the host: not every device has it.
        total = float(torch.stack(sums).cpu().double().sum())
        self.parallel.reshard()
        found = self.ranks.all_reduce([total, count_loss_tokens(batch)[0], int(torch.stack(correct).sum())])
        summed = [value / self.parallel.mesh.tensor for value in found]
        return Sums(summed[0], int(summed[1]), int(summed[2]))

    def _documents(self, batch: Batch, rows: slice) -> Tensor | None:
        return None if batch.documents is None else on_device(batch.documents[rows], self.device)

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the weights; of a net with adapters, the adapters alone."""
        known = {name: parameter for name, (_, parameter) in parameters_of(self.net).items()}
        saved = [known[weight.name] for weight in saved_of(self.net.shape, self.net.lora)]
        kept = {parameter: self.parallel.local(parameter) for parameter in saved}
        return named_copies(self.net, kept, mine=mine, gather=self.parallel.gather)

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the optimizer's state; none before the first update."""
        for kind, state in self.optimizer.states():
            yield from named_copies(self.net, state, f"{kind}/", mine, self.parallel.gather)

    def replica_checksums(self) -> dict[str, int]:
        """The bits of what this rank has of each weight, summed on its device: equal on ranks that have the same."""
        parallel, members = self.parallel, parameters_of(self.net).values()
        return bit_sums({parallel.name_of(weight): parallel.local(parameter) for weight, parameter in members})

    def updates(self) -> int:
        """Updates done."""
        return self.optimizer.count()

    def scaling(self) -> dict[str, float]:
        """The loss scale's state, in fp16."""
        return self.scaler.state() if self.scaler else {}

    def load(
        self,
        weights: Iterable[Named],
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Take weights and moments in checkpoint names and layout, and the loss scale's state."""
        parallel = self.parallel
        fill(
            self.net,
            weights,
            where,
            lambda weight, one, values: parallel.local(one).copy_(parallel.local_part(weight, values)),
        )
        if self.scaler and scaling:
            self.scaler.take(scaling)
        for kind, weight, parameter, values in moments_in(self.net, moments if updates else [], where):
            self.optimizer.take(kind, parameter, parallel.local_part(weight, values), updates)

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        return {
            "device": str(self.device), "precision": "float8" if self.net.fp8 else str(self.precision).removeprefix("torch."),
            "micro_batch": self.micro_batch, "processes": self.ranks.world, "compiling": self.note,
            "parameters": count_with(self.net.shape, self.net.lora),
            "trained": self.optimizer.trained, "peak_flops": peak_flops_of(self.device),
        }  # fmt: skip

    def close(self) -> None:
        """Nothing is held beyond memory."""
        if self.room:
            self.room.close()


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that torchrun or srun started together, or this one alone."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Shape, ranks: Ranks) -> OnTorch:
    """The engine, its net without values; `load` fills it."""
    engine = config.engine
    assert isinstance(engine, TorchEngine)
    mesh = mesh_of(config, shape, ranks.world)
    device = ranks.device if isinstance(ranks, TorchRanks) else open_device(engine.device)
    precision = torch_dtype(engine.precision, device)
    if engine.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    compiled, note = compiling(engine, config.train, shape, device, ranks.world)
    micro_batch, requested = engine.micro_batch, engine.compile != "auto"
    if micro_batch == "auto":
        micro_batch = largest_micro_batch(
            config.train, shape, mesh, device, precision, compiled=compiled, requested=requested
        )
    parallel = Parallel(mesh, ranks.rank, device)
    net = new_net(shape, device, config.model.lora, parallel.shard_net)
    net.recompute = engine.recompute
    if engine.precision == "fp8":
        check_fp8(device)
        net.use_fp8()
    return OnTorch(net, config.train, parallel, ranks, micro_batch, precision, compiled, note, requested)
