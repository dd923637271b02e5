"""The DeepSpeed engine: ZeRO stages 0 to 3, offload, bf16 and fp16, with our net, loss and AdamW.

`MasterWeights` reads and writes the fp32 master weights and Adam's state under each ZeRO stage, by parameter:
DeepSpeed's own accessors fail without ZeRO or before the first step, and cannot set Adam's step count.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from textmill.config import EngineConfig, LoraConfig, TrainConfig
from textmill.config.deepspeed_json import explain_json, read_user_config
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import attention_order, autocast, open_device, peak_flops_of, torch_dtype
from textmill.engines import EvalSums, NameFilter, Step, all_names
from textmill.engines.deepspeed_config import build_json, explain_errors, fill_unset
from textmill.engines.distillation_torch import Teachers, open_teachers
from textmill.engines.losses_torch import forward_heads, join_sums, new_report, split_loss_terms, term_names
from textmill.engines.memory import deepspeed_micro_batch
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
from textmill.engines.on_torch import checksum_tensors, new_step
from textmill.engines.optimizers import TORCH_NAMES, groups_of, trained_of
from textmill.engines.ranks_torch import TorchRanks, open_ranks, own_device
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, to_checkpoint
from textmill.models.base_torch import BaseNet
from textmill.models.lora import count_with_adapters, saved_weights
from textmill.models.nets_torch import build_net, fill, host_copy, match_optimizer_state, new_net, parameters_of
from textmill.processes.ranks import Ranks
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import Batch

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Values of `engine.precision` by dtype."""


def new_ranks(engine: EngineConfig) -> Ranks:
    """The processes that deepspeed, torchrun or srun started together, or this single process."""
    return open_ranks(engine.device, engine.timeout)


class Settings(NamedTuple):
    """What DeepSpeed is called with."""

    section: DeepSpeedEngine
    """The config's section, with the values of `engine.deepspeed_config` where it has none."""
    precision: torch.dtype
    micro_batch: int
    config_json: dict[str, Any]


def check_settings(engine: EngineConfig, train: TrainConfig, shape: Shape, world: int) -> None:
    """Refuse settings that DeepSpeed cannot use here, and a missing DeepSpeed."""
    assert isinstance(engine, DeepSpeedEngine)
    _choose_settings(engine, train, shape, world, own_device(engine.device))


