"""The DeepSpeed engine: ZeRO 0 to 3, offload, bf16 and fp16, with our net and loss; one optimizer step is one of its steps."""

from __future__ import annotations

import atexit
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from textmill.config import RunConfig, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import open_device, peak_flops_of, torch_dtype
from textmill.engines import Mine, Named, Ranks, Sums, every
from textmill.engines.checksum_torch import bit_sums
from textmill.engines.deepspeed_config import json_of, read_file, settled, their_say
from textmill.engines.loss_module_torch import LossModule
from textmill.engines.meshes import check_batch
from textmill.engines.optimizers.adam_torch import MOMENTS, groups_of
from textmill.engines.optimizers.step_torch import trained_of
from textmill.engines.ranks_torch import TorchRanks, open_ranks
from textmill.engines.shared_torch import attention_order, count_loss_tokens, part_of, token_weights
from textmill.engines.spikes import new_guard
from textmill.engines.step_result_torch import TorchStep
from textmill.engines.zero_state_deepspeed import Masters
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import dropout_keys
from textmill.kernels.transfer_torch import on_device
from textmill.models import Shape, Weight, to_checkpoint
from textmill.models.base_torch import BaseNet
from textmill.models.lora import count_with, drops, saved_of
from textmill.models.nets_torch import build_net, fill, host_copy, moments_in, new_net, parameters_of
from textmill.tokens.batches.batch import Batch

WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


TOKENS = 1 << 14
"""`micro_batch: auto`: most tokens of a micro-batch."""


