"""DeepSpeed over our net and our losses: ZeRO 0 to 3, offload, bf16 and fp16; one optimizer step is one of its steps."""

from __future__ import annotations

import atexit
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from textmill.config import RunConfig, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import autocast, open_device, peak_flops_of, torch_dtype
from textmill.engines import Mine, Named, Ranks, Sums, every
from textmill.engines.checksum_torch import bit_sums
from textmill.engines.deepspeed_config import json_of, read_file, settled, their_say
from textmill.engines.losses_torch import scored, summed_loss
from textmill.engines.meshes import check_batch
from textmill.engines.on_torch import TorchStep
from textmill.engines.optimizers.adam_torch import MOMENTS, groups_of
from textmill.engines.optimizers.step_torch import trained_of
from textmill.engines.ranks_torch import TorchRanks, open_ranks
from textmill.engines.shared_torch import asked_of, attention_order, hidden_states, part_of, token_shares
from textmill.engines.spikes import new_guard
from textmill.engines.zero_state_deepspeed import Masters
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import dropout_keys
from textmill.kernels.transfer_torch import on_device
from textmill.models import Weight
from textmill.models.lora import count_with, drops, saved_of
from textmill.models.nets_torch import Net, family_of, fill, host_copy, moments_in, net_of, new_net, weights_of
from textmill.tokens.batches.batch import Batch

WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


TOKENS = 1 << 14
"""`micro_batch: auto`: tokens that go through a device at a time."""


class Task(nn.Module):
    """Net and loss as one module: ZeRO-3 brings weights in by module, and the head's are used by both."""

    def __init__(self, net: Any, train: TrainConfig, precision: torch.dtype, mixed: bool) -> None:
        super().__init__()
        self.net, self.train_config, self.precision, self.mixed = net, train, precision, mixed

    def forward(
        self, inputs: Tensor, labels: Tensor, share: Tensor | None, keys: Tensor | None, documents: Tensor | None
    ) -> Any:
        """The loss of a micro-batch; without shares, the sums of its losses and of its right answers."""
        train, vocab = self.train_config, self.net.shape.vocab
        with autocast(inputs.device, self.precision) if self.mixed else nullcontext(), attention_order(inputs.device):
            x_ME = hidden_states(self.net, inputs, keys, documents, self.precision)
        if share is None:
            losses, right = scored(x_ME, self.net.head, labels.flatten(), vocab)
            return losses.sum(), right.sum()
        return summed_loss(
            x_ME, self.net.head, labels.flatten(), share.flatten(), vocab, train.label_smoothing, train.z_loss
        )


