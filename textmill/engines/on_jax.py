"""The JAX engine on one device or a mesh; an optimizer step with gradient accumulation is one compiled program.

`new_engine` opens devices and mesh; `OnJax._step` is the program; `Heads` runs the family's net and computes the losses
of its heads.

Shapes in names: N samples, T tokens, K labelled tokens of a sample, P pairs of a sample, E width.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather

from textmill.config import EngineConfig, JaxEngine, LoraConfig, TrainConfig
from textmill.counters import sample_keys
from textmill.devices import peak_flops_by_name
from textmill.engines import EvalSums, NameFilter, Step, all_names, format_compile_time
from textmill.engines.losses_jax import chunk_tokens, loss_and_correct, summed_loss, token_weights
from textmill.engines.memory import GPU_FRACTION, JAX_ACTIVATION_BYTES, largest_divisor, largest_on_cpu
from textmill.engines.mesh_jax import Shardings, place_mesh
from textmill.engines.meshes import mesh_of_devices
from textmill.engines.micro_batches import PAIR_LOSS, check_fields, count_pairs, label_arrays, named_sums, part_of
from textmill.engines.optimizers.step_jax import Optimizer, check_optimizer, new_step
from textmill.engines.ranks_torch import open_ranks
from textmill.errors import TextmillError
from textmill.models import Shape, find_family_module, lay_out_weight, lay_out_weights, to_checkpoint
from textmill.models.base_jax import cast_matrices
from textmill.models.lora import count_with_adapters, saved_weights, uses_dropout, weights_with_adapters
from textmill.processes.heartbeat import START_SECONDS
from textmill.processes.launch import read_launch
from textmill.processes.ranks import Ranks
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import IGNORED, Batch

ON_GPU = {"xla_gpu_enable_triton_gemm": False}
"""XLA options on a GPU: matmuls by cuBLAS; a step on an H200 is 2% faster than with XLA's default."""
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
"""XLA options for `engine.deterministic`: no atomic sums, no kernels chosen by timing."""
Arrays = dict[str, Array]
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""JAX's platform names by value of `engine.device`."""
WEIGHT_BYTES = 24
"""Bytes of a weight with its gradient and AdamW's moments."""


def check_settings(engine: EngineConfig, train: TrainConfig, shape: Shape, world: int) -> None:
    """Refuse a net, optimizer, device, mesh or batch that this engine cannot use here."""
    assert isinstance(engine, JaxEngine)
    open_jax_net(shape)
    check_optimizer(train)
    if world == 1 or jax.distributed.is_initialized():  # before, JAX would find this process's devices only
        _open_shardings(engine, train, shape)


def _open_shardings(engine: JaxEngine, train: TrainConfig, shape: Shape) -> tuple[list[jax.Device], Shardings]:
    """The devices, and the sharding of the net's weights on their mesh."""
    devices = open_devices(engine.device)
    mesh = mesh_of_devices(engine, train, shape, len(devices))
    split = {weight.name: weight.split for weight in shape.weights() if weight.split is not None}
    return devices, Shardings(place_mesh(mesh, devices), split)


