"""Memory by part, the arithmetic of activations that all engines share, and the largest micro-batch that fits.

The GPT-2 of 124M parameters in fp32 with AdamW on one GPU: weights 0.5 GB, gradients 0.5 GB, optimizer state 1 GB
(two moments). A compiled net in bf16 keeps 32 bytes of activations per channel of a token in a layer: for a sample of
1,024 tokens 32 x 768 x 12 x 1,024 = 0.3 GB, times the samples of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from textmill.config import EngineConfig, JaxEngine, LoraConfig, TorchEngine, TrainConfig
from textmill.config.deepspeed_json import read_user_config
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import autocast
from textmill.engines.deepspeed_config import fill_unset
from textmill.engines.distillation import teacher_bytes
from textmill.engines.losses_torch import CPU_LOGITS, GPU_TOKENS
from textmill.engines.meshes import Mesh, check_batch, mesh_of, mesh_of_devices, stage_blocks
from textmill.engines.optimizers import Member, open_optimizer, optimizer_of, state_names, trained_of
from textmill.engines.parallel_torch import BUCKET_BYTES, Parallel
from textmill.models import Shape, Weight, open_family
from textmill.models.base_torch import BaseNet
from textmill.models.lora import weights_with_adapters
from textmill.models.nets_torch import build_net, own_parameters_of
from textmill.models.parameter_groups import rules_of

ACTIVATION_BYTES = {True: 32.0, False: 38.0}
"""On a GPU, of bf16 activations, per channel of a token in a layer: compiled and eager (bench/LOG.md compares both with
measured peaks)."""
ATTENTION_BYTES = {True: 4.0, False: 8.0}
"""The same for each attention weight, if these have dropout; the second is an upper bound."""
JAX_ACTIVATION_BYTES = 48.0
"""The same with JAX; not measured."""
DIVIDED = 24 / 34
"""The fraction of activations that tensor-parallel ranks divide; with sequence parallelism they divide the rest too
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models")."""
CPU_LOGITS_BYTES = 1 << 30
"""On a CPU, whose caches are small: most bytes of logits that a micro-batch would have."""
GPU_FRACTION = 0.6
"""The fraction of a GPU's memory for weights, moments and the activations that backward needs."""
SPARE_BYTES = 8
SPARE_ACTIVATIONS = 1.25
"""More than the estimate, so that a run never ends for lack of memory: bytes for each weight, times the activations."""
DEEPSPEED_TOKENS = 1 << 14
"""Most tokens of a micro-batch in the DeepSpeed engine."""
MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Of a trained weight under ZeRO: the fp32 master copy, and AdamW's two moments."""
FIRST_GROUP = 1 << 20
"""The number of the first fake process group: torch names groups by their numbers."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Device:
    """The device that an estimate is for."""

    on_gpu: bool
    memory: int
    """Bytes."""
    precision: str
    """That of `engine.precision: auto` on it."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes of each device."""

    memory: Memory
    host: int
    """Bytes of the machine's memory for each device: what is offloaded."""
    micro_batch: int
    passes: int
    """Forward and backward passes of a step: gradient accumulation."""
    mesh: Mesh
    itemsize: int
    """Bytes of a number in matmuls."""
    precision: str
    state: State
    engine: str


