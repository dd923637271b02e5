"""PyTorch, one process a device: micro-batches, mixed precision, fused AdamW, clipping, and no wait for the device inside a step."""

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
from textmill.engines.losses_tensor_parallel_torch import shared_loss, shared_scores
from textmill.engines.losses_torch import scored, summed_loss
from textmill.engines.meshes import Mesh, mesh_of
from textmill.engines.optimizers.step_torch import Updates
from textmill.engines.parallel_torch import Layout
from textmill.engines.ranks_torch import TorchRanks, open_ranks
from textmill.engines.shared_torch import asked_of, attention_order, hidden_states, part_of, token_shares
from textmill.engines.spikes import new_guard
from textmill.kernels.dropout_torch import dropout_keys
from textmill.kernels.transfer_torch import OnItsWay, Room, on_device
from textmill.models.blockwise_torch import PLAIN, compiled_parts
from textmill.models.lora import count_with, drops, saved_of
from textmill.models.nets_torch import Net, fill, moments_in, named_copies, new_net, weights_of
from textmill.storage import faults
from textmill.tokens.batches.batch import Batch

FAULTS = True
CPU_LOGITS = 1 << 30
"""`micro_batch: auto` on a CPU, whose caches are small: as many samples as would have so many bytes of logits."""
GPU_ROOM = 0.6
"""The share of a GPU's memory that `micro_batch: auto` fills with weights, moments and what backward needs."""
WEIGHT_BYTES = 24
"""Of a weight: itself, its gradient, two moments, and copies in passing."""
STATE_BYTES = {True: 40, False: 72}
"""Kept for backward, of a token in a layer for each channel, in bf16: compiled (35 seen) and not."""


class TorchStep:
    """Numbers on their way to the host; reading one waits for this step, and for none that was begun after it."""

    def __init__(
        self, loss: Tensor, norm: Tensor, asked: int, scale: Tensor | None = None, news: str | None = None
    ) -> None:
        numbers = [loss, norm] if scale is None else [loss, norm, scale]
        self.asked, self.news, self._numbers = (
            asked,
            news,
            OnItsWay(torch.stack([number.to(loss) for number in numbers])),
        )

    @property
    def ready(self) -> bool:
        """Whether reading would wait for nothing."""
        return self._numbers.there

    @property
    def loss(self) -> float:
        """The step's loss before the update."""
        return float(self._numbers.values()[0])

    @property
    def norm(self) -> float:
        """The global gradient norm before clipping."""
        return float(self._numbers.values()[1])

    @property
    def skipped(self) -> bool:
        """Whether the update was left out, because loss or gradient was not finite."""
        return not math.isfinite(self.norm)

    @property
    def scale(self) -> float | None:
        """What the loss was multiplied by in fp16."""
        return next(iter(self._numbers.values()[2:]), None)