def new_engine(engine: EngineConfig, train: TrainConfig, shape: Shape, lora: LoraConfig | None, ranks: Ranks) -> OnJax:
    """The engine with an uninitialised net; `load` sets its weights."""
    assert isinstance(engine, JaxEngine)
    net = open_jax_net(shape)
    devices, shardings = _open_shardings(engine, train, shape)
    default = "fp32" if devices[0].platform == "cpu" else "bf16"
    name = engine.precision if engine.precision != "auto" else default
    precision = jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[name])
    head_width = getattr(shape, "head_width", shape.width // shape.heads)
    fused = devices[0].platform == "gpu" and name == "bf16" and head_width % 8 == 0 and head_width <= 128
    options = net.NetOptions(precision, engine.activation_checkpointing, fused, lora)
    if (micro_batch := engine.micro_batch) == "auto":
        micro_batch = largest_micro_batch(train, shape, devices[0], shardings, precision)
    xla = {**(ON_GPU if devices[0].platform == "gpu" else {}), **(DETERMINISTIC if engine.deterministic else {})}
    return OnJax(shape, train, options, shardings, ranks, micro_batch, xla or None)


def new_ranks(engine: EngineConfig) -> Ranks:
    """The processes that torchrun, srun or mpirun started, or this single process.

    Their collectives on the host run over gloo, as in torch; JAX's coordinator uses the next port.
    """
    ranks = open_ranks("cpu", engine.timeout)
    launch = read_launch(os.environ)
    if launch is not None and launch.world > 1:
        host, _, port = launch.address.rpartition(":")
        _restrict_platform(engine.device)
        jax.distributed.initialize(
            f"{host}:{int(port) + 1}",
            launch.world,
            launch.rank,
            initialization_timeout=int(max(engine.timeout, START_SECONDS)),
        )
    return ranks


def open_devices(name: str) -> list[jax.Device]:
    """The devices of `engine.device`; auto uses JAX's default."""
    jax.config.update("jax_default_matmul_precision", "highest")
    _restrict_platform(name)
    try:
        devices: list[jax.Device] = jax.devices(None if name == "auto" else PLATFORMS[name])
    except RuntimeError:
        raise TextmillError(
            f"engine.device: '{name}' is not available; found {jax.devices()[0].platform}; set engine.device=auto"
        ) from None
    return devices


def _restrict_platform(name: str) -> None:
    """In a CPU run, stop JAX from reserving the memory of accelerators."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")


def largest_micro_batch(
    train: TrainConfig, shape: Shape, device: jax.Device, shardings: Shardings, precision: Any
) -> int:
    """`engine.micro_batch: auto`: the largest divisor of a device's samples that a simple estimate of memory allows."""
    length = train.length or shape.positions
    samples = train.batch // shardings.data_devices
    if device.platform == "cpu":
        return largest_on_cpu(samples, shape, length)
    memory = (device.memory_stats() or {}).get("bytes_limit", 16 << 30)
    weights = WEIGHT_BYTES * shape.parameters * shardings.data_devices / shardings.mesh.size
    per_channel = JAX_ACTIVATION_BYTES * getattr(shape, "activation_factor", 1.0)
    layer = per_channel * shape.width + (8 * shape.heads * length if shape.attention_dropout else 0)
    fits = (GPU_FRACTION * memory - weights) / (layer * shape.layers * length * precision.itemsize / 2)
    return largest_divisor(samples, int(fits))


class OnJax:
    """The Engine of `engine.kind: jax`."""

    def __init__(
        self,
        shape: Shape,
        train: TrainConfig,
        options: Any,
        shardings: Shardings,
        ranks: Ranks,
        micro_batch: int,
        xla: Any = None,
    ) -> None:
        """`options` are the family's NetOptions, `xla` are XLA's."""
        self.ranks = ranks
        self.first = ranks.first
        self.shape = shape
        self.train = train
        self.shardings = shardings
        self.micro_batch = micro_batch
        self.net = open_jax_net(shape)
        divided = shardings.mesh.size > shardings.mesh.shape["replicate"]
        gathered = shardings.gathered if divided else None
        self.options = replace(options, gathered=gathered, by_sample=shardings.by_sample)
        self.device = shardings.mesh.devices.flat[0]
        chunk = chunk_tokens(self.device.platform, shape.padded_vocab) * shardings.data_devices
        self.heads = Heads(self.net, shape, self.options, chunk)
        self.known = {weight.name: weight for weight in weights_with_adapters(shape, options.lora)}
        precision = jnp.float32 if self.device.platform == "cpu" else jnp.bfloat16
        self.optimizer = Optimizer(shape, train, options.lora, precision)
        self.params: Arrays = {}
        self.state: dict[str, Any] = {}
        self.compiled_shapes: set[str] = set()
        """Batch shapes that already have a compiled program."""
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=xla)
        self.evaluate = jax.jit(self._evaluate, compiler_options=xla)

    def samples_of(self, batch: int) -> slice:
        """An equal, contiguous part of the batch for each process."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> Step:
        """One compiled step; returns as soon as the arrays are sent to the devices."""
        start = time.perf_counter()
        dropout = uses_dropout(self.shape, self.options.lora)
        dropout_keys_N = sample_keys(self.train.seed, step, batch.samples) if dropout else None
        parts = self._micro_batches(batch, dropout_keys_N)
        shapes = str(jax.tree.map(jnp.shape, parts))
        compiles = shapes not in self.compiled_shapes
        self.compiled_shapes.add(shapes)
        self.params, self.state, losses, norm, tokens = self.step(self.params, self.state, parts, np.float32(lr))
        note = format_compile_time(time.perf_counter() - start) if compiles else None
        loss, pair_loss = losses if self.heads.has_pairs else (losses, None)
        terms = {} if batch.pair_labels is None else {PAIR_LOSS: pair_loss}
        return new_step(loss, norm, tokens, terms, note)

    def eval_step(self, batch: Batch) -> EvalSums:
        """Loss of a batch by micro-batches, without dropout."""
        parts = self._micro_batches(part_of(batch, self.ranks.world, self.ranks.rank), None)
        sums = [
            self.evaluate(self.params, {name: values[number] for name, values in parts.items()})
            for number in range(len(parts["labels"]))
        ]
        totals = [sum(float(value) for value in values) for values in zip(*sums, strict=True)]
        return named_sums(totals, int((batch.labels != IGNORED).sum()), count_pairs(batch))

    def weights(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the weights; with LoRA, of the adapters only."""
        saved = {weight.name: self.params[weight.name] for weight in saved_weights(self.shape, self.options.lora)}
        return self._host_copies(saved, "", wanted)

    def optimizer_state(self, wanted: NameFilter = all_names) -> Iterator[Named]:
        """Host copies of the optimizer state; none before the first update."""
        for kind in self.optimizer.kinds() if self.updates() else []:
            yield from self._host_copies(self.state[kind], f"{kind}/", wanted)

    def replica_checksums(self) -> dict[str, int]:
        """A checksum of each shard on this process, computed on its device."""
        checksums = {}
        for name, array in self.params.items():
            for shard in array.addressable_shards:
                bits = jax.lax.bitcast_convert_type(shard.data, jnp.int32)
                checksums[f"{name}{shard.index}"] = int(bits.sum())
        return checksums

    def updates(self) -> int:
        """Updates done: Adam's step count."""
        return int(self.state["count"])

    def scaling(self) -> dict[str, float]:
        """Empty: bf16 has the range of fp32 and needs no loss scale."""
        return {}

    def load(
        self,
        weights: Iterable[Named],
        optimizer_state: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights and optimizer state in checkpoint names and layout."""
        laid_out = lay_out_weights(self.known.values(), self.shape, weights, where)
        placed = {weight.name: self.shardings.place(weight.name, values) for weight, values in laid_out}
        self.params = {name: placed[name] for name in self.known}
        known = self.known
        state = optimizer_state if updates else ()
        loaded = {name: lay_out_weight(known[name.partition("/")[2]], values, where) for name, values in state}
        self.state = {"count": self.shardings.replicate(np.int32(updates))}
        for kind, names in self.optimizer.kinds().items():
            self.state[kind] = {}
            for name in names:
                moment = loaded.pop(f"{kind}/{name}", None)
                moment = np.zeros(self.params[name].shape, np.float32) if moment is None else moment
                self.state[kind][name] = self.shardings.place(name, moment)

    def describe(self) -> dict[str, Any]:
        """Device, precision and sizes."""
        count = self.shardings.mesh.size
        peak = peak_flops_by_name(self.device.device_kind)
        return {
            "device": f"{count} x {self.device.device_kind}" if count > 1 else self.device.device_kind,
            "precision": jnp.dtype(self.options.precision).name,
            "micro_batch": self.micro_batch,
            "peak_flops": peak and peak * count,
            "trained": sum(self.optimizer.trained.values()),
            "parameters": count_with_adapters(self.shape, self.options.lora),
        }

    def close(self) -> None:
        """Free the devices' memory."""
        for array in jax.tree.leaves((self.params, self.state)):
            array.delete()
        self.params = {}
        self.state = {}

    def _step(self, weights: Arrays, state: dict[str, Any], parts: Arrays, lr: Array) -> tuple[Any, ...]:
        """An optimizer step: gradient accumulation over micro-batches, clipping, and the update or a skip."""
        token_weight, tokens = token_weights(parts["labels"], self.train.loss)
        parts = {**parts, "weights": token_weight}
        if self.heads.has_pairs:
            parts["pair_weights"], _ = token_weights(parts["pair_labels"], "token_mean")
        narrow = self.heads.cast_matrices(weights)
        trained = {name: narrow[name] for name in self.optimizer.trained}
        gradient = partial(jax.value_and_grad(self._loss, has_aux=True), trained, narrow)
        if len(token_weight) == 1:
            (_, losses), grads = gradient({name: values[0] for name, values in parts.items()})
        else:
            first = jnp.zeros((2,) if self.heads.has_pairs else ())
            zeros = first, {name: jnp.zeros_like(weights[name]) for name in trained}
            losses, grads = jax.lax.scan(partial(_accumulate, gradient), zeros, parts)[0]
        grads = {
            name: jax.lax.with_sharding_constraint(grad, self.shardings.stored(name, grad.shape))
            for name, grad in grads.items()
        }
        weights, state, norm = self.optimizer.step(weights, state, grads, lr)
        numbers = jax.lax.with_sharding_constraint((losses, norm, tokens), self.shardings.replicated())
        return weights, state, *numbers

    def _loss(self, trained: Arrays, others: Arrays, part: Arrays) -> tuple[Array, Array]:
        """The loss of a micro-batch as a function of the trained weights, and the losses to report."""
        return self.heads.training_loss({**others, **trained}, part, self.train)

    def _evaluate(self, weights: Arrays, part: Arrays) -> list[Array]:
        """The sums of a micro-batch."""
        sums = self.heads.sums(weights, part)
        return jax.lax.with_sharding_constraint(sums, self.shardings.replicated())  # type: ignore[no-any-return]

    def _micro_batches(self, batch: Batch, dropout_keys_N: Any) -> Arrays:
        """A batch on the devices as [micro-batches, samples, ...]; the last is padded with rows without labels."""
        check_fields(batch, self.shape)
        local_devices = self.shardings.data_devices // self.ranks.world
        rows = local_devices * min(self.micro_batch, -(-len(batch.inputs) // local_devices))
        padding = -len(batch.inputs) % rows
        arrays: dict[str, Any] = {"inputs": batch.inputs, "keys": dropout_keys_N}
        arrays |= {"documents": batch.documents, "types": batch.types}
        arrays |= label_arrays(batch, self.heads.for_labels_only, self.heads.has_pairs, self.ranks)
        sharding = self.shardings.micro_batches()

        def place(name: str, values: Any) -> Array:
            padded = _pad_rows(values, padding, IGNORED if name.endswith("labels") else 0)
            return jax.make_array_from_process_local_data(sharding, padded.reshape(-1, rows, *values.shape[1:]))

        return {name: place(name, values) for name, values in arrays.items() if values is not None}

    def _host_copies(self, arrays: Arrays, prefix: str, wanted: NameFilter) -> Iterator[Named]:
        for name in [name for name in self.known if name in arrays]:
            local = arrays[name].is_fully_addressable or arrays[name].is_fully_replicated
            if local and not wanted(prefix + name):
                continue
            # np.array copies: on a CPU the next step reuses the memory. All processes gather shards together.
            values = np.array(arrays[name] if local else process_allgather(arrays[name], tiled=True))
            if wanted(prefix + name):
                yield prefix + name, to_checkpoint(self.known[name], values)


def _accumulate(gradient: Any, sums: tuple[Array, Arrays], part: Arrays) -> tuple[tuple[Array, Arrays], None]:
    """Add the loss and gradients of one micro-batch, in the weights' own precision."""
    (_, losses), grads = gradient(part)
    return (sums[0] + losses, jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums[1], grads)), None


def _pad_rows(values: Any, count: int, value: int) -> Any:
    return np.pad(values, [(0, count), *[(0, 0)] * (values.ndim - 1)], constant_values=value) if count else values


class Heads:
    """The heads of a family's JAX net; only net_jax.py's functions that it has are used."""

    def __init__(self, net: Any, shape: Any, options: Any, chunk: int) -> None:
        """`chunk` is how many tokens have logits at the same time."""
        self.net = net
        self.shape = shape
        self.options = options
        self.chunk = chunk
        self.for_labels_only = getattr(net, "HEAD_FOR_LABELS_ONLY", False)
        self.has_pairs = hasattr(net, "has_pair_head") and net.has_pair_head(shape)

    def training_loss(self, weights: Arrays, part: Arrays, train: TrainConfig) -> tuple[Array, Array]:
        """The loss to minimise, and what to report: the labels' loss, with a pair head [2]: also that of the pairs.

        `part` are the arrays of a micro-batch.
        """
        states = self.states(weights, part)
        head, bias = self.head(weights)
        head_and_labels = (states.head_input, head, part["labels"], part["weights"], bias)
        loss = summed_loss(*head_and_labels, self.shape.vocab, self.chunk, train.label_smoothing)
        if not self.has_pairs:
            return loss, loss
        pair_loss = (self._pair_losses(weights, part, states.all)[0] * part["pair_weights"]).sum()
        return loss + pair_loss, jnp.stack([loss, pair_loss])

    def cast_matrices(self, weights: Arrays) -> Arrays:
        """The weights with matrices in the precision of the matmuls."""
        return cast_matrices(weights, self.net.MATRICES, self.options.precision)

    def sums(self, weights: Arrays, part: Arrays) -> list[Array]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        narrow = self.cast_matrices(weights)
        states = self.states(narrow, part)
        head, bias = self.head(weights)
        losses, correct = loss_and_correct(states.head_input, head, part["labels"], self.shape.vocab, self.chunk, bias)
        found = [losses.sum(), correct.sum()]
        pairs = self._pair_losses(narrow, part, states.all) if self.has_pairs else ()
        return [*found, *(one.sum() for one in pairs)]

    def states(self, weights: Arrays, part: Arrays) -> States:
        """The hidden states of a micro-batch."""
        types = [part["types"]] if "types" in part else []
        keys = part.get("keys")
        documents = part.get("documents")
        x_NTE = self.net.states(weights, self.shape, self.options, part["inputs"], keys, documents, *types)
        x_NKE = jnp.take_along_axis(x_NTE, part["positions"][..., None], 1) if self.for_labels_only else x_NTE
        head_input = x_NKE
        if hasattr(self.net, "head_input"):
            head_input = self.net.head_input(weights, self.shape, self.options, x_NKE)
        return States(x_NTE, head_input)

    def _pair_losses(self, weights: Arrays, part: Arrays, x_NTE: Array) -> tuple[Array, Array]:
        """The loss of each pair, 0 without a label, and whether its label has the higher logit."""
        x_NPE = jnp.take_along_axis(x_NTE, part["pair_positions"][..., None], 1)
        logits = self.net.pair_logits(weights, self.shape, self.options, x_NPE).astype(jnp.float32)
        labels = part["pair_labels"]
        labelled = labels != IGNORED
        chosen = jnp.take_along_axis(logits, jnp.where(labelled, labels, 0)[..., None], -1)[..., 0]
        losses = jnp.where(labelled, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
        return losses, logits.argmax(-1) == labels

    def head(self, weights: Arrays) -> tuple[Array, Array | None]:
        """The head's matrix and its bias, gathered from the devices that divide them."""
        gather = self.options.gathered or (lambda _, values: values)
        name = self.net.head_name(self.shape)
        bias = getattr(self.net, "HEAD_BIAS", None)
        return gather(name, weights[name]), None if bias is None else gather(bias, weights[bias])


class States(NamedTuple):
    """Hidden states of a micro-batch."""

    all: Array
    """[N, T, E]."""
    head_input: Array
    """[N, K, E]: what the head multiplies for tokens that may have a label."""


def open_jax_net(shape: Shape) -> Any:
    """The module of the family's JAX net: models/FAMILY/net_jax.py with head_name, NetOptions, MATRICES and states."""
    module = find_family_module(shape, "net_jax")
    if module is None:
        raise TextmillError(f"engine.kind: the family {shape.family} has no JAX net; set engine.kind=torch")
    return module