def _choose_settings(
    engine: DeepSpeedEngine, train: TrainConfig, shape: Shape, world: int, device: torch.device
) -> Settings:
    """The settings of a run, checked against the device, the batch and the user's own JSON."""
    if train.optimizer != "adamw":
        raise TextmillError(
            f"train.optimizer: the DeepSpeed engine has no {train.optimizer}; set engine.kind=torch, or "
            "train.optimizer=adamw"
        )
    deepspeed = _import_deepspeed(device)
    user = read_user_config(engine.deepspeed_config)
    section = fill_unset(engine, user)
    precision = torch_dtype(section.precision, device)
    if precision == torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
        raise TextmillError(
            f"engine.precision: DeepSpeed does not support fp16 on {device.type}; set bf16, fp32, or engine.kind=torch"
        )
    micro_batch = deepspeed_micro_batch(section, train, shape, world)
    sizes = {"world": world, "micro_batch": micro_batch, "block": shape.parameters // shape.layers}
    ds_config = build_json(section, train, user, precision=PRECISIONS[precision], **sizes)
    return Settings(section, precision, micro_batch, ds_config)


def new_engine(
    engine: EngineConfig, train: TrainConfig, shape: Shape, lora: LoraConfig | None, ranks: Ranks
) -> OnDeepSpeed:
    """The engine with an uninitialised net; `load` sets its weights."""
    assert isinstance(engine, DeepSpeedEngine)
    device = ranks.device if isinstance(ranks, TorchRanks) else open_device(engine.device)
    section, precision, micro_batch, ds_config = _choose_settings(engine, train, shape, ranks.world, device)
    if ranks.first and (ignored := explain_json(read_user_config(engine.deepspeed_config))[1]):
        reasons = "; ".join(f"{name}, because {reason}" for name, reason in ignored.items())
        print(f"{engine.deepspeed_config}: ignored: {reasons}")
    deepspeed = _import_deepspeed(device)
    _join_group(deepspeed, device)
    torch.set_float32_matmul_precision("highest")
    with explain_errors(section):
        if section.zero == 3:
            with deepspeed.zero.Init(config_dict_or_path=ds_config):
                net = build_net(shape, lora)
        else:
            net = new_net(shape, device, lora)
        net.activation_checkpointing = section.activation_checkpointing
        teachers = open_teachers(train, shape, device, precision)
        module = LossModule(net, train, precision, section.zero == 0, teachers)
        adam = _build_adam(net, train)
        wrapped, *_ = deepspeed.initialize(model=module, optimizer=adam, config=ds_config)
    if section.zero == 3:
        for parameter in (net.head, net.head_bias):
            if parameter is not None:
                deepspeed.zero.register_external_parameter(module, parameter)
    return OnDeepSpeed(wrapped, adam, module, ranks, micro_batch, int(section.zero))


def _build_adam(net: BaseNet, train: TrainConfig) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps."""
    groups = groups_of(trained_of(net, train))
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.betas[0], train.betas[1]), eps=train.epsilon, fused=True
    )


def _import_deepspeed(device: torch.device) -> Any:
    """The deepspeed package for this device, without its log messages."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    # DeepSpeed uses deprecated names of torch.distributed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        import deepspeed
    except ImportError:
        raise TextmillError("engine.kind: deepspeed needs DeepSpeed; run: pip install 'textmill[deepspeed]'") from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # else it compiles its own collectives for minutes; gloo suffices
    return deepspeed


def _join_group(deepspeed: Any, device: torch.device) -> None:
    """Give DeepSpeed the process group of the run; a process without a launcher gets one of its own."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_destroy_group)
    deepspeed.init_distributed()


def _destroy_group() -> None:
    """Without this, processes have hung at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


class OnDeepSpeed:
    """The Engine of `engine.kind: deepspeed`."""

    def __init__(
        self, engine: Any, adam: torch.optim.AdamW, module: LossModule, ranks: Ranks, micro_batch: int, stage: int
    ) -> None:
        self.engine = engine
        self.adam = adam
        self.ranks = ranks
        self.first = ranks.first
        self.stage = stage
        self.net: BaseNet = module.net
        self.train = module.train_config
        self.precision = module.precision
        self.micro_batch = micro_batch
        self.device = torch.device(engine.device)
        self.terms = term_names(self.net, self.train.distil)
        """The names of the terms of the objective besides the loss of the labels."""
        self.trained = sum(
            math.prod(weight.shape) for weight, parameter in parameters_of(self.net).values() if parameter.requires_grad
        )
        self.masters = MasterWeights(engine.optimizer, adam, stage, self.device)
        self.saved = {weight.name: weight for weight in saved_weights(self.net.shape, self.net.lora)}
        self.frozen: dict[nn.Parameter, Tensor] = {}
        """Host copies of weights that are saved but not trained: they have no fp32 master weight."""

    def samples_of(self, batch: int) -> slice:
        """An equal, contiguous part of the batch for each rank."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """Gradient accumulation over micro-batches, then DeepSpeed's step, unless a NaN skips it."""
        check_fields(batch, self.net.shape)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["rate"]
        loss_tokens, loss_samples, pairs = count_labels(batch, self.ranks)
        # DeepSpeed averages over ranks, and scales the fp16 loss after our loss has computed its gradient:
        # this factor of all weights corrects both.
        loss_scale = float(self.engine.optimizer.loss_scale) if self.precision == torch.float16 else 1.0
        factor = self.ranks.world * loss_scale
        weights_NT = token_weights(batch, self.train.loss, loss_tokens, loss_samples) * np.float32(factor)
        parts = micro_batches(
            batch,
            self.net,
            self.micro_batch,
            self.device,
            weights=weights_NT,
            keys=dropout_keys_of(self.net, self.train.seed, step, batch),
            pair_weight=factor / max([1, *pairs]),
        )
        total = new_report(self.terms, self.device)
        for last, micro_batch in parts:
            self.engine.set_gradient_accumulation_boundary(last)
            loss, reported = self.engine(*micro_batch)
            total += reported
            if last:
                total /= factor
                if self.ranks.world > 1:
                    dist.all_reduce(total)
                label_loss, terms = split_loss_terms(total, self.terms, pairs)
            # A new tensor, even if the scale is 1: DeepSpeed would otherwise divide `loss` by the accumulation steps.
            with attention_order(self.device):  # activation checkpointing uses the same backend again
                self.engine.backward(loss / loss_scale, scale_wrt_gas=False)
        norm = self._update_or_skip()
        logged_scale = torch.tensor(loss_scale) if self.precision == torch.float16 else None
        return new_step(label_loss, norm, loss_tokens, logged_scale, terms)

    def _update_or_skip(self) -> Tensor:
        """DeepSpeed's step, which skips the update if the gradient is not finite; returns the gradient norm."""
        norm = None if self.stage else self._clip()
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm()) if norm is None else norm

    def _clip(self) -> Tensor:
        """The gradient norm, without ZeRO; makes Adam clip by it, and skip the update if it is not finite."""
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for _, parameter in self.net.named_parameters() if parameter.grad is not None]
        )
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        return norm

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalSums:
        """Loss of this rank's part of a batch by micro-batches, without dropout; then an all-reduce."""
        check_fields(batch, self.net.shape)
        batch = part_of(batch, self.ranks.world, self.ranks.rank)
        self.engine.eval()
        parts = micro_batches(batch, self.net, self.micro_batch, self.device)
        sums = join_sums([self.engine(*micro_batch) for _, micro_batch in parts])
        self.engine.train()
        return sums_of_all_ranks(sums, batch, self.ranks)

    def weights(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the fp32 master weights; with LoRA, of the adapters only."""
        return self._host_copies(None, "", wanted)

    def optimizer_state(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of Adam's moments; none before the first update."""
        for kind in TORCH_NAMES if self.updates() else ():
            yield from self._host_copies(kind, f"{kind}/", wanted)

    def _host_copies(self, kind: str | None, prefix: str, wanted: NameFilter) -> Iterator[Named]:
        known = parameters_of(self.net)
        for name, weight in self.saved.items():
            parameter = known[name][1]
            if parameter.requires_grad:
                full = self.masters.read(parameter, kind)
            elif kind is None:
                full = self.frozen[parameter]
            else:
                continue
            if wanted(prefix + name):
                yield prefix + name, host_copy(to_checkpoint(weight, full)).numpy()

    def replica_checksums(self) -> dict[str, int]:
        """Checksums of the net's weights; none under ZeRO-3, which replicates nothing."""
        known = parameters_of(self.net).items() if self.stage < 3 else ()
        return checksum_tensors({name: parameter.float() for name, (_, parameter) in known}) if known else {}

    def updates(self) -> int:
        """Adam's step count."""
        return self.masters.count_updates()

    def scaling(self) -> dict[str, float]:
        """In fp16: the loss scale, the steps since the last overflow, and the overflows tolerated before it falls."""
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
        optimizer_state: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights and optimizer state in checkpoint names and layout; each rank keeps its shards."""
        if scaling and self.scaling():
            scaler = self.engine.optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_hysteresis = float(scaling["scale"]), max(1, int(scaling["left"]))
            scaler.cur_iter = int(scaling["good"])
            scaler.last_overflow_iter = -1
        fill(self.net, weights, where, self._store)
        self.masters.update_net()
        self.masters.reset_moments(updates)
        for kind, _, parameter, values in match_optimizer_state(self.net, optimizer_state if updates else [], where):
            self.masters.write(parameter, values, kind)

    def _store(self, weight: Weight, parameter: nn.Parameter, values: Tensor) -> None:
        self.masters.write(parameter, values)
        if not parameter.requires_grad and weight.name in self.saved:
            self.frozen[parameter] = values

    def describe(self) -> dict[str, Any]:
        """Device, precision and sizes."""
        return {
            "device": str(self.device),
            "precision": str(self.precision).removeprefix("torch."),
            "micro_batch": self.micro_batch,
            "processes": self.ranks.world,
            "peak_flops": peak_flops_of(self.device),
            "parameters": count_with_adapters(self.net.shape, self.net.lora),
            "trained": self.trained,
        }

    def close(self) -> None:
        """Let DeepSpeed remove its hooks from the net."""
        self.engine.destroy()


class LossModule(nn.Module):
    """Net and loss as one module: ZeRO-3 gathers weights by module, and both use the head's."""

    def __init__(
        self, net: BaseNet, train: TrainConfig, precision: torch.dtype, mixed: bool, teachers: Teachers | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.train_config = train
        self.precision = precision
        self.mixed = mixed
        self.teachers = teachers

    def forward(self, *tensors: Tensor | None) -> Any:
        """The loss of a `MicroBatch` and what to report of it; without token weights, its sums."""
        micro_batch = MicroBatch(*tensors)  # type: ignore[arg-type]
        device = micro_batch.inputs.device
        with autocast(device, self.precision) if self.mixed else nullcontext(), attention_order(device):
            heads = forward_heads(
                self.net,
                micro_batch,
                self.precision,
                teachers=self.teachers if micro_batch.weights is not None else None,
            )
        if micro_batch.weights is None:
            return heads.sums()
        return heads.training_loss(self.train_config, None, gradient_is_one=False)


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a parameter: elements `first` to `first + count`, stored in `flat` from `start` on."""

    flat: Tensor
    start: int
    count: int
    first: int
    group: int


class MasterWeights:
    """Master weights and moments under one ZeRO stage; `zero` is DeepSpeed's optimizer, or Adam itself at stage 0."""

    def __init__(self, zero: Any, adam: torch.optim.AdamW, stage: int, device: torch.device) -> None:
        self.zero = zero
        self.adam = adam
        self.stage = stage
        self.device = device

    def read(self, parameter: nn.Parameter, kind: str | None = None) -> Tensor:
        """A trained parameter's full master weight, or a moment of it, in fp32; all ranks call it together."""
        full = torch.zeros(_count_elements(parameter), device=self.device)
        if (fragment := self._find_fragment(parameter)) is not None:
            with self._swapped_in(fragment.group):
                full[fragment.first : fragment.first + fragment.count] = self._values(fragment, kind)
        if self.stage and dist.get_world_size() > 1:  # each element is on one rank, and zero on all others
            dist.all_reduce(full)
        return full.view(_full_shape(parameter))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, values: Tensor, kind: str | None = None) -> None:
        """Store this rank's fragment of a master weight, a moment or a frozen weight; then call `update_net` once."""
        if (fragment := self._find_fragment(parameter)) is not None:
            with self._swapped_in(fragment.group, changed=True):
                own = values.flatten()[fragment.first : fragment.first + fragment.count]
                self._values(fragment, kind).copy_(own)

    @torch.no_grad()
    def reset_moments(self, updates: int) -> None:
        """Set Adam's step count to `updates` and its moments to zero; for 0 updates, remove its state."""
        for group, flat in self._flat_groups():
            with self._swapped_in(group, changed=True):
                self.adam.state.pop(flat, None)
                if updates:
                    moments = {key: torch.zeros_like(flat) for key in TORCH_NAMES.values()}
                    self.adam.state[flat] = {"step": torch.tensor(float(updates), device=flat.device), **moments}
        if self.stage in (1, 2):
            self.zero._hp_optimizer_states_linked = False

    @torch.no_grad()
    def update_net(self) -> None:
        """Copy the master weights into the net's own weights, on every rank."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        if self.stage == 3:
            for group, _ in self._flat_groups():
                with self._swapped_in(group):
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if persistent := self.zero.persistent_parameters:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)

    def count_updates(self) -> int:
        """Adam's step count."""
        state = next(iter(self.adam.state.values()), None)
        return int(state["step"]) if state else 0

    def _values(self, fragment: Fragment, kind: str | None) -> Tensor:
        tensor = fragment.flat if kind is None else self.adam.state[fragment.flat][TORCH_NAMES[kind]]
        return tensor.detach().view(-1)[fragment.start : fragment.start + fragment.count]

    def _find_fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """This rank's fragment of a parameter; None if other ranks have all of it."""
        if self.stage == 3 and not parameter.requires_grad:
            own: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            first = own.ds_numel * dist.get_rank()
            count = min(own.ds_numel, _count_elements(parameter) - first)
            return Fragment(own, 0, count, first, 0) if count > 0 else None
        if self.stage == 0 or not parameter.requires_grad:
            return Fragment(parameter, 0, parameter.numel(), 0, 0)
        if self.stage == 3:
            group, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            first = size * dist.get_rank()
            count = min(size, _count_elements(parameter) - first)  # the last partitions are padded
            flat = self.zero.fp32_partitioned_groups_flat[group]
            return Fragment(flat, start, count, first, group) if count > 0 else None
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        group = mapping.param_group_index
        stored = mapping.hp_fragment_address
        own = mapping.lp_fragment_address
        flat = self.zero.single_partition_of_fp32_groups[group]
        return Fragment(flat, stored.start, stored.numel, own.start, group)

    def _flat_groups(self) -> list[tuple[int, Tensor]]:
        """The flat tensors that Adam updates on this rank, with DeepSpeed's group numbers."""
        if self.stage == 3:
            return list(enumerate(self.zero.fp32_partitioned_groups_flat))
        return [(number, flat) for number, group in enumerate(self.adam.param_groups) for flat in group["params"]]

    @contextmanager
    def _swapped_in(self, group: int, changed: bool = False) -> Iterator[None]:
        """Load a group that is offloaded to NVMe for the time of its use; write it back if it changed."""
        if self.stage != 3 or not self.zero._swappable_optimizer_subgroup(group):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changed:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        else:
            self.zero._release_swap_buffers(group)


def _count_elements(parameter: nn.Parameter) -> int:
    """Elements of the full parameter; ZeRO-3 leaves an empty tensor in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