class Estimator:
    """Estimates for one net and its training, by engine and devices; the state on a mesh is counted once."""

    def __init__(self, shape: Shape, train: TrainConfig, lora: LoraConfig | None = None) -> None:
        self.shape = shape
        self.train = train
        self.lora = lora
        self.length = train.length or shape.positions
        self._states: dict[Any, State] = {}

    @cached_property
    def trained(self) -> list[Weight]:
        """The weights that the run changes."""
        rules = rules_of(self.shape, self.train, self.lora)
        return [weight for weight in weights_with_adapters(self.shape, self.lora) if rules[weight.name].trained]

    def estimate(self, engine: EngineConfig, world: int, device: Device, *, exact: bool = True) -> Estimate:
        """The estimate on so many devices; of a pipeline, on the first stage, with the logits of the last.

        `exact=False` counts two small nets instead of the entire one.
        """
        mesh = mesh_for(engine, self.train, self.shape, world)
        name = device.precision if engine.precision == "auto" else engine.precision
        itemsize = DTYPES[name].itemsize
        state = self._state(engine, mesh, itemsize, exact)
        state = replace(state, buffers=state.buffers + teacher_bytes(self.train, on_gpu=device.on_gpu))
        sample = self._sample_bytes(engine, mesh, device, name)
        micro = self._micro_batch(engine, mesh, device, state, sample)
        rows = -(-self.shape.padded_vocab // mesh.tensor)
        causal = open_family(self.shape.family).OBJECTIVE == "next_token"
        tokens = round(micro * self.length * (1.0 if causal else self.train.masked.probability))
        logits = _logits_bytes(tokens, rows, self.shape.width, itemsize, device.on_gpu, mesh.tensor > 1)
        passes = -(-self.train.batch // (mesh.data_ranks * micro))
        activations = round(micro * sample * passes_kept(mesh, passes))
        group = 1.0
        if engine.activation_checkpointing:
            group = min(1.0, engine.activation_checkpointing / self.shape.layers)
        if group < 1 and mesh.pipeline == 1:  # the logits are freed before the last group of blocks is computed again
            every = self._sample_bytes(engine.model_copy(update={"activation_checkpointing": 0}), mesh, device, name)
            logits = max(0, logits - round(micro * group * every))
        if isinstance(engine, TorchEngine) and device.on_gpu and itemsize < MASTER_BYTES:
            # At the loss of the only pass there are no gradients yet, and in backward they replace the copies.
            copies = round(itemsize * self._copied(group * passes_kept(mesh, passes)) / mesh.tensor)
            activations += copies if passes > 1 else max(0, copies - state.gradients)
        memory = Memory(state.weights, state.gradients, state.optimizer, state.buffers, activations, logits)
        return Estimate(memory, state.host, micro, passes, mesh, itemsize, name, state, engine.kind)

    def _state(self, engine: EngineConfig, mesh: Mesh, itemsize: int, exact: bool) -> State:
        key = (engine.kind, getattr(engine, "zero", None), mesh, itemsize, exact)
        if key not in self._states:
            shape: Any = self.shape
            if exact or shape.layers < 4 or self.lora:
                state = self._count(engine, shape, mesh, itemsize)
            else:  # the first stage of a pipeline as a net of its own, though it may have no head
                stage = replace(mesh, pipeline=1)
                two_blocks = self._count(engine, replace(shape, layers=2), stage, itemsize)
                three_blocks = self._count(engine, replace(shape, layers=3), stage, itemsize)
                blocks = sum(map(len, stage_blocks(mesh, shape.layers, 0)))
                state = _extrapolate(two_blocks, three_blocks, blocks)
            self._states[key] = state
        return self._states[key]

    def _count(self, engine: EngineConfig, shape: Shape, mesh: Mesh, itemsize: int) -> State:
        if isinstance(engine, TorchEngine):
            return state_on_torch(self.train, shape, self.lora, mesh)
        if isinstance(engine, JaxEngine):
            return state_on_jax(self.train, shape, self.lora, mesh)
        return state_on_deepspeed(engine, self.train, shape, self.lora, mesh.replicate, itemsize)

    def _sample_bytes(self, engine: EngineConfig, mesh: Mesh, device: Device, precision: str) -> float:
        """Bytes of activations of one sample: measured constants on a GPU, a traced forward pass on a CPU."""
        length = self.length
        itemsize = DTYPES[precision].itemsize
        if device.on_gpu or isinstance(engine, JaxEngine):
            compiled = is_compiled(engine, mesh, device)
            per_channel = JAX_ACTIVATION_BYTES if isinstance(engine, JaxEngine) else ACTIVATION_BYTES[compiled]
            per_weight = ATTENTION_BYTES[compiled]
            return sample_activations(
                self.shape, length, per_channel, per_weight, itemsize, mesh, engine.activation_checkpointing
            )
        key = ("sample", length, precision, engine.activation_checkpointing)
        if key not in self._states:
            traced = saved_per_sample(self.shape, length, DTYPES[precision], engine.activation_checkpointing)
            self._states[key] = State(0, 0, 0, round(traced))
        return self._states[key].buffers / mesh.tensor

    def _copied(self, blocks: float) -> float:
        """Numbers in the copies in half precision that autocast makes of matrices, and that backward needs: of the head
        and a fraction of the blocks. With FSDP they are those of all ranks: a copy stays when its block is freed."""
        shape = self.shape
        matrices = [weight for weight in shape.weights() if len(weight.shape) == 2]
        in_blocks = sum(weight.size for weight in matrices if 1 <= weight.depth <= shape.layers)
        return blocks * in_blocks + shape.padded_vocab * shape.width

    def _micro_batch(self, engine: EngineConfig, mesh: Mesh, device: Device, state: State, sample: float) -> int:
        if not isinstance(engine, TorchEngine | JaxEngine):
            return deepspeed_micro_batch(engine, self.train, self.shape, mesh.data_ranks)
        if engine.micro_batch != "auto":
            return engine.micro_batch
        samples = rank_samples(self.train, mesh, compiled=is_compiled(engine, mesh, device))
        if not device.on_gpu:
            return largest_on_cpu(samples, self.shape, self.length)
        return largest_on_gpu(samples, state, sample, device.memory)


def mesh_for(engine: EngineConfig, train: TrainConfig, shape: Shape, world: int) -> Mesh:
    """The mesh of any engine on so many devices, checked like that of a run."""
    if isinstance(engine, TorchEngine):
        return mesh_of(engine, train, shape, world)
    if isinstance(engine, JaxEngine):
        return mesh_of_devices(engine, train, shape, world)
    check_batch(train, world, engine.micro_batch, "device", "devices")
    return Mesh(replicate=world)


def is_compiled(engine: EngineConfig, mesh: Mesh, device: Device) -> bool:
    """Whether a long run on this device compiles its net."""
    if not isinstance(engine, TorchEngine):
        return False
    if engine.compile != "auto":
        return engine.compile
    return device.on_gpu and mesh.ranks_per_sample == 1 and not engine.deterministic


def _extrapolate(two_blocks: State, three_blocks: State, layers: int) -> State:
    """The state of a net of `layers` equal blocks from those of two and three blocks."""
    values = {}
    for name, value in vars(two_blocks).items():
        one_block = getattr(three_blocks, name) - value
        values[name] = value + (layers - 2) * one_block
    return State(**values)


def _logits_bytes(tokens: int, rows: int, width: int, itemsize: int, on_gpu: bool, divided: bool) -> int:
    """Logits of two chunks, with the copies that the loss of one needs, and the gradient of the hidden states."""
    chunk = GPU_TOKENS if on_gpu else max(1, CPU_LOGITS // rows)
    copy_bytes = 4  # of each logit, for copies in fp32
    if on_gpu:
        copy_bytes = 8 if divided else 0
    this_chunk = min(tokens, chunk) * rows * (itemsize + copy_bytes)
    # A chunk's logits are computed before those of the chunk before are freed.
    chunk_before = max(0, min(tokens - chunk, chunk)) * rows * itemsize
    return this_chunk + chunk_before + tokens * width * itemsize


def saved_bytes(
    shape: Shape, samples: int, length: int, precision: torch.dtype, activation_checkpointing: int = 0
) -> int:
    """Bytes of all tensors that autograd keeps in one forward pass, without those of the net itself."""
    # Imported here: it takes a second, and only plans for a CPU need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net = build_net(shape)
        net.activation_checkpointing = activation_checkpointing
        parameters = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
        saved: dict[int, Any] = {}

        def save(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                saved[storage._cdata] = storage  # kept alive, so that no other tensor gets its address
            return tensor

        ids = torch.zeros(samples, length, dtype=torch.int32)
        keys = torch.zeros(samples, dtype=torch.int32) if shape.uses_dropout else None
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, autocast(torch.device("cpu"), precision):
            net(ids, keys)
        return sum(int(storage.nbytes()) for storage in saved.values())


def saved_per_sample(shape: Any, length: int, precision: torch.dtype, activation_checkpointing: int) -> float:
    """Bytes of activations of one sample at the peak, from nets of one and two blocks: all blocks are alike."""
    one_block, two_blocks = (saved_bytes(replace(shape, layers=layers), 1, length, precision) for layers in (1, 2))
    block = two_blocks - one_block
    if not activation_checkpointing:
        return float(one_block + block * (shape.layers - 1))
    one_group, two_groups = (saved_bytes(replace(shape, layers=layers), 1, length, precision, 1) for layers in (1, 2))
    groups = -(-shape.layers // activation_checkpointing)
    return float(
        one_group + (two_groups - one_group) * (groups - 1) + block * min(activation_checkpointing, shape.layers)
    )


@dataclass(frozen=True)
class State:
    """Bytes of a rank that do not depend on the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    """Optimizer state, and the average of `train.ema_window`."""
    buffers: int
    """Gathered weights and flat gradients for collectives."""
    host: int = 0
    """Bytes in the machine's memory instead of the device's: what DeepSpeed offloads."""
    elements: int = 0
    """Weights of this rank."""
    outside_blocks: int = 0
    """Bytes of those weights that belong to no block: FSDP keeps them gathered from forward to backward."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part, at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())


def sample_activations(
    shape: Shape,
    length: int,
    per_channel: float,
    per_weight: float,
    itemsize: int,
    mesh: Mesh,
    activation_checkpointing: int,
) -> float:
    """Bytes of activations that backward needs of one sample; those for a channel and an attention weight are in bf16.

    With activation checkpointing, a group of blocks keeps its input, and one group at a time has all its activations.
    """
    per_channel *= getattr(shape, "activation_factor", 1.0)  # of GPT-2's; the constants are measured with that
    token_bytes = per_channel * shape.width  # of a layer, in bf16
    if shape.attention_dropout:
        token_bytes += per_weight * shape.heads * length
    sequence_ranks = mesh.tensor if mesh.sequence else 1
    rank_fraction = DIVIDED / mesh.tensor + (1 - DIVIDED) / sequence_ranks
    block = token_bytes * length * itemsize / 2 * rank_fraction
    if not activation_checkpointing:
        return block * shape.layers
    group_input = shape.width * length * itemsize / sequence_ranks
    groups = -(-shape.layers // activation_checkpointing)
    return groups * group_input + min(activation_checkpointing, shape.layers) * block


def passes_kept(mesh: Mesh, passes: int) -> float:
    """The activations that the first stage of a pipeline keeps, as a multiple of those of a micro-batch in all blocks:
    1 with 1F1B, since a stage of s has 1 / s of the blocks and keeps s micro-batches."""
    if mesh.pipeline == 1:
        return 1.0
    kept = {"gpipe": passes, "1f1b": mesh.pipeline, "interleaved": (3 * mesh.pipeline - 1) / 2}[mesh.schedule]
    return min(kept, passes) / mesh.pipeline


MICRO_BATCHES_PER_STAGE = 4
"""With this many micro-batches for each stage of a pipeline, a stage waits at most a fifth of the time."""


def rank_samples(train: TrainConfig, mesh: Mesh, *, compiled: bool) -> int:
    """The samples that a micro-batch of a rank may have: all of a step, or with a pipeline a part of them.

    A compiled net keeps its micro-batch for the entire run."""
    samples = (math.gcd(*train.sizes) if compiled or mesh.pipeline > 1 else train.batch) // mesh.data_ranks
    if mesh.pipeline == 1:
        return samples
    # Interleaved, the micro-batches are a multiple of the stages.
    divided = samples // mesh.pipeline if mesh.chunks > 1 else samples
    return math.gcd(divided, max(1, samples // (MICRO_BATCHES_PER_STAGE * mesh.pipeline)))


def largest_on_cpu(samples: int, shape: Shape, length: int) -> int:
    """The largest divisor of a rank's samples whose logits stay small."""
    return largest_divisor(samples, CPU_LOGITS_BYTES // (4 * length * shape.padded_vocab))


def largest_on_gpu(samples: int, state: State, sample_bytes: float, memory: int) -> int:
    """The largest divisor of a rank's samples whose activations fit next to the state; 1 if none does."""
    left = GPU_FRACTION * memory - state.total - SPARE_BYTES * state.elements
    return largest_divisor(samples, int(left / (SPARE_ACTIVATIONS * sample_bytes)))


def largest_divisor(samples: int, fits: int) -> int:
    """The largest divisor of `samples` that is at most `fits`; 1 if none is."""
    return max(size for size in range(1, samples + 1) if samples % size == 0 and size <= max(1, fits))


def deepspeed_micro_batch(section: DeepSpeedEngine, train: TrainConfig, shape: Shape, ranks: int) -> int:
    """The configured micro-batch, or the largest divisor of a rank's samples with at most DEEPSPEED_TOKENS tokens."""
    check_batch(train, ranks, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    return largest_divisor(train.batch // ranks, DEEPSPEED_TOKENS // (train.length or shape.positions))


def state_on_torch(train: TrainConfig, shape: Shape, lora: LoraConfig | None, mesh: Mesh) -> State:
    """The state of rank 0, which has the most, on a mesh of any size: nothing is allocated and nothing is sent."""
    with fake_ranks(mesh.world):
        parallel = Parallel(mesh, 0, torch.device("cpu"))
        with torch.device("meta"):
            net = build_net(shape, lora)
            parallel.shard_net(net)
        return count_state(net, train, parallel)


def count_state(net: BaseNet, train: TrainConfig, parallel: Parallel) -> State:
    """The state of this rank after its first step; the net may be on the meta device."""
    local_parts = {parameter: parallel.local(parameter) for _, parameter in own_parameters_of(net)}
    weights = sum(part.nbytes for part in local_parts.values())
    members: dict[str, list[Member]] = {}
    for member in trained_of(net, train):
        members.setdefault(optimizer_of(member.weight, train), []).append(member)
    gradients = sum(local_parts[parameter].nbytes for group in members.values() for _, parameter, _ in group)
    state = sum(open_optimizer(name).state_bytes(group, parallel) for name, group in members.items())
    average = gradients if train.ema_window else 0
    shared = 2 * gradients if parallel.mesh.local else 0  # local SGD: the shared weights, and the outer momentum
    in_blocks = [parameter for parameter in net.blocks.parameters() if parameter in local_parts]
    return State(
        weights,
        gradients,
        optimizer=state + average + shared,
        buffers=_buffers(net, parallel, gradients),
        elements=sum(part.numel() for part in local_parts.values()),
        outside_blocks=weights - sum(local_parts[parameter].nbytes for parameter in in_blocks),
    )


def _buffers(net: BaseNet, parallel: Parallel, gradients: int) -> int:
    """Bytes for collectives: flat gradients of data parallelism; with FSDP the weights that are gathered at once."""
    if not parallel.sharded:
        if parallel.mesh.local:
            return min(gradients, BUCKET_BYTES)
        return gradients if parallel.mesh.replicate > 1 else 0
    blocks = [_full_bytes(block) for block in net.own_blocks]
    here = sum(_bytes(parameter) for name, parameter in net.named_parameters() if name not in net.absent)
    rest = here - sum(blocks)
    # The block that computes, the next one that is gathered meanwhile, and the gradients of one block.
    gathered = sum(blocks) if parallel.mesh.keep_gathered else 2 * max(blocks)
    return rest + gathered + max(blocks)


def _full_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters when FSDP has gathered them."""
    return sum(_bytes(parameter) for parameter in module.parameters())


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is rank 0 and the others do not exist."""
    if world == 1:
        yield
        return
    # Imported here: only plans of several devices need them.
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    # The process may have groups already: another world, with names that they do not use.
    before = distributed_c10d._world
    world_of_ranks = ThreadLocalWorld()
    world_of_ranks.group_count = FIRST_GROUP
    if not hasattr(world_of_ranks, "comms"):
        vars(world_of_ranks)["comms"] = []  # torch 2.11 reads it, but this kind of world lacks it there
    distributed_c10d._world = world_of_ranks  # type: ignore[assignment]
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        yield
        dist.destroy_process_group()
    finally:
        distributed_c10d._world = before


def state_on_deepspeed(
    engine: DeepSpeedEngine, train: TrainConfig, shape: Shape, lora: LoraConfig | None, world: int, itemsize: int
) -> State:
    """The state of one of `world` ranks: stage 1 shards optimizer state, 2 gradients too, 3 weights too."""
    section = fill_unset(engine, read_user_config(engine.deepspeed_config))
    stage = section.zero if isinstance(section.zero, int) else 2
    rules = rules_of(shape, train, lora)
    members = [(weight, math.prod(weight.memory_shape)) for weight in weights_with_adapters(shape, lora)]
    every = sum(count for _, count in members)
    trained = sum(count for weight, count in members if rules[weight.name].trained)
    block = max(1, (every - shape.padded_vocab * shape.width) // shape.layers)
    if not stage:
        return State(4 * every, 4 * trained, MOMENT_BYTES * trained, 4 * trained if world > 1 else 0)
    weights = itemsize * every if stage < 3 else -(-itemsize * every // world)
    gradients = itemsize * trained if stage < 2 else -(-4 * trained // world)
    optimizer = -(-(MASTER_BYTES + MOMENT_BYTES) * trained // world)
    host = 0
    if section.offload_optimizer:
        optimizer, host = 0, optimizer + (gradients if stage > 1 else 0)
    if section.offload_weights:
        weights, host = 0, host + weights
    # Buckets have the size of a block; stage 3 keeps the weights of two blocks and the embedding gathered.
    buffers = 2 * itemsize * block + (itemsize * (2 * block + shape.padded_vocab * shape.width) if stage == 3 else 0)
    return State(weights, gradients, optimizer, buffers, host)


def state_on_jax(train: TrainConfig, shape: Shape, lora: LoraConfig | None, mesh: Mesh) -> State:
    """The state of a device on a mesh of any size; JAX needs no device for it. Weights are fp32."""
    # Imported here: only plans for JAX need it.
    from jax.sharding import AbstractMesh, AxisType

    from textmill.engines.mesh_jax import AXES, Shardings

    sizes = (mesh.replicate, mesh.shard, mesh.tensor)
    abstract = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    members = weights_with_adapters(shape, lora)
    shardings = Shardings(abstract, {weight.name: weight.split for weight in members if weight.split is not None})
    rules = rules_of(shape, train, lora)
    weights = gradients = optimizer = 0
    for weight in members:
        sharding = shardings.stored(weight.name, weight.memory_shape)
        shard_bytes = 4 * math.prod(sharding.shard_shape(weight.memory_shape))
        weights += shard_bytes
        if rules[weight.name].trained:
            gradients += shard_bytes
            optimizer += shard_bytes * len(state_names(weight, train))
    return State(weights, gradients, optimizer, 0, elements=weights // 4)
