"""The memory estimate of a run on a device of any kind, by engine, mesh, precision and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from textmill.config import EngineConfig, JaxEngine, LoraConfig, TorchEngine, TrainConfig
from textmill.devices import autocast
from textmill.engines.distillation.teachers import teacher_bytes
from textmill.engines.losses_torch import CPU_LOGITS, GPU_TOKENS
from textmill.engines.memory import state_deepspeed, state_torch
from textmill.engines.memory.parts import (
    ACTIVATION_BYTES,
    ATTENTION_BYTES,
    JAX_ACTIVATION_BYTES,
    Memory,
    State,
    deepspeed_micro_batch,
    largest_on_cpu,
    largest_on_gpu,
    passes_kept,
    rank_samples,
    sample_activations,
)
from textmill.engines.meshes import Mesh, check_batch, mesh_of
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.nets_torch import build_net

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
        logits = _logits_bytes(micro * self.length, rows, self.shape.width, itemsize, device.on_gpu, mesh.tensor > 1)
        passes = -(-self.train.batch // (mesh.data_ranks * micro))
        activations = round(micro * sample * passes_kept(mesh, passes))
        memory = Memory(state.weights, state.gradients, state.optimizer, state.buffers, activations, logits)
        return Estimate(memory, state.host, micro, passes, mesh, itemsize, name, state, engine.kind)

    def _state(self, engine: EngineConfig, mesh: Mesh, itemsize: int, exact: bool) -> State:
        key = (engine.kind, getattr(engine, "zero", None), mesh, itemsize, exact)
        if key not in self._states:
            shape: Any = self.shape
            if exact or shape.layers < 4 or self.lora or mesh.pipeline > 1:
                state = self._count(engine, shape, mesh, itemsize)
            else:
                two_blocks = self._count(engine, replace(shape, layers=2), mesh, itemsize)
                three_blocks = self._count(engine, replace(shape, layers=3), mesh, itemsize)
                state = _extrapolate(two_blocks, three_blocks, shape.layers)
            self._states[key] = state
        return self._states[key]

    def _count(self, engine: EngineConfig, shape: Shape, mesh: Mesh, itemsize: int) -> State:
        if isinstance(engine, TorchEngine):
            return state_torch.state_on_mesh(self.train, shape, self.lora, mesh)
        if isinstance(engine, JaxEngine):
            from textmill.engines.memory import state_jax  # imports JAX, which only its own plans need

            return state_jax.state_on_mesh(self.train, shape, self.lora, mesh)
        return state_deepspeed.state_on_ranks(engine, self.train, shape, self.lora, mesh.replicate, itemsize)

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
    mesh = Mesh(replicate=world)
    if isinstance(engine, JaxEngine):
        axes = engine.mesh
        replicate = axes.replicate or max(1, world // (axes.shard * axes.tensor))
        mesh = Mesh(replicate, axes.shard, axes.tensor)
        if mesh.data_ranks * mesh.tensor != world:
            raise TextmillError(
                f"engine.mesh: replicate={replicate} x shard={axes.shard} x tensor={axes.tensor} needs "
                f"{mesh.data_ranks * mesh.tensor} devices, found {world}; set plan.devices, or other axes"
            )
    check_batch(train, mesh.data_ranks, engine.micro_batch, "device", "devices")
    return mesh


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
