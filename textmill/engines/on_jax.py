"""The JAX engine on one device or a mesh; an optimizer step with gradient accumulation is one compiled program."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from textmill.config import JaxEngine, RunConfig, TrainConfig
from textmill.counters import sample_keys
from textmill.devices import peak_flops_by_name
from textmill.engines import Named, NameFilter, Ranks, Sums, all_names, format_compile_time
from textmill.engines.objective.labels import PAIR_LOSS, count_pairs, label_arrays, named_sums
from textmill.engines.shared_torch import check_fields, part_of
from textmill.engines.spikes import State, new_spike_guard
from textmill.errors import TextmillError
from textmill.models import Shape, to_checkpoint, weights_of
from textmill.models.lora import count_with_adapters, saved_weights, uses_dropout, weights_with_adapters
from textmill.models.memory_layout import lay_out_weight, lay_out_weights
from textmill.tokens.batches.batch import IGNORED, Batch

try:
    import jax
    import jax.numpy as jnp
    import optax  # noqa: F401
    from jax import Array
    from jax.experimental.multihost_utils import process_allgather
except ImportError:
    raise TextmillError("engine.kind=jax needs jax and optax; run: pip install 'textmill[jax]'") from None

from textmill.engines.distillation.teachers_jax import Teachers
from textmill.engines.losses_jax import chunk_tokens, token_weights
from textmill.engines.mesh_jax import Shardings, open_mesh
from textmill.engines.meshes import check_batch
from textmill.engines.micro_batch_jax import largest_micro_batch
from textmill.engines.objective.heads_jax import Heads, open_jax_net, open_teacher_heads
from textmill.engines.optimizers.step_jax import JaxStep, Optimizer
from textmill.engines.ranks_jax import open_devices, open_ranks

ON_GPU = {"xla_gpu_enable_triton_gemm": False}
"""XLA options on a GPU: matmuls by cuBLAS; a step on an H200 is 2% faster than with XLA's default."""
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
"""XLA options for `engine.deterministic`: no atomic sums, no kernels chosen by timing."""

