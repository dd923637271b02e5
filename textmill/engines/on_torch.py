"""The torch engine, one process per device: gradient accumulation, mixed precision, clipping, asynchronous steps.

`new_engine` builds the net, shards and compiles it. A step (`OnTorch.train_step`): count the loss tokens of the global
batch, weight each token by them, run forward and backward for each micro-batch (`_forward_backward`), sum the gradients
over ranks, clip, update. Nothing waits for the device. After the engine follow what it reports of a step, fp16's loss
scale, the decision to compile and the largest micro-batch that fits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.config import EngineConfig, LoraConfig, TorchEngine, TrainConfig
from textmill.config.own_files import is_own_file
from textmill.devices import (
    PendingCopy,
    PinnedBuffers,
    attention_order,
    autocast,
    check_fp8,
    copy_to_device,
    open_device,
    peak_flops_of,
    torch_dtype,
)
from textmill.engines import (
    EvalSums,
    NameFilter,
    Step,
    StepValues,
    all_names,
    format_compile_time,
    shortest_compiled_run,
)
from textmill.engines.distillation import teacher_bytes
from textmill.engines.distillation_torch import open_teachers
from textmill.engines.ema_torch import RAW, Average
from textmill.engines.local_sgd_torch import LocalSgd
from textmill.engines.losses_torch import (
    AUXILIARY_LOSS,
    forward_heads,
    join_sums,
    new_report,
    split_loss_terms,
    term_names,
)
from textmill.engines.memory import (
    ACTIVATION_BYTES,
    ATTENTION_BYTES,
    count_state,
    largest_on_cpu,
    largest_on_gpu,
    rank_samples,
    sample_activations,
)
from textmill.engines.meshes import Mesh, mesh_of
from textmill.engines.micro_batches import (
    MicroBatch,
    check_fields,
    count_labels,
    dropout_keys_of,
    micro_batches,
    part_of,
    sums_of_all_ranks,
    token_weights,
)
from textmill.engines.optimizers import Optimizer, check_optimizer_mesh
from textmill.engines.parallel_torch import Parallel
from textmill.engines.pipeline_torch import Pipeline
from textmill.engines.ranks_torch import TorchRanks, open_ranks, own_device
from textmill.errors import TextmillError
from textmill.kernels.graphs_torch import GraphedFunction
from textmill.kernels.triton_support import missing_requirement
from textmill.models import Shape
from textmill.models.base_torch import BaseNet, CompiledParts, compile_parts
from textmill.models.family_files import find_family_file
from textmill.models.lora import count_with_adapters, saved_weights
from textmill.models.nets_torch import (
    checkpoint_tensors,
    fill,
    match_optimizer_state,
    new_net,
    own_parameters_of,
    parameters_of,
)
from textmill.processes.ranks import Ranks
from textmill.runners.on_local import usable_cores
from textmill.storage import faults
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import Batch

OWN_PARTS = True
"""This engine supports a loss and an optimizer in the user's own file."""
FAULTS = True
"""This engine supports the injected faults nan and flip."""
EAGER_FRACTION = 0.12
DEFAULT_PEAK = 1e14
"""The fraction of a GPU's peak FLOP/s that an eager net reaches, and the peak of an unknown GPU."""
GRAPH_FLOPS = 4e12
"""Operations of a pass over a micro-batch up to which launching its kernels takes longer than the kernels."""
COMPILE_ERRORS = ("TorchDynamoException", "TritonError")
"""Names of the base classes of compile errors, in torch and in Triton."""


def new_ranks(engine: EngineConfig) -> Ranks:
    """The processes that torchrun or srun started together, or this single process."""
    return open_ranks(engine.device, engine.timeout)


def check_settings(engine: EngineConfig, train: TrainConfig, shape: Shape, world: int) -> None:
    """Refuse a mesh, device, precision or compilation that this engine cannot use here."""
    assert isinstance(engine, TorchEngine)
    mesh = mesh_of(engine, train, shape, world)
    check_optimizer_mesh(train, mesh)
    device = own_device(engine.device)
    if engine.precision == "fp8":
        check_fp8(device)
    setting = "engine.mesh.pipeline" if mesh.pipeline > 1 else "engine.sync_every" if mesh.local else ""
    if setting and torch_dtype(engine.precision, device) == torch.float16:
        raise TextmillError(f"{setting}: does not work in fp16, the precision of this GPU; set engine.precision=fp32")


