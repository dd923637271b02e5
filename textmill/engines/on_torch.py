"""The torch engine, one process per device: gradient accumulation, mixed precision, clipping, asynchronous steps.

A step: count the loss tokens of the global batch, weight each token by them, run forward and backward for each
micro-batch (`_forward_backward`), sum the gradients over ranks, clip, update. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.devices import autocast, check_fp8, open_device, peak_flops_of, torch_dtype
from textmill.engines import Named, NameFilter, Ranks, Sums, all_names
from textmill.engines.checksum_torch import checksum_tensors, flip_bit
from textmill.engines.compile_torch import CompileMonitor, decide_compile
from textmill.engines.distillation.teachers_torch import open_teachers
from textmill.engines.meshes import mesh_of
from textmill.engines.micro_batch_torch import largest_micro_batch
from textmill.engines.objective.heads_torch import join_sums, new_report, open_heads, split_reported, term_names
from textmill.engines.objective.micro_batches_torch import MicroBatch, micro_batches
from textmill.engines.optimizers.average_torch import RAW, Average
from textmill.engines.optimizers.loss_scale_torch import LossScaler
from textmill.engines.optimizers.step_torch import Optimizer
from textmill.engines.parallel_torch import Parallel
from textmill.engines.ranks_torch import TorchRanks, open_ranks
from textmill.engines.shared_torch import (
    attention_order,
    check_fields,
    count_labels,
    dropout_keys_of,
    part_of,
    sums_of_all_ranks,
    token_weights,
)
from textmill.engines.spikes import new_spike_guard
from textmill.engines.step_result_torch import TorchStep
from textmill.kernels.transfer_torch import PinnedBuffers
from textmill.models import Shape
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, compiled_execution
from textmill.models.lora import count_with_adapters, saved_weights
from textmill.models.nets_torch import checkpoint_tensors, fill, match_moments, new_net, parameters_of
from textmill.storage import faults
from textmill.tokens.batches.batch import Batch

FAULTS = True
"""This engine supports the injected faults nan and flip."""
TEACHERS = True
"""This engine supports `train.distil`."""


class OnTorch:
    """The Engine of `engine.kind: torch`."""

    def __init__(
        self,
        net: BaseNet,
        train: TrainConfig,
        parallel: Parallel,
        ranks: Ranks,
        micro_batch: int,
        precision: torch.dtype,
        compiled: bool,
        compile_note: str,
        compile_requested: bool,
    ) -> None:
        """`compile_note` tells the log whether the net is compiled; `compile_requested` is true unless
        `engine.compile` is auto: then a compile error ends the run instead of making it eager."""
        self.compile_note = compile_note
        self.compile_requested = compile_requested
        self.net = net
        self.train = train
        self.parallel = parallel
        self.ranks = ranks
        self.first = ranks.first
        self.micro_batch = micro_batch
        self.precision = precision
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.teachers = open_teachers(train, net.shape, self.device, precision)
        self.terms = term_names(net, train.distil)
        """The names of the terms of the objective besides the loss of the labels."""
        self.execution = compiled_execution() if compiled else EAGER
        self.optimizer = Optimizer(net, train, parallel, compiled=compiled and compile_requested)
        parallel.sum_gradients(self.optimizer.parameters)
        self.average = Average(self.optimizer.local_parts, train.average.memory)
        self.scaler = LossScaler(self.device) if precision == torch.float16 else None
        self.guard = new_spike_guard(train, torch, lambda values: torch.tensor(values, device=self.device))
        self.pinned_buffers: PinnedBuffers | None = None
        """Pinned memory for the copies of a save, if this process has all weights and a GPU."""

    def samples_of(self, batch: int) -> slice:
        """An equal, contiguous part of the batch for each data-parallel rank."""
        rows = batch // self.parallel.mesh.data_ranks
        return slice(self.parallel.data_rank * rows, (self.parallel.data_rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """Gradient accumulation over micro-batches, then one update; a non-finite gradient or a spike skips it."""
        check_fields(batch, self.net.shape)
        self.average.put_in_net(averaged=False)
        with CompileMonitor(self.execution is not EAGER) as monitor:
            result = self._step(batch, step, lr, monitor)
        result.note = monitor.note
        return result

    def _step(self, batch: Batch, step: int, lr: float, monitor: CompileMonitor) -> TorchStep:
        """The losses of the global batch and its gradient, then the update."""
        if self.pinned_buffers is None and self.device.type == "cuda" and self.ranks.world == 1:
            # In the first step, where pinning runs while kernels compile.
            self.pinned_buffers = self._new_pinned_buffers()
        # Tensor-parallel ranks have the same samples.
        loss_tokens, loss_samples, pairs = count_labels(batch, self.ranks, copies=self.parallel.mesh.tensor)
        weights_NT = token_weights(batch, self.train.loss, loss_tokens, loss_samples)
        if faults.is_due("nan", step):
            weights_NT = weights_NT * np.float32("nan")
        if faults.is_due("flip", step):
            flip_bit(self.parallel.local(self.optimizer.parameters[0]))
        parts = micro_batches(
            batch,
            self.net,
            self.micro_batch,
            self.device,
            weights=weights_NT,
            keys=dropout_keys_of(self.net, self.train.seed, step, batch),
            pair_weight=1 / max([1, *pairs]),
        )
        loss_scale = self.scaler.scale if self.scaler else None
        loss, terms = split_reported(self._accumulate_gradients(parts, loss_scale, monitor), self.terms, pairs)
        norm = self._update_or_skip(loss, loss_scale, step, lr)
        return TorchStep(loss, norm, loss_tokens, loss_scale, terms=terms)

    def _accumulate_gradients(
        self, parts: Iterator[tuple[bool, MicroBatch]], loss_scale: Tensor | None, monitor: CompileMonitor
    ) -> Tensor:
        """A forward and backward pass for each micro-batch; returns the sum of their losses over all ranks."""
        total = new_report(self.terms, self.device)
        for last, micro_batch in parts:
            # The scale is part of the weights: the head's gradient is computed in fp16 with the loss itself.
            scaled = micro_batch if loss_scale is None else micro_batch.scaled(loss_scale)
            with self.parallel.during_pass(last):
                total += self._run_pass_or_fall_back(monitor, *scaled)
        total = self.parallel.sum_loss(total)
        return total if loss_scale is None else total / loss_scale

    def _update_or_skip(self, loss: Tensor, loss_scale: Tensor | None, step: int, lr: float) -> Tensor:
        """Update the weights, unless the loss is a spike or the gradient is not finite; returns the gradient norm."""
        spike = self.guard.is_spike(self.guard.state, loss) if self.guard else None
        norm = self.optimizer.step(lr, loss_scale, spike)
        self.average.update(step)
        if self.scaler:
            self.scaler.update(torch.isfinite(norm))
        if self.guard:
            self.guard.state = self.guard.next_state(self.guard.state, loss, spike, torch.isfinite(norm), step + 1)
        return norm

    def _new_pinned_buffers(self) -> PinnedBuffers:
        """Memory for all tensors of a checkpoint."""
        saved = [*saved_weights(self.net.shape, self.net.lora), *self.optimizer.state_weights()]
        saved += [weight for weight, _ in self.optimizer.weights] if self.average.tensors else []
        return PinnedBuffers([math.prod(weight.shape) for weight in saved])

    def _run_pass_or_fall_back(self, monitor: CompileMonitor, *arguments: Any) -> Tensor:
        """A forward and backward pass; if compiling fails under `engine.compile: auto`, it and all later ones are
        eager."""
        if self.compile_requested or not monitor.compiled or not self.parallel.can_repeat_pass:
            return self._forward_backward(*arguments)
        before = [parameter.grad for parameter in self.optimizer.parameters]
        try:
            return self._forward_backward(*arguments)
        except Exception as error:
            if not monitor.is_compile_error(error):
                raise
            monitor.fall_back(error)
        for parameter, gradient in zip(self.optimizer.parameters, before, strict=True):
            parameter.grad = gradient
        self.parallel.repeat_pass()
        self.execution = EAGER
        return self._forward_backward(*arguments)

    def _forward_backward(self, *tensors: Tensor | None) -> Tensor:
        """Forward and backward of a `MicroBatch`, given by its fields: returns its losses and accumulates gradients."""
        with attention_order(self.device):  # backward too, since activation checkpointing runs attention there
            with autocast(self.device, self.precision):
                micro_batch = MicroBatch(*tensors)  # type: ignore[arg-type]
                heads = open_heads(self.net, micro_batch, self.precision, self.execution, self.teachers)
            loss, reported = heads.training_loss(self.train, self.parallel.tensor, starts_backward=True)
            loss.backward()  # type: ignore[no-untyped-call]
        return reported

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Loss of this rank's part of a batch by micro-batches, without dropout; then an all-reduce."""
        check_fields(batch, self.net.shape)
        self.average.put_in_net(averaged=True)
        batch = part_of(batch, self.parallel.mesh.data_ranks, self.parallel.data_rank)
        sums_by_micro_batch = []
        for _, micro_batch in micro_batches(batch, self.net, self.micro_batch, self.device):
            with autocast(self.device, self.precision):
                heads = open_heads(self.net, micro_batch, self.precision)
            sums_by_micro_batch.append(heads.sums(self.parallel.tensor))
        self.parallel.reshard()
        return sums_of_all_ranks(join_sums(sums_by_micro_batch), batch, self.ranks, copies=self.parallel.mesh.tensor)

    def weights(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the weights, averaged if `train.average` is set; with LoRA, of the adapters only."""
        parameters = parameters_of(self.net)
        averaged = self.average.weights()
        local_parts = {}
        for weight in saved_weights(self.net.shape, self.net.lora):
            _, parameter = parameters[weight.name]
            local_parts[parameter] = averaged.get(parameter, self.parallel.local(parameter))
        return checkpoint_tensors(self.net, local_parts, wanted=wanted, gather=self.parallel.gather)

    def moments(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the optimizer state; none before the first update."""
        for kind, state in self.optimizer.states():
            yield from checkpoint_tensors(self.net, state, f"{kind}/", wanted, self.parallel.gather)
        raw = self.average.weights(raw=True) if self.updates() else {}
        yield from checkpoint_tensors(self.net, raw, f"{RAW}/", wanted, self.parallel.gather)

    def replica_checksums(self) -> dict[str, int]:
        """A checksum of this rank's part of each weight, computed on its device."""
        parallel = self.parallel
        members = parameters_of(self.net).values()
        return checksum_tensors({parallel.name_of(weight): parallel.local(parameter) for weight, parameter in members})

    def updates(self) -> int:
        """Updates done, without skipped ones."""
        return self.optimizer.count()

    def scaling(self) -> dict[str, float]:
        """The loss scaler's state in fp16."""
        return self.scaler.state() if self.scaler else {}

    def load(
        self,
        weights: Iterable[Named],
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights and moments in checkpoint names and layout, and the loss scaler's state."""
        parallel = self.parallel
        fill(
            self.net,
            weights,
            where,
            lambda weight, parameter, values: parallel.local(parameter).copy_(parallel.local_part(weight, values)),
        )
        self.average.reset()
        if self.scaler and scaling:
            self.scaler.load_state(scaling)
        for kind, weight, parameter, values in match_moments(self.net, moments if updates else [], where):
            part = parallel.local_part(weight, values)
            if kind == RAW:
                self.average.load_raw(parameter, part)
            else:
                self.optimizer.load_state(kind, parameter, part, updates)

    def facts(self) -> dict[str, Any]:
        """Device, precision and sizes."""
        precision = "float8" if self.net.fp8 else str(self.precision).removeprefix("torch.")
        return {
            "device": str(self.device),
            "precision": precision,
            "micro_batch": self.micro_batch,
            "processes": self.ranks.world,
            "compiling": self.compile_note,
            "parameters": count_with_adapters(self.net.shape, self.net.lora),
            "trained": self.optimizer.trained,
            "peak_flops": peak_flops_of(self.device),
        }

    def close(self) -> None:
        """Free the pinned memory."""
        if self.pinned_buffers:
            self.pinned_buffers.close()


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that torchrun or srun started together, or this single process."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Shape, ranks: Ranks) -> OnTorch:
    """The engine with an uninitialised net; `load` sets its weights."""
    engine = config.engine
    assert isinstance(engine, TorchEngine)
    mesh = mesh_of(config, shape, ranks.world)
    device = ranks.device if isinstance(ranks, TorchRanks) else open_device(engine.device)
    precision = torch_dtype(engine.precision, device)
    if engine.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    compiled, compile_note = decide_compile(engine, config.train, shape, device, mesh)
    if ranks.any(not compiled) and compiled:
        compiled = False
        compile_note = "not compiled, since another process cannot compile"
    parallel = Parallel(mesh, ranks.rank, device)
    net = new_net(shape, device, config.model.lora, parallel.shard_net)
    micro_batch = engine.micro_batch
    compile_requested = engine.compile != "auto"
    if micro_batch == "auto":
        micro_batch = largest_micro_batch(
            config, net, parallel, device, precision, compiled=compiled, compile_requested=compile_requested
        )
    net.recompute = engine.recompute
    if engine.precision == "fp8":
        check_fp8(device)
        net.use_fp8()
    return OnTorch(
        net, config.train, parallel, ranks, micro_batch, precision, compiled, compile_note, compile_requested
    )