class OnDeepSpeed:
    """The Engine of `engine.kind: deepspeed`."""

    def __init__(
        self, engine: Any, adam: torch.optim.AdamW, module: LossModule, ranks: Ranks, micro_batch: int, stage: int
    ) -> None:
        self.engine, self.adam, self.ranks, self.first, self.stage = engine, adam, ranks, ranks.first, stage
        self.net: BaseNet = module.net
        self.train, self.precision, self.micro_batch = module.train_config, module.precision, micro_batch
        self.device = torch.device(engine.device)
        self.trained = sum(
            math.prod(weight.shape) for weight, parameter in parameters_of(self.net).values() if parameter.requires_grad
        )
        self.guard = new_guard(self.train, torch, lambda values: torch.tensor(values, device=self.device))
        self.masters = Masters(engine.optimizer, adam, stage, self.device)
        self.saved = {weight.name: weight for weight in saved_of(self.net.shape, self.net.lora)}
        self.frozen: dict[nn.Parameter, Tensor] = {}
        """What is saved and not trained, on the host, as it was loaded: it has no fp32 master, and the net may have it in less."""

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each rank."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """DeepSpeed's forward and backward by micro-batches, then its step, which a spike or a non-finite gradient skips."""
        tokens, samples = (int(count) for count in self.ranks.all_reduce(count_loss_tokens(batch)))
        # DeepSpeed takes means over ranks, and scales a loss of fp16 after its gradient is computed: both go into the weights.
        scale = float(self.engine.optimizer.loss_scale) if self.precision == torch.float16 else 1.0
        token_weight = token_weights(batch, self.train.loss, tokens, samples) * np.float32(self.ranks.world * scale)
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
                batch, rows, on_device(token_weight[rows], self.device), None if keys_N is None else keys_N[rows]
            )
            total += loss.detach()
            if last:
                total /= self.ranks.world * scale
                if self.ranks.world > 1:
                    dist.all_reduce(total)
                spike = self.guard.judged(self.guard.state, total) if self.guard else None
                # DeepSpeed skips what is not finite, and has no other way to skip an update.
                loss = loss if spike is None else loss * torch.where(spike, torch.nan, 1.0)
            # A new tensor, even where nothing is divided: DeepSpeed would divide its own by the micro-batches.
            with attention_order(self.device):  # activations are computed again in the same way
                self.engine.backward(loss / scale, scale_wrt_gas=False)
        norm = None if self.stage else self._clip()
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm()) if norm is None else norm
        if self.guard:
            self.guard.state = self.guard.after(self.guard.state, total, spike, torch.isfinite(norm), step + 1)
        return TorchStep(total, norm, tokens, torch.tensor(scale) if self.precision == torch.float16 else None)

    def _pass(self, batch: Batch, rows: slice, weights: Tensor | None, keys: Any = None) -> Any:
        given = (
            batch.inputs[rows],
            batch.labels[rows],
            keys,
            None if batch.documents is None else batch.documents[rows],
        )
        inputs, labels, keys, documents = (None if one is None else on_device(one, self.device) for one in given)
        return self.engine(inputs, labels, weights, keys, documents)

    def _clip(self) -> Tensor:
        """Without ZeRO: the gradient's norm; Adam clips by it, and skips the update where it is not finite."""
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for _, parameter in self.net.named_parameters() if parameter.grad is not None]
        )
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        return norm

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Losses of this rank's part of a batch by micro-batches, without dropout; then summed over ranks."""
        batch = part_of(batch, self.ranks.world, self.ranks.rank)
        self.engine.eval()
        sums = [
            self._pass(batch, slice(start, start + self.micro_batch), None)
            for start in range(0, len(batch.inputs), self.micro_batch)
        ]
        self.engine.train()
        losses, right = (torch.stack(kind).cpu().double().sum() for kind in zip(*sums, strict=True))
        loss, tokens, correct = self.ranks.all_reduce([float(losses), count_loss_tokens(batch)[0], int(right)])
        return Sums(loss, int(tokens), int(correct))

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the fp32 masters; of a net with adapters, the adapters alone."""
        return self._named(None, "", mine)

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of Adam's state; none before the first update."""
        for kind in MOMENTS if self.updates() else ():
            yield from self._named(kind, f"{kind}/", mine)

    def _named(self, kind: str | None, prefix: str, mine: Mine) -> Iterator[Named]:
        known = parameters_of(self.net)
        for name, weight in self.saved.items():
            parameter = known[name][1]
            if parameter.requires_grad:
                whole = self.masters.read(parameter, kind)
            elif kind is None:
                whole = self.frozen[parameter]
            else:
                continue
            if mine(prefix + name):
                yield prefix + name, host_copy(to_checkpoint(weight, whole)).numpy()

    def replica_checksums(self) -> dict[str, int]:
        """The bits of each weight of the net; under ZeRO-3 no rank has a copy of another's shard."""
        known = parameters_of(self.net).items() if self.stage < 3 else ()
        return bit_sums({name: parameter.float() for name, (_, parameter) in known}) if known else {}

    def updates(self) -> int:
        """Updates done."""
        return self.masters.count()

    def scaling(self) -> dict[str, float]:
        """The loss scale in fp16, the good steps since it last fell and the overflows it still tolerates."""
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
        """Take weights and moments in checkpoint names and layout; each rank keeps its shards."""
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


def new_engine(config: RunConfig, shape: Shape, ranks: Ranks) -> OnDeepSpeed:
    """The engine, its net without values; `load` fills it."""
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
                net = build_net(shape, config.model.lora)
        else:
            net = new_net(shape, device, config.model.lora)
        net.recompute = section.recompute
        module = LossModule(net, config.train, precision, mixed=section.zero == 0)
        adam = _adam(net, config.train)
        engine, *_ = deepspeed.initialize(model=module, optimizer=adam, config=told)
    if section.zero == 3:
        deepspeed.zero.register_external_parameter(module, net.head)
    return OnDeepSpeed(engine, adam, module, ranks, micro_batch, int(section.zero))


def _adam(net: BaseNet, train: TrainConfig) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps."""
    groups = groups_of((parameter, rule) for _, parameter, rule in trained_of(net, train))
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.betas[0], train.betas[1]), eps=train.epsilon, fused=True
    )


def _micro_batch(section: DeepSpeedEngine, train: TrainConfig, shape: Shape, ranks: int) -> int:
    """Samples at a time: as configured, or the largest divisor of a rank's samples with at most TOKENS tokens."""
    check_batch(train, ranks, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    own = train.batch // ranks
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