def new_engine(
    engine: EngineConfig, train: TrainConfig, shape: Shape, lora: LoraConfig | None, ranks: Ranks
) -> OnTorch:
    """The engine with an uninitialised net; `load` sets its weights."""
    assert isinstance(engine, TorchEngine)
    return OnTorch(engine, train, shape, lora, ranks)


class OnTorch:
    """The Engine of `engine.kind: torch`."""

    def __init__(
        self, engine: TorchEngine, train: TrainConfig, shape: Shape, lora: LoraConfig | None, ranks: Ranks
    ) -> None:
        mesh = mesh_of(engine, train, shape, ranks.world)
        self.train = train
        self.ranks = ranks
        self.first = ranks.first
        device = ranks.device if isinstance(ranks, TorchRanks) else open_device(engine.device)
        self.precision = torch_dtype(engine.precision, device)
        if engine.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        compiled, self.compile_note = decide_compile(engine, train, shape, device, mesh)
        if ranks.any(not compiled) and compiled:
            compiled = False
            self.compile_note = "not compiled, since another process cannot compile"
        self.compile_requested = engine.compile != "auto"
        """If it was not, a compile error makes the net eager; else it ends the run."""
        self.parallel = parallel = Parallel(mesh, ranks.rank, device)
        self.net = net = new_net(shape, device, lora, parallel.shard_net)
        self.micro_batch = (
            largest_micro_batch(engine, train, net, parallel, self.precision, compiled)
            if engine.micro_batch == "auto"
            else engine.micro_batch
        )
        self.device = next(parameter.device for name, parameter in net.named_parameters() if name not in net.absent)
        net.activation_checkpointing = engine.activation_checkpointing
        if engine.precision == "fp8":
            net.use_fp8()
        self.teachers = open_teachers(train, shape, self.device, self.precision)
        self.terms = term_names(net, train.distil)
        """The names of the terms of the objective besides the loss of the labels."""
        self.compiled: CompiledParts | None = compile_parts() if compiled else None
        self.optimizer = Optimizer(net, train, parallel, compiled=compiled and self.compile_requested)
        parallel.sum_gradients(self.optimizer.parameters)
        self.pipeline = Pipeline(net, parallel, self.device, self.precision) if mesh.pipeline > 1 else None
        self.average = Average(self.optimizer.local_parts, train.ema_window)
        self.local_sgd = LocalSgd(self.optimizer.parameters, mesh.local, parallel) if mesh.local else None
        self.scaler = LossScaler(self.device) if self.precision == torch.float16 else None
        self.graphs = StepGraphs(self) if self._is_small() else None
        """Set if passes and updates are launched as CUDA graphs; None once a caller has computed a step itself."""
        if self.graphs:
            self.compile_note = "launched as CUDA graphs"
        self.pinned_buffers: PinnedBuffers | None = None
        """Pinned memory for the copies of a save, if this process has all weights and a GPU."""

    def samples_of(self, batch: int) -> slice:
        """An equal, contiguous part of the batch for each data-parallel rank."""
        rows = batch // self.parallel.mesh.data_ranks
        return slice(self.parallel.data_rank * rows, (self.parallel.data_rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """Gradient accumulation over micro-batches, then one update; a non-finite gradient skips it."""
        with self._open_step(batch, step, lr) as passes:
            if self.pipeline:
                passes.run_pipeline(self.pipeline)
            else:
                for micro_batch in passes:
                    passes.run(micro_batch)
        return passes.result

    def open_step(self, batch: Batch, step: int, lr: float) -> AbstractContextManager[Passes]:
        """A step whose passes the caller runs inside the `with` block; at its end comes the update."""
        self.graphs = None
        return self._open_step(batch, step, lr)

    @contextmanager
    def _open_step(self, batch: Batch, step: int, lr: float) -> Iterator[Passes]:
        check_fields(batch, self.net.shape)
        self.average.put_in_net(averaged=False)
        if self.local_sgd:
            self.local_sgd.put_in_net(mean=False)
        with CompileMonitor(self.compiled is not None) as monitor:
            passes = Passes(self, batch, step, monitor)
            yield passes
            passes.update(lr)
        passes.result.note = monitor.note

    def _update_or_skip(self, loss_scale: Tensor | None, step: int, lr: float) -> Tensor:
        """Update the weights, unless the gradient is not finite; returns the gradient norm."""
        norm = self.graphs.update(lr) if self.graphs else self.optimizer.step(lr, loss_scale)
        self.average.update(step)
        if self.local_sgd:
            self.local_sgd.update(step)
        if self.scaler:
            self.scaler.update(torch.isfinite(norm))
        return norm

    def _is_small(self) -> bool:
        """Whether a pass takes the GPU less time than its launches take the host, and can be captured."""
        train, net = self.train, self.net
        if self.device.type != "cuda" or self.ranks.world > 1 or torch.are_deterministic_algorithms_enabled():
            return False
        if self.compiled or self.scaler or net.fp8:
            return False
        if is_own_file(train.loss) or is_own_file(train.optimizer) or find_family_file(net.shape.family):
            return False
        tokens = self.micro_batch * (train.length or net.shape.positions)
        return 6 * net.shape.parameters * tokens < GRAPH_FLOPS

    def _new_pinned_buffers(self) -> PinnedBuffers:
        """Memory for all tensors of a checkpoint."""
        saved = [*saved_weights(self.net.shape, self.net.lora)]
        saved += [weight for weight, _ in self.optimizer.weights] if self.average.tensors else []
        return PinnedBuffers([weight.size for weight in saved] + self.optimizer.state_sizes())

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
        self.compiled = None
        return self._forward_backward(*arguments)

    def _forward_backward(self, *tensors: Tensor | None) -> Tensor:
        """Forward and backward of a `MicroBatch`, given by its fields: returns its losses and accumulates gradients."""
        with attention_order(self.device):  # backward too, since activation checkpointing runs attention there
            with autocast(self.device, self.precision):
                micro_batch = MicroBatch(*tensors)  # type: ignore[arg-type]
                heads = forward_heads(self.net, micro_batch, self.precision, self.compiled, self.teachers)
            loss, reported = heads.training_loss(self.train, self.parallel.tensor, gradient_is_one=True)
            loss.backward()  # type: ignore[no-untyped-call]
        return reported

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalSums:
        """Loss of this rank's part of a batch by micro-batches, without dropout; then an all-reduce."""
        check_fields(batch, self.net.shape)
        self.average.put_in_net(averaged=True)
        if self.local_sgd:
            self.local_sgd.put_in_net(mean=True)
        batch = part_of(batch, self.parallel.mesh.data_ranks, self.parallel.data_rank)
        passes = (micro_batch for _, micro_batch in micro_batches(batch, self.net, self.micro_batch, self.device))
        if self.pipeline:
            sums = self.pipeline.evaluate(passes)
        else:
            sums = join_sums([self._sums_of(micro_batch) for micro_batch in passes])
        self.parallel.reshard()
        return sums_of_all_ranks(sums, batch, self.ranks, copies=self.parallel.mesh.ranks_per_sample)

    def _sums_of(self, micro_batch: MicroBatch) -> list[Tensor]:
        with autocast(self.device, self.precision):
            heads = forward_heads(self.net, micro_batch, self.precision)
        return heads.sums(self.parallel.tensor)

    def weights(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the weights, averaged if `train.ema_window` is set; with LoRA, of the adapters only."""
        if self.local_sgd:
            self.local_sgd.put_in_net(mean=True)
        parameters = parameters_of(self.net)
        averaged = self.average.weights()
        local_parts = {}
        for weight in saved_weights(self.net.shape, self.net.lora):
            _, parameter = parameters[weight.name]
            local_parts[parameter] = averaged.get(parameter, self.parallel.local(parameter))
        return checkpoint_tensors(self.net, local_parts, wanted=wanted, gather=self.parallel.gather)

    def optimizer_state(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the optimizer state; none before the first update."""
        if self.local_sgd:
            yield from self._states_of_workers(self.local_sgd, wanted)
            return
        for kind, state in self.optimizer.states():
            is_like_weight = partial(self.optimizer.is_like_weight, kind)
            yield from checkpoint_tensors(self.net, state, f"{kind}/", wanted, self.parallel.gather, is_like_weight)
        raw = self.average.weights(raw=True) if self.updates() else {}
        yield from checkpoint_tensors(self.net, raw, f"{RAW}/", wanted, self.parallel.gather)

    def _states_of_workers(self, local_sgd: LocalSgd, wanted: NameFilter) -> Iterator[Named]:
        """Local SGD: the state of all workers, that of worker 0 first, under the names of a run without local SGD."""
        if not self.updates():
            return
        local_sgd.put_in_net(mean=True)
        states = local_sgd.own_states(list(self.optimizer.states()))
        for worker in range(local_sgd.workers):
            for kind, state in states:
                prefix = f"{local_sgd.kind_of(worker, kind)}/"
                gather = partial(local_sgd.gather_from, worker)
                yield from checkpoint_tensors(self.net, state, prefix, wanted, gather)
        for kind, state in local_sgd.shared_states():
            yield from checkpoint_tensors(self.net, state, f"{kind}/", wanted)

    def replica_checksums(self) -> dict[str, int]:
        """A checksum of this rank's part of each weight, computed on its device."""
        parallel = self.parallel
        if self.local_sgd:
            shared = self.local_sgd.anchors
            return checksum_tensors({weight.name: shared[part] for weight, part in self.optimizer.weights})
        self.average.put_in_net(averaged=False)
        members = own_parameters_of(self.net)
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
        optimizer_state: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights and optimizer state in checkpoint names and layout, and the loss scaler's state."""
        parallel = self.parallel
        fill(
            self.net,
            weights,
            where,
            lambda weight, parameter, values: parallel.local(parameter).copy_(parallel.local_part(weight, values)),
        )
        self.average.reset()
        self.graphs = StepGraphs(self) if self.graphs else None  # the state may be new tensors
        if self.local_sgd:
            self.local_sgd.reset()
        if self.scaler and scaling:
            self.scaler.load_state(scaling)
        is_like_weight = self.optimizer.is_like_weight
        for kind, weight, parameter, values in match_optimizer_state(
            self.net, optimizer_state if updates else [], where, is_like_weight, local=self.local_sgd is not None
        ):
            part = parallel.local_part(weight, values) if is_like_weight(kind, weight, parameter) else values
            if self.local_sgd and not (kind := self.local_sgd.load(kind, parameter, part) or ""):
                continue
            if kind == RAW:
                self.average.load_raw(parameter, part)
            else:
                self.optimizer.load_state(kind, weight, parameter, part, updates)

    def describe(self) -> dict[str, Any]:
        """Device, precision and sizes."""
        precision = "float8" if self.net.fp8 else str(self.precision).removeprefix("torch.")
        return {
            "device": str(self.device),
            "precision": precision,
            "micro_batch": self.micro_batch,
            "processes": self.ranks.world,
            "compiling": self.compile_note,
            "local_sgd": self.local_sgd.describe() if self.local_sgd else "",
            "parameters": count_with_adapters(self.net.shape, self.net.lora),
            "trained": self.optimizer.trained,
            "peak_flops": peak_flops_of(self.device),
        }

    def close(self) -> None:
        """Free the pinned memory."""
        if self.pinned_buffers:
            self.pinned_buffers.close()


class Passes:
    """The forward and backward passes of a step: the micro-batches, and the sum of their losses."""

    def __init__(self, engine: OnTorch, batch: Batch, step: int, monitor: CompileMonitor) -> None:
        self.engine = engine
        self.step = step
        self.monitor = monitor
        if engine.pinned_buffers is None and engine.device.type == "cuda" and engine.ranks.world == 1:
            # In the first step, where pinning runs while kernels compile.
            engine.pinned_buffers = engine._new_pinned_buffers()
        self.loss_tokens, loss_samples, self.pairs = count_labels(
            batch, engine.ranks, copies=engine.parallel.mesh.ranks_per_sample
        )
        workers = engine.parallel.workers
        weights_NT = token_weights(batch, engine.train.loss, self.loss_tokens, loss_samples) * np.float32(workers)
        if faults.is_due("nan", step):
            weights_NT = weights_NT * np.float32("nan")
        if faults.is_due("flip", step):
            flip_bit(engine.parallel.local(engine.optimizer.parameters[0]))
        self.micro_batches = micro_batches(
            batch,
            engine.net,
            engine.micro_batch,
            engine.device,
            weights=weights_NT,
            keys=dropout_keys_of(engine.net, engine.train.seed, step, batch),
            pair_weight=workers / max([1, *self.pairs]),
        )
        self.loss_scale = engine.scaler.scale if engine.scaler else None
        self.total = new_report(engine.terms, engine.device)
        self.reported: Tensor | None = None
        """What `loss` or `logits` reports of the micro-batch whose `backward` comes next, as `training_loss` does."""
        self.added: Tensor | None = None
        """What the blocks add to a loss of `logits`."""
        self.loss_of_settings: Tensor | None = None
        """What `loss` returned."""

    def __iter__(self) -> Iterator[MicroBatch]:
        """Each micro-batch. A pass over it must end, with `backward`, before the next one is taken."""
        for last, micro_batch in self.micro_batches:
            with self.engine.parallel.during_pass(last):
                yield micro_batch

    def run(self, micro_batch: MicroBatch) -> None:
        """Forward and backward with the loss of the settings."""
        # The scale is part of the weights: the head's gradient is computed in fp16 with the loss itself.
        scaled = micro_batch if self.loss_scale is None else micro_batch.scaled(self.loss_scale)
        graphs = self.engine.graphs
        self.total += graphs.run_pass(*scaled) if graphs else self.engine._run_pass_or_fall_back(self.monitor, *scaled)

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Forward and backward of all micro-batches through the stages of a pipeline."""
        engine = self.engine
        passes = [micro_batch for _, micro_batch in self.micro_batches]
        reported = pipeline.train(
            passes, lambda heads: heads.training_loss(engine.train, engine.parallel.tensor, gradient_is_one=True)
        )
        if reported is not None:
            self.total += reported
        engine.parallel.sum_after_passes()
        for weight, parameter in engine.optimizer.weights:
            full = engine.optimizer.full_parameters[parameter]
            if full.grad is not None and len(engine.parallel.stages_of(weight)) > 1:
                pipeline.join_tied_gradient(engine.parallel.local(full.grad))

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """The logits [N, T, vocabulary] of every token, in fp32."""
        engine = self.engine
        with autocast(engine.device, engine.precision):
            hidden_NTE = micro_batch.hidden_states(engine.net, engine.compiled)
            if engine.net.has_auxiliary_loss and micro_batch.weights is not None:
                self.added = engine.net.take_auxiliary_loss() * micro_batch.weights.sum()
                self.reported = torch.zeros_like(self.total)
                self.reported[1 + engine.terms.index(AUXILIARY_LOSS)] = self.added.detach()
            return engine.net.logits(hidden_NTE.to(engine.precision)).float()

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of the settings, for `backward`."""
        engine = self.engine
        with autocast(engine.device, engine.precision):
            heads = forward_heads(engine.net, micro_batch, engine.precision, engine.compiled, engine.teachers)
        loss, self.reported = heads.training_loss(engine.train, engine.parallel.tensor, gradient_is_one=False)
        self.loss_of_settings = loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a micro-batch's loss, its part of the loss of the step."""
        reported = self.reported
        own = loss.detach().float()
        if self.added is not None:
            loss = loss + self.added
        with attention_order(self.engine.device):
            loss.backward()  # type: ignore[no-untyped-call]
        if reported is None or loss is not self.loss_of_settings:
            terms = self.total.new_zeros(self.total.numel() - 1) if reported is None else reported[1:]
            reported = torch.cat([own.reshape(1), terms]) if self.total.dim() else own
        self.total += reported
        self.reported = self.added = self.loss_of_settings = None

    def update(self, lr: float) -> None:
        """Update the weights, unless the gradient is not finite."""
        engine = self.engine
        total = engine.parallel.sum_loss(self.total)
        total = total if self.loss_scale is None else total / self.loss_scale
        loss, terms = split_loss_terms(total, engine.terms, self.pairs)
        norm = engine._update_or_skip(self.loss_scale, self.step, lr)
        self.result = new_step(loss, norm, self.loss_tokens, self.loss_scale, terms)


class StepGraphs:
    """The passes and updates of a small net as CUDA graphs, up to five times as fast (bench/LOG.md)."""

    def __init__(self, engine: OnTorch) -> None:
        self.engine = engine
        self.run_pass = GraphedFunction(engine._forward_backward)
        self._run_update = GraphedFunction(partial(engine.optimizer.step, keep_gradients=True))

    def update(self, lr: float) -> Tensor:
        """`Optimizer.step`; without graphs from now on if a weight has no gradient, and so no state to be captured."""
        engine = self.engine
        if any(parameter.grad is None for parameter in engine.optimizer.parameters):
            engine.graphs = None
            return engine.optimizer.step(lr)
        return self._run_update(copy_to_device([lr], engine.device, torch.float32)[0])


def new_step(loss: Tensor, norm: Tensor, loss_tokens: int, scale: Tensor | None, terms: dict[str, Tensor]) -> Step:
    """The result of a step from numbers on the device, which are copied to the host without waiting for them."""
    numbers = [loss, norm, *terms.values(), *([] if scale is None else [scale])]
    copy = PendingCopy(torch.stack([number.to(loss) for number in numbers]))

    def read() -> StepValues:
        loss, norm, *others = copy.values()
        named = dict(zip(terms, others, strict=False))
        return StepValues(loss, norm, loss_tokens, named, None if scale is None else others[-1])

    return Step(lambda: copy.ready, read)


FIRST_SCALE = 2.0**32
"""The loss scale of the first step."""
LOWEST_SCALE = 1.0
"""The loss scale does not fall below this."""
WINDOW = 1000
"""Steps in a row without an overflow after which the scale doubles."""
HYSTERESIS = 2
"""Overflows since the last doubling after which each further one halves the scale."""


class LossScaler:
    """Megatron's dynamic loss scaler."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST_SCALE, device=device)
        self.good, self.left = torch.tensor(0, device=device), torch.tensor(HYSTERESIS, device=device)

    def update(self, finite: Tensor) -> None:
        """After a step: double the scale after a window without overflows, halve it after too many of them."""
        good = torch.where(finite, self.good + 1, 0)
        left = torch.where(finite, self.left, self.left - 1)
        grows = good == WINDOW
        shrinks = ~finite & (left <= 0)
        self.scale = torch.where(
            grows, self.scale * 2, torch.where(shrinks, (self.scale / 2).clamp_min(LOWEST_SCALE), self.scale)
        )
        self.good, self.left = torch.where(grows, 0, good), torch.where(grows, HYSTERESIS, left)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint: scale, steps since the last overflow, overflows left until it halves."""
        return {"scale": float(self.scale), "good": int(self.good), "left": int(self.left)}

    def load_state(self, state: dict[str, float]) -> None:
        """Resume from a saved state."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self.good, self.left = torch.full_like(self.good, state["good"]), torch.full_like(self.left, state["left"])


def decide_compile(
    engine: TorchEngine, train: TrainConfig, shape: Shape, device: torch.device, mesh: Mesh
) -> tuple[bool, str]:
    """Whether this run's net is compiled, and a note for the log; `train.steps` is the length of the entire run, with
    `train.minutes` the most steps that it may have."""
    if engine.compile != "auto":
        return engine.compile, _note(engine.compile)
    # `engine.deterministic` is promised for eager nets.
    if device.type != "cuda" or engine.deterministic or mesh.ranks_per_sample > 1:
        return False, ""
    if not _is_long(train, shape, device, mesh.data_ranks):
        return False, ""
    if missing := missing_requirement():
        return False, f"not compiled, although it would be faster: no {missing} found"
    # Later a failure would end the run: one rank cannot repeat a pass in which the others take part.
    if mesh.shard > 1 and (failure := try_compiler(device)):
        return False, f"not compiled, although it would be faster: torch cannot compile here: {failure}"
    return True, _note(True)


def try_compiler(device: torch.device) -> str:
    """Compile and run a small function; why that failed, empty if it worked."""
    try:
        torch.compile(lambda values: torch.nn.functional.gelu(values) * 2)(torch.ones(64, device=device))
    except Exception as error:
        if not _is_compile_error(error):
            raise
        return _summary(error)
    return ""


def _note(compiled: bool) -> str:
    return "compiles in the first step, which takes longer" if compiled else ""


def _is_long(train: TrainConfig, shape: Shape, device: torch.device, world: int) -> bool:
    enough = shortest_compiled_run(usable_cores())
    if train.minutes is not None and 60 * train.minutes < enough:
        return False
    tokens = train.steps * train.batch * (train.length or shape.positions)
    flops_per_second = EAGER_FRACTION * (peak_flops_of(device) or DEFAULT_PEAK) * world
    return bool(6 * shape.parameters * tokens >= enough * flops_per_second)


class CompileMonitor:
    """Around a training step: times compilation, and turns compile errors into user errors."""

    def __init__(self, compiled: bool) -> None:
        """`compiled` is whether the step's net is compiled."""
        self.compiled = compiled
        self.note: str | None = None
        """A line for the log: the compile time, or why the net runs eagerly."""

    def __enter__(self) -> CompileMonitor:
        self._graphs, self._start = _count_graphs(), time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.is_compile_error(error):
            raise TextmillError(
                f"engine.compile: torch cannot compile the net here: {_summary(error)}; set engine.compile=false"
            ) from error
        if self.note is None and _count_graphs() > self._graphs:
            self.note = format_compile_time(time.perf_counter() - self._start)

    def is_compile_error(self, error: BaseException) -> bool:
        """Whether compiling failed, and not the code that was compiled."""
        return self.compiled and _is_compile_error(error)

    def fall_back(self, error: BaseException) -> None:
        """Note that the net runs eagerly from now on, because of a compile error."""
        self.compiled = False
        self.note = f"torch cannot compile the net here, so it runs eagerly: {_summary(error)}"


def _is_compile_error(error: BaseException) -> bool:
    return any(kind.__name__ in COMPILE_ERRORS for kind in type(error).__mro__)


def _summary(error: BaseException) -> str:
    """The first two lines of an error as one; the first line of some names the compiler's backend only."""
    return " ".join(str(error).strip().split("\n")[:2]) or type(error).__name__


def _count_graphs() -> int:
    """Graphs that torch's compiler has compiled in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def checksum_tensors(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits as integers: any single flipped bit changes it. Waits for the device once."""
    sums = [tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


def flip_bit(tensor: Tensor) -> None:
    """Flip a bit of the first element, as faulty memory would."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)


def largest_micro_batch(
    engine: TorchEngine, train: TrainConfig, net: BaseNet, parallel: Parallel, precision: torch.dtype, compiled: bool
) -> int:
    """The largest divisor of a rank's samples that the memory estimate allows.

    If compiling was not requested, the estimate leaves memory for the eager fallback.
    """
    shape = net.shape
    mesh = parallel.mesh
    length = train.length or shape.positions
    samples = rank_samples(train, mesh, compiled=compiled)
    if parallel.device.type != "cuda":
        return largest_on_cpu(samples, shape, length)
    stays_compiled = compiled and engine.compile != "auto"
    sample = sample_activations(
        shape,
        length,
        ACTIVATION_BYTES[stays_compiled],
        ATTENTION_BYTES[stays_compiled],
        precision.itemsize,
        mesh,
        engine.activation_checkpointing,
    )
    state = count_state(net, train, parallel)
    state = replace(state, buffers=state.buffers + teacher_bytes(train, on_gpu=True))
    return largest_on_gpu(samples, state, sample, torch.cuda.get_device_properties(parallel.device).total_memory)