Arrays = dict[str, Array]
TEACHERS = True
"""This engine supports `train.distil`."""


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
        self.terms = self.heads.term_names(train)
        open_heads = partial(open_teacher_heads, chunk)
        self.teachers = Teachers(train, shape, self.options, shardings, open_heads) if train.distil.teachers else None
        self.teacher_weights = self.teachers.weights if self.teachers else []
        """The teachers' weights: an argument of a step, since XLA would copy constants into the program."""
        self.known = {weight.name: weight for weight in weights_with_adapters(shape, options.lora)}
        precision = jnp.float32 if self.device.platform == "cpu" else jnp.bfloat16
        self.optimizer = Optimizer(shape, train, options.lora, precision)
        self.guard = new_spike_guard(train, jnp, shardings.replicate)
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

    def train_step(self, batch: Batch, step: int, lr: float) -> JaxStep:
        """One compiled step; returns as soon as the arrays are sent to the devices."""
        start = time.perf_counter()
        dropout = uses_dropout(self.shape, self.options.lora)
        keys_N = sample_keys(self.train.seed, step, batch.samples) if dropout else None
        parts = self._micro_batches(batch, keys_N)
        shapes = str(jax.tree.map(jnp.shape, parts))
        compiles = shapes not in self.compiled_shapes
        self.compiled_shapes.add(shapes)
        spikes = self.guard.state if self.guard else None
        self.params, self.state, spikes, losses, norm, tokens = self.step(
            self.params, self.state, parts, np.float32(lr), spikes, np.int32(step + 1), self.teacher_weights
        )
        if self.guard and spikes:
            self.guard.state = spikes
        note = format_compile_time(time.perf_counter() - start) if compiles else None
        loss, values = (losses[0], losses[1:]) if self.terms else (losses, ())
        terms = dict(zip(self.terms, values, strict=True))
        if batch.pair_labels is None:
            terms.pop(PAIR_LOSS, None)
        return JaxStep(loss, norm, tokens, note=note, term_values=terms)

    def eval_step(self, batch: Batch) -> Sums:
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

    def moments(self, wanted: NameFilter = all_names) -> Iterator[Named]:
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
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Load weights and moments in checkpoint names and layout."""
        laid_out = lay_out_weights(self.known.values(), self.shape, weights, where)
        placed = {weight.name: self.shardings.place(weight.name, values) for weight, values in laid_out}
        self.params = {name: placed[name] for name in self.known}
        known = self.known
        moments = moments if updates else ()
        loaded = {name: lay_out_weight(known[name.partition("/")[2]], values, where) for name, values in moments}
        self.state = {"count": self.shardings.replicate(np.int32(updates))}
        for kind, names in self.optimizer.kinds().items():
            self.state[kind] = {}
            for name in names:
                moment = loaded.pop(f"{kind}/{name}", None)
                moment = np.zeros(self.params[name].shape, np.float32) if moment is None else moment
                self.state[kind][name] = self.shardings.place(name, moment)

    def facts(self) -> dict[str, Any]:
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

    def _step(
        self,
        weights: Arrays,
        state: dict[str, Any],
        parts: Arrays,
        lr: Array,
        spikes: State | None,
        number: Array,
        teacher_weights: list[Arrays],
    ) -> tuple[Any, ...]:
        """An optimizer step: gradient accumulation over micro-batches, clipping, and the update or a skip."""
        token_weight, tokens = token_weights(parts["labels"], self.train.loss)
        parts = {**parts, "weights": token_weight}
        if self.heads.has_pairs:
            parts["pair_weights"], _ = token_weights(parts["pair_labels"], "token_mean")
        narrow = self.heads.cast_matrices(weights)
        trained = {name: narrow[name] for name in self.optimizer.trained}
        gradient = partial(jax.value_and_grad(self._loss, has_aux=True), trained, narrow, teacher_weights)
        if len(token_weight) == 1:
            (_, losses), grads = gradient({name: values[0] for name, values in parts.items()})
        else:
            first = jnp.zeros((1 + len(self.terms),) if self.terms else ())
            zeros = first, {name: jnp.zeros_like(weights[name]) for name in trained}
            losses, grads = jax.lax.scan(partial(_accumulate, gradient), zeros, parts)[0]
        loss = losses[0] if self.terms else losses
        grads = {
            name: jax.lax.with_sharding_constraint(grad, self.shardings.stored(name, grad.shape))
            for name, grad in grads.items()
        }
        spike = self.guard.is_spike(spikes, loss) if self.guard and spikes else jnp.array(False)
        weights, state, norm = self.optimizer.step(weights, state, grads, lr, spike)
        if self.guard and spikes:
            spikes = self.guard.next_state(spikes, loss, spike, jnp.isfinite(norm), number)
        spikes, losses, norm, tokens = jax.lax.with_sharding_constraint(
            (spikes, losses, norm, tokens), self.shardings.replicated()
        )
        return weights, state, spikes, losses, norm, tokens

    def _loss(
        self, trained: Arrays, others: Arrays, teacher_weights: list[Arrays], part: Arrays
    ) -> tuple[Array, Array]:
        """The loss of a micro-batch as a function of the trained weights, and the losses to report."""
        return self.heads.training_loss({**others, **trained}, part, self.train, self.teachers, teacher_weights)

    def _evaluate(self, weights: Arrays, part: Arrays) -> list[Array]:
        """The sums of a micro-batch."""
        sums = self.heads.sums(weights, part)
        return jax.lax.with_sharding_constraint(sums, self.shardings.replicated())  # type: ignore[no-any-return]

    def _micro_batches(self, batch: Batch, keys_N: Any) -> Arrays:
        """A batch on the devices as [micro-batches, samples, ...]; the last is padded with rows without labels."""
        check_fields(batch, self.shape)
        local_devices = self.shardings.data_devices // self.ranks.world
        rows = local_devices * min(self.micro_batch, -(-len(batch.inputs) // local_devices))
        padding = -len(batch.inputs) % rows
        arrays: dict[str, Any] = {"inputs": batch.inputs, "keys": keys_N}
        arrays |= {"documents": batch.documents, "types": batch.types}
        arrays |= {"teacher_ids": batch.teacher_ids, "teacher_logs": batch.teacher_logs}
        arrays |= label_arrays(batch, self.heads.few_labels, self.heads.has_pairs, self.ranks)
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


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that torchrun or srun started, or this single process."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Shape, ranks: Ranks) -> OnJax:
    """The engine with an uninitialised net; `load` sets its weights."""
    engine = config.engine
    train = config.train
    assert isinstance(engine, JaxEngine)
    net = open_jax_net(shape)
    devices = open_devices(engine.device)
    weights = weights_of(shape)
    sizes = shape.tensor_parallel_sizes() | {weight.parameter: weight.outputs for weight in weights if weight.by_token}
    split = {weight.name: weight.split for weight in weights if weight.split is not None}
    shardings = Shardings(open_mesh(engine.mesh, devices, sizes), split)
    check_batch(train, shardings.data_devices, engine.micro_batch, "device", "devices")
    default = "fp32" if devices[0].platform == "cpu" else "bf16"
    name = engine.precision if engine.precision != "auto" else default
    precision = jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[name])
    head_width = getattr(shape, "head_width", shape.width // shape.heads)
    fused = devices[0].platform == "gpu" and name == "bf16" and head_width % 8 == 0 and head_width <= 128
    options = net.NetOptions(precision, engine.recompute, fused, config.model.lora)
    if (micro_batch := engine.micro_batch) == "auto":
        micro_batch = largest_micro_batch(config, shape, devices[0], shardings, precision)
    xla = {**(ON_GPU if devices[0].platform == "gpu" else {}), **(DETERMINISTIC if engine.deterministic else {})}
    return OnJax(shape, train, options, shardings, ranks, micro_batch, xla or None)