class OnTorch:
    """The Engine of `engine.kind: torch`."""

    def __init__(
        self, net: Net, train: TrainConfig, layout: Layout, ranks: Ranks, micro_batch: int, precision: torch.dtype,
        compiled: bool, told: str, asked: bool,
    ) -> None:  # fmt: skip
        """`told` is what a person is to know of compiling, `asked` whether anyone wanted it."""
        self.told, self.asked = told, asked
        self.net, self.train, self.layout, self.ranks, self.first = net, train, layout, ranks, ranks.first
        self.micro_batch, self.precision = micro_batch, precision
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.parts = compiled_parts() if compiled else PLAIN
        self.optimizer = Updates(net, train, layout, compiled=compiled and asked)
        layout.watch(self.optimizer.parameters)
        self.scaler = Scaler(self.device) if precision == torch.float16 else None
        self.guard = new_guard(train, torch, lambda values: torch.tensor(values, device=self.device))
        # Other processes are met in the middle of backward, from hooks that a recording does not replay.
        recorded = compiled and self.device.type == "cuda" and ranks.world == 1
        self.one_pass = Recorded(self._pass, self.optimizer.parameters) if recorded else self._pass
        self.room: Room | None = None
        """Memory for the copies that a save takes, if this process has all of them and a GPU."""

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each process."""
        rows = batch // self.layout.mesh.ways
        return slice(self.layout.sample_part * rows, (self.layout.sample_part + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """Forward and backward by micro-batches, then one update; a non-finite gradient or a spike leaves the weights alone."""
        with Compiling(self.parts is not PLAIN) as compiling:
            loss, norm, asked, scale = self._step(batch, step, lr, compiling)
        return TorchStep(loss, norm, asked, scale, compiling.news)

    def _step(
        self, batch: Batch, step: int, lr: float, compiling: Compiling
    ) -> tuple[Tensor, Tensor, int, Tensor | None]:
        if (
            self.room is None and self.device.type == "cuda" and self.ranks.world == 1
        ):  # the first step compiles meanwhile
            saved = [*saved_of(self.net.shape, self.net.lora), *self.optimizer.stated()]
            self.room = Room([math.prod(weight.shape) for weight in saved])
        asked, asking = (int(count) // self.layout.mesh.tensor for count in self.ranks.all_reduce(asked_of(batch)))
        shares = token_shares(batch, self.train.loss, asked, asking)
        if faults.is_due("nan", step):
            shares = shares * np.float32("nan")
        if faults.is_due("flip", step):
            flip_a_bit(self.layout.own(self.optimizer.parameters[0]))
        keys_N = (
            dropout_keys(self.train.seed, step, batch.samples).numpy() if drops(self.net.shape, self.net.lora) else None
        )
        total = torch.zeros((), device=self.device)
        scale = self.scaler.scale if self.scaler else None
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            keys = None if keys_N is None else on_device(keys_N[rows], self.device)
            inputs, labels, share = (
                on_device(array[rows], self.device) for array in (batch.inputs, batch.labels, shares)
            )
            # The scale goes in with the shares: the head's gradient is made in fp16 with the loss itself.
            share = share if scale is None else share * scale
            with self.layout.last_pass(rows.stop >= len(batch.inputs)):
                total += self._passed(compiling, inputs, labels, share, keys, self._documents(batch, rows))
        total = self.layout.total(total)
        loss = total if scale is None else total / scale
        spike = self.guard.judged(self.guard.state, loss) if self.guard else None
        norm = self.optimizer.step(lr, scale, spike)
        if self.scaler:
            self.scaler.move(torch.isfinite(norm))
        if self.guard:
            self.guard.state = self.guard.after(self.guard.state, loss, spike, torch.isfinite(norm), step + 1)
        return loss, norm, asked, scale

    def _passed(self, compiling: Compiling, *given: Any) -> Tensor:
        """A pass; where it cannot be compiled, and nobody asked for that, it and all after it as they are written."""
        if self.asked or not compiling.compiles:
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
        self.parts, self.one_pass = PLAIN, self._pass
        return self.one_pass(*given)

    def _pass(
        self, inputs: Tensor, labels: Tensor, share: Tensor, keys: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        """The loss of a micro-batch; its gradients are added to those there are."""
        with attention_order(self.device):  # backward too, where states are made again
            with autocast(self.device, self.precision):
                x_ME = hidden_states(self.net, inputs, keys, documents, self.precision, self.parts)
            asked = (x_ME, self.net.head, labels.flatten(), share.flatten(), self.net.shape.vocab)
            smoothing, z, peers = self.train.label_smoothing, self.train.z_loss, self.layout.peers
            loss = (
                shared_loss(*asked, smoothing, z, peers)
                if peers
                else summed_loss(*asked, smoothing, z, self.net.fp8, ends=True)
            )
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Losses of this process's part of a batch by micro-batches, without dropout; then those of all."""
        batch = part_of(batch, self.layout.mesh.ways, self.layout.sample_part)
        sums, correct = [], []
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            inputs, labels = on_device(batch.inputs[rows], self.device), on_device(batch.labels[rows], self.device)
            with autocast(self.device, self.precision):
                x_ME = hidden_states(self.net, inputs, None, self._documents(batch, rows), self.precision)
            asked = (x_ME, self.net.head, labels.flatten(), self.net.shape.vocab)
            losses, right = shared_scores(*asked, self.layout.peers) if self.layout.peers else scored(*asked)
            sums.append(losses.sum())
            correct.append(right.sum())
        # Doubles are for the host: not every device has them.
        total = float(torch.stack(sums).cpu().double().sum())
        self.layout.rest()
        found = self.ranks.all_reduce([total, asked_of(batch)[0], int(torch.stack(correct).sum())])
        summed = [value / self.layout.mesh.tensor for value in found]
        return Sums(summed[0], int(summed[1]), int(summed[2]))

    def _documents(self, batch: Batch, rows: slice) -> Tensor | None:
        return None if batch.documents is None else on_device(batch.documents[rows], self.device)

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the weights; of a net with adapters, those alone."""
        known = {name: parameter for name, (_, parameter) in weights_of(self.net).items()}
        saved = [known[weight.name] for weight in saved_of(self.net.shape, self.net.lora)]
        kept = {parameter: self.layout.own(parameter) for parameter in saved}
        return named_copies(self.net, kept, mine=mine, whole=self.layout.whole)

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the optimizer's state; none before the first update."""
        for kind, state in self.optimizer.states():
            yield from named_copies(self.net, state, f"{kind}/", mine, self.layout.whole)

    def replica_checksums(self) -> dict[str, int]:
        """The bits of what this process holds of each weight, summed on its device; processes that hold the same have the same."""
        layout, members = self.layout, weights_of(self.net).values()
        return bit_sums({layout.name_of(weight): layout.own(parameter) for weight, parameter in members})

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
        fill(
            self.net,
            weights,
            where,
            lambda weight, one, whole: self.layout.own(one).copy_(self.layout.part(weight, whole)),
        )
        if self.scaler and scaling:
            self.scaler.take(scaling)
        for kind, weight, parameter, whole in moments_in(self.net, moments if updates else [], where):
            self.optimizer.take(kind, parameter, self.layout.part(weight, whole), updates)

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        return {
            "device": str(self.device), "precision": "float8" if self.net.fp8 else str(self.precision).removeprefix("torch."),
            "micro_batch": self.micro_batch, "processes": self.ranks.world, "compiling": self.told,
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


def new_engine(config: RunConfig, shape: Any, ranks: Ranks) -> OnTorch:
    """The engine with an empty net; `load` fills it."""
    engine = config.engine
    assert isinstance(engine, TorchEngine)
    mesh = mesh_of(config, shape, ranks.world)
    device = ranks.device if isinstance(ranks, TorchRanks) else open_device(engine.device)
    precision = torch_dtype(engine.precision, device)
    if engine.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    compiled, told = compiling(engine, config.train, shape, device, ranks.world)
    micro_batch, asked = engine.micro_batch, engine.compile != "auto"
    if micro_batch == "auto":
        micro_batch = _fitting(config.train, shape, mesh, device, precision, compiled=compiled, asked=asked)
    layout = Layout(mesh, ranks.rank, device)
    net = new_net(shape, device, config.model.lora, layout.place)
    net.recompute = engine.recompute
    if engine.precision == "fp8":
        check_fp8(device)
        net.use_fp8()
    return OnTorch(net, config.train, layout, ranks, micro_batch, precision, compiled, told, asked)


def _fitting(
    train: TrainConfig,
    shape: Any,
    mesh: Mesh,
    device: torch.device,
    precision: torch.dtype,
    *,
    compiled: bool,
    asked: bool,
) -> int:
    """The largest part of a process's samples that a simple rule lets through at once; what is compiled has one size for a whole run.

    Where nobody asked for compiling, there is room to go on without.
    """
    length, batch = train.length or shape.positions, (math.gcd(*train.sizes) if compiled else train.batch) // mesh.ways
    fits = CPU_LOGITS // (4 * length * shape.padded_vocab)
    if device.type == "cuda":
        room = GPU_ROOM * torch.cuda.get_device_properties(device).total_memory - WEIGHT_BYTES * shape.parameters
        layer = STATE_BYTES[compiled and asked] * shape.width + (
            8 * shape.heads * length if shape.attention_dropout else 0
        )
        fits = int(room / (layer * shape.layers * length * precision.itemsize / 2))
    return max(size for size in range(1, batch + 1) if batch % size == 0 and size <= max(1, fits))