class OnDeepSpeed:
    """The Engine of `engine.kind: deepspeed`."""

    def __init__(
        self, engine: Any, adam: torch.optim.AdamW, task: Task, ranks: Ranks, micro_batch: int, stage: int
    ) -> None:
        self.engine, self.adam, self.ranks, self.first, self.stage = engine, adam, ranks, ranks.first, stage
        self.net: Net = task.net
        self.train, self.precision, self.micro_batch = task.train_config, task.precision, micro_batch
        self.device = torch.device(engine.device)
        self.trained = sum(
            math.prod(weight.shape) for weight, parameter in weights_of(self.net).values() if parameter.requires_grad
        )
        self.guard = new_guard(self.train, torch, lambda values: torch.tensor(values, device=self.device))
        self.masters = Masters(engine.optimizer, adam, stage, self.device)
        self.saved = {weight.name: weight for weight in saved_of(self.net.shape, self.net.lora)}
        self.frozen: dict[nn.Parameter, Tensor] = {}
        """What is saved and not trained, on the host, as it was given: it has no master, and the net may hold it in less than fp32."""

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each process."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """DeepSpeed's forward and backward by micro-batches, then its step, an empty one for a spike or a gradient that is not finite."""
        asked, asking = (int(count) for count in self.ranks.all_reduce(asked_of(batch)))
        # DeepSpeed takes means over processes, and scales a loss of fp16 after it has made its gradient: both go into the shares.
        scale = float(self.engine.optimizer.loss_scale) if self.precision == torch.float16 else 1.0
        shares = token_shares(batch, self.train.loss, asked, asking) * np.float32(self.ranks.world * scale)
        keys_N = (
            dropout_keys(self.train.seed, step, batch.samples).numpy() if drops(self.net.shape, self.net.lora) else None
        )
        for group in self.adam.param_groups:
            group["lr"] = lr * group["rate"]
        total = torch.zeros((), device=self.device)
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            last = rows.stop >= len(batch.inputs)
            self.engine.set_gradient_accumulation_boundary(last)
            loss = self._pass(
                batch, rows, on_device(shares[rows], self.device), None if keys_N is None else keys_N[rows]
            )
            total += loss.detach()
            if last:
                total /= self.ranks.world * scale
                if self.ranks.world > 1:
                    dist.all_reduce(total)
                spike = self.guard.judged(self.guard.state, total) if self.guard else None
                # DeepSpeed leaves out what is not finite, and has no other word for it.
                loss = loss if spike is None else loss * torch.where(spike, torch.nan, 1.0)
            # A new tensor, even where nothing is divided: DeepSpeed would divide its own by the micro-batches.
            with attention_order(self.device):  # states are made again as they were
                self.engine.backward(loss / scale, scale_wrt_gas=False)
        norm = None if self.stage else self._clip()
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm()) if norm is None else norm
        if self.guard:
            self.guard.state = self.guard.after(self.guard.state, total, spike, torch.isfinite(norm), step + 1)
        return TorchStep(total, norm, asked, torch.tensor(scale) if self.precision == torch.float16 else None)

    def _pass(self, batch: Batch, rows: slice, share: Tensor | None, keys: Any = None) -> Any:
        given = (
            batch.inputs[rows],
            batch.labels[rows],
            keys,
            None if batch.documents is None else batch.documents[rows],
        )
        inputs, labels, keys, documents = (None if one is None else on_device(one, self.device) for one in given)
        return self.engine(inputs, labels, share, keys, documents)

    def _clip(self) -> Tensor:
        """Without ZeRO: the gradient's norm; Adam clips by it, and leaves all as it is where it is not finite."""
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for _, parameter in self.net.named_parameters() if parameter.grad is not None]
        )
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        return norm

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Losses of this process's part of a batch by micro-batches, without dropout; then those of all."""
        batch = part_of(batch, self.ranks.world, self.ranks.rank)
        self.engine.eval()
        sums = [
            self._pass(batch, slice(start, start + self.micro_batch), None)
            for start in range(0, len(batch.inputs), self.micro_batch)
        ]
        self.engine.train()
        losses, right = (torch.stack(kind).cpu().double().sum() for kind in zip(*sums, strict=True))
        loss, asked, correct = self.ranks.all_reduce([float(losses), asked_of(batch)[0], int(right)])
        return Sums(loss, int(asked), int(correct))

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the masters; of a net with adapters, those alone."""
        return self._named(None, "", mine)

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of Adam's state; none before the first update."""
        for kind in MOMENTS if self.updates() else ():
            yield from self._named(kind, f"{kind}/", mine)

    def _named(self, kind: str | None, prefix: str, mine: Mine) -> Iterator[Named]:
        family, known = family_of(self.net), weights_of(self.net)
        for name, weight in self.saved.items():
            parameter = known[name][1]
            if parameter.requires_grad:
                whole = self.masters.read(parameter, kind)
            elif kind is None:
                whole = self.frozen[parameter]
            else:
                continue
            if mine(prefix + name):
                yield prefix + name, host_copy(family.to_checkpoint(weight, whole, self.net.shape)).numpy()

    def replica_checksums(self) -> dict[str, int]:
        """The bits of each weight of the net; under ZeRO-3 nobody holds a copy of another's part."""
        known = weights_of(self.net).items() if self.stage < 3 else ()
        return bit_sums({name: parameter.float() for name, (_, parameter) in known}) if known else {}

    def updates(self) -> int:
        """Updates done."""
        return self.masters.count()

    def scaling(self) -> dict[str, float]:
        """The loss scale, the good steps since it last fell and the overflows it still bears, in fp16."""
        scaler = self.engine.optimizer.loss_scaler if self.precision == torch.float16 else None
        if scaler is None or not scaler.dynamic:
            return {}
        return {
            "scale": scaler.cur_scale,
            "good": scaler.cur_iter - scaler.last_overflow_iter - 1,
            "left": scaler.cur_hysteresis,
        }

    def load(
        self,
        weights: Iterable[Named],
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Take weights and moments in checkpoint names and layout; each process keeps its pieces."""
        if scaling and self.scaling():
            scaler = self.engine.optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_hysteresis = float(scaling["scale"]), max(1, int(scaling["left"]))
            scaler.cur_iter, scaler.last_overflow_iter = int(scaling["good"]), -1
        fill(self.net, weights, where, self._put)
        self.masters.publish()
        self.masters.seed(updates)
        for kind, _, parameter, whole in moments_in(self.net, moments if updates else [], where):
            self.masters.write(parameter, whole, kind)

    def _put(self, weight: Weight, parameter: nn.Parameter, values: Tensor) -> None:
        self.masters.write(parameter, values)
        if not parameter.requires_grad and weight.name in self.saved:
            self.frozen[parameter] = values

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        return {
            "device": str(self.device), "precision": str(self.precision).removeprefix("torch."), "micro_batch": self.micro_batch,
            "processes": self.ranks.world, "parameters": count_with(self.net.shape, self.net.lora), "trained": self.trained,
            "peak_flops": peak_flops_of(self.device),
        }  # fmt: skip

    def close(self) -> None:
        """DeepSpeed takes its hooks off the net."""
        self.engine.destroy()


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that deepspeed, torchrun or srun started together, or this one alone."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Any, ranks: Ranks) -> OnDeepSpeed:
    """The engine with an empty net; `load` fills it."""
    assert isinstance(config.engine, DeepSpeedEngine)
    device = ranks.device if isinstance(ranks, TorchRanks) else open_device(config.engine.device)
    deepspeed = _deepspeed(device)
    theirs = read_file(config.engine.deepspeed_config)
    section = settled(config.engine, theirs)
    precision = torch_dtype(section.precision, device)
    if config.train.spikes.threshold and precision == torch.float16:
        raise TextmillError(
            "train.spikes.threshold: in fp16 DeepSpeed would take a spike for an overflow; set engine.precision=bf16, or take it out"
        )
    if precision == torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
        raise TextmillError(
            f"engine.precision: DeepSpeed has no fp16 on this {device.type}; set bf16 or fp32, or engine.kind=torch"
        )
    micro_batch = _micro_batch(section, config.train, shape, ranks.world)
    sizes = {"world": ranks.world, "micro_batch": micro_batch, "block": shape.parameters // shape.layers}
    told = json_of(config, section, theirs, precision=WORDS[precision], **sizes)
    torch.set_float32_matmul_precision("highest")
    with their_say(section):
        if section.zero == 3:
            with deepspeed.zero.Init(config_dict_or_path=told):
                net = net_of(shape, config.model.lora)
        else:
            net = new_net(shape, device, config.model.lora)
        net.recompute = section.recompute
        task = Task(net, config.train, precision, mixed=section.zero == 0)
        adam = _adam(net, config.train)
        engine, *_ = deepspeed.initialize(model=task, optimizer=adam, config=told)
    if section.zero == 3:
        deepspeed.zero.register_external_parameter(task, net.head)
    return OnDeepSpeed(engine, adam, task, ranks, micro_batch, int(section.zero))


def _adam(net: Any, train: TrainConfig) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps."""
    groups = groups_of((parameter, rule) for _, parameter, rule in trained_of(net, train))
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.betas[0], train.betas[1]), eps=train.epsilon, fused=True
    )


def _micro_batch(section: DeepSpeedEngine, train: TrainConfig, shape: Any, ways: int) -> int:
    """Samples at a time: as the section says, or the most that divide a process's samples and have no more than some tokens."""
    check_batch(train, ways, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    own = train.batch // ways
    most = max(1, TOKENS // (train.length or shape.positions))
    return max(size for size in range(1, own + 1) if own % size == 0 and size <= most)


def _deepspeed(device: torch.device) -> Any:
    """The package, quiet, on this device, with a group of processes to work in."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # of names that DeepSpeed still uses
    try:
        import deepspeed
    except ImportError:
        raise TextmillError("engine.kind: deepspeed needs DeepSpeed; run: pip install 'textmill[deepspeed]'") from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # else it compiles sums over shared memory, for minutes; gloo's do
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    deepspeed.init_distributed()
    return deepspeed


def _leave() -> None:
    """Without this a process was seen to hang at its end."""
    if dist.is_initialized():
        dist.destroy_process_group()
