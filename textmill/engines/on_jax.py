"""JAX on one device or a mesh of them: a whole optimizer step, accumulation and skipping included, as one compiled program."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from textmill.config import JaxEngine, RunConfig, TrainConfig
from textmill.counters import sample_keys
from textmill.devices import peak_flops_by_name
from textmill.engines import Mine, Named, Ranks, Sums, compiled_in, every
from textmill.engines.shared_torch import part_of
from textmill.engines.spikes import State, new_guard
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.lora import count_with, drops, saved_of, weights_with
from textmill.models.memory_layout import in_memory, laid_out
from textmill.tokens.batches.batch import IGNORED, Batch

try:
    import jax
    import jax.numpy as jnp
    import optax  # noqa: F401
    from jax import Array
    from jax.experimental.multihost_utils import process_allgather
except ImportError:
    raise TextmillError("engine.kind=jax needs jax and optax; run: pip install 'textmill[jax]'") from None

from textmill.engines.losses_jax import scored, summed_loss, token_shares, tokens_at_once
from textmill.engines.mesh_jax import Layout, open_mesh
from textmill.engines.meshes import check_batch
from textmill.engines.optimizers.step_jax import JaxStep, Updates
from textmill.engines.ranks_jax import open_devices, open_ranks

CPU_LOGITS = 1 << 30
"""`micro_batch: auto` on a CPU: as many samples as would have so many bytes of logits."""
ROOM = 0.6
"""The share of an accelerator's memory that `micro_batch: auto` fills with weights, moments and what backward needs."""
WEIGHT_BYTES, STATE_BYTES = 24, 48
"""Of a weight, with its gradient and moments; and kept for backward, of a token in a layer for each channel, in bf16."""

ON_GPU = {"xla_gpu_enable_triton_gemm": False}
"""What XLA is told on a GPU: matrix products are cuBLAS's, which an H200 makes 2% of a step faster than XLA's own choice."""
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
"""What XLA is told for `engine.deterministic`: no sums in the order of arrival, and no kernels chosen by the clock."""

Arrays = dict[str, Array]


class JaxOnMesh:
    """The Engine of `engine.kind: jax`."""

    def __init__(
        self, shape: Any, train: TrainConfig, way: Any, layout: Layout, ranks: Ranks, micro_batch: int, told: Any = None
    ) -> None:
        """`told` are XLA's own options."""
        self.ranks, self.first = ranks, ranks.first
        self.shape, self.train, self.layout, self.micro_batch = shape, train, layout, micro_batch
        self.net: Any = _twin(shape)
        apart = layout.mesh.size > layout.mesh.shape["replicate"]
        self.way = replace(way, whole=layout.whole if apart else None, by_sample=layout.by_sample)
        self.device = layout.mesh.devices.flat[0]
        self.at_once = tokens_at_once(self.device.platform, shape.padded_vocab) * layout.ways
        self.known = {weight.name: weight for weight in weights_with(shape, way.lora)}
        self.optimizer = Updates(shape, train, way.lora, jnp.float32 if self.device.platform == "cpu" else jnp.bfloat16)
        self.guard = new_guard(train, jnp, self._everywhere)
        self.held: Arrays = {}
        self.state: dict[str, Any] = {}
        self.forms: set[str] = set()
        """Shapes of batches that there is a program for."""
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=told)
        self.judge = jax.jit(self._judge, compiler_options=told)

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each process."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> JaxStep:
        """One compiled step; the host is free as soon as the arrays are on their way."""
        began = time.perf_counter()
        keys_N = sample_keys(self.train.seed, step, batch.samples) if drops(self.shape, self.way.lora) else None
        parts = self._laid(batch, keys_N)
        new = (form := str(jax.tree.map(jnp.shape, parts))) not in self.forms
        self.forms.add(form)
        memory = self.guard.state if self.guard else None
        self.held, self.state, memory, loss, norm, asked = self.step(
            self.held, self.state, parts, np.float32(lr), memory, np.int32(step + 1)
        )
        if self.guard and memory:
            self.guard.state = memory
        return JaxStep(loss, norm, asked, news=compiled_in(time.perf_counter() - began) if new else None)

    def eval_step(self, batch: Batch) -> Sums:
        """Losses of a batch by micro-batches, without dropout."""
        parts = self._laid(part_of(batch, self.ranks.world, self.ranks.rank), None)
        sums = [
            self.judge(self.held, {name: values[number] for name, values in parts.items()})
            for number in range(len(parts["labels"]))
        ]
        loss, correct = sum(float(loss) for loss, _ in sums), sum(int(right) for _, right in sums)
        return Sums(loss, int((batch.labels != IGNORED).sum()), correct)

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the weights; of a net with adapters, those alone."""
        return self._copies(
            {weight.name: self.held[weight.name] for weight in saved_of(self.shape, self.way.lora)}, "", mine
        )

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the optimizer's state; none before the first update."""
        for kind in self.optimizer.kinds() if self.updates() else []:
            yield from self._copies(self.state[kind], f"{kind}/", mine)

    def replica_checksums(self) -> dict[str, int]:
        """The bits of each part of a weight that this process holds, summed on its device; who holds the same has the same."""
        parts = [
            (f"{name}{shard.index}", shard.data)
            for name, array in self.held.items()
            for shard in array.addressable_shards
        ]
        return {name: int(jax.lax.bitcast_convert_type(values, jnp.int32).sum()) for name, values in parts}

    def updates(self) -> int:
        """Updates done; Adam's own count."""
        return int(self.state["count"])

    def scaling(self) -> dict[str, float]:
        """No loss scale: bf16 has fp32's range."""
        return {}

    def load(
        self,
        weights: Iterable[Named],
        moments: Iterable[Named],
        updates: int,
        where: str,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """Take weights and moments in checkpoint names and layout."""
        self.held = {
            weight.name: self._placed(weight.name, values)
            for weight, values in laid_out(self.known.values(), self.shape, weights, where)
        }
        self.held = {name: self.held[name] for name in self.known}
        given = {
            name: in_memory(self.shape, self.known[name.partition("/")[2]], values, where)
            for name, values in moments
            if updates
        }
        self.state = {"count": self._everywhere(np.int32(updates))}
        for kind, names in self.optimizer.kinds().items():
            self.state[kind] = {name: self._placed(name, given.pop(f"{kind}/{name}", None)) for name in names}

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        count, peak = self.layout.mesh.size, peak_flops_by_name(self.device.device_kind)
        return {
            "device": f"{count} x {self.device.device_kind}" if count > 1 else self.device.device_kind,
            "precision": jnp.dtype(self.way.precision).name, "micro_batch": self.micro_batch, "peak_flops": peak and peak * count,
            "parameters": count_with(self.shape, self.way.lora), "trained": sum(self.optimizer.trained.values()),
        }  # fmt: skip

    def close(self) -> None:
        """Give the devices' memory back."""
        for array in jax.tree.leaves((self.held, self.state)):
            array.delete()
        self.held, self.state = {}, {}

    def _step(
        self, weights: Arrays, state: dict[str, Any], parts: Arrays, lr: Array, memory: State | None, number: Array
    ) -> tuple[Any, ...]:
        """All of an optimizer step: loss and gradients by micro-batches, clipping, the update, or none."""
        shares, asked = token_shares(parts["labels"], self.train.loss)
        parts = {**parts, "shares": shares}
        narrow = self.net.narrowed(weights, self.way.precision)
        learning = {name: narrow[name] for name in self.optimizer.trained}
        slopes = partial(jax.value_and_grad(self._loss), learning, narrow)
        if len(shares) == 1:
            loss, grads = slopes({name: values[0] for name, values in parts.items()})
        else:
            nothing = jnp.zeros(()), {name: jnp.zeros_like(weights[name]) for name in learning}
            loss, grads = jax.lax.scan(partial(_summed, slopes), nothing, parts)[0]
        grads = {
            name: jax.lax.with_sharding_constraint(grad, self.layout.kept(name, grad.shape))
            for name, grad in grads.items()
        }
        spike = self.guard.judged(memory, loss) if self.guard and memory else jnp.array(False)
        weights, state, norm = self.optimizer.step(weights, state, grads, lr, spike)
        memory = self.guard.after(memory, loss, spike, jnp.isfinite(norm), number) if self.guard and memory else None
        memory, loss, norm, asked = jax.lax.with_sharding_constraint(
            (memory, loss, norm, asked), self.layout.everywhere()
        )
        return weights, state, memory, loss, norm, asked

    def _loss(self, learning: Arrays, others: Arrays, part: Arrays) -> Array:
        """The loss of a micro-batch, as it depends on the weights that learn."""
        weights = {**others, **learning}
        x_NTE = self.net.states(weights, self.shape, self.way, part["inputs"], part.get("keys"), part.get("documents"))
        head, train = self._head(weights), self.train
        return summed_loss(
            x_NTE,
            head,
            part["labels"],
            part["shares"],
            self.shape.vocab,
            self.at_once,
            train.label_smoothing,
            train.z_loss,
        )

    def _judge(self, weights: Arrays, part: Arrays) -> tuple[Array, Array]:
        """The summed loss of a micro-batch, and its tokens whose label has the highest score."""
        narrow = self.net.narrowed(weights, self.way.precision)
        x_NTE = self.net.states(narrow, self.shape, self.way, part["inputs"], None, part.get("documents"))
        losses, right = scored(x_NTE, self._head(weights), part["labels"], self.shape.vocab, self.at_once)
        sums: tuple[Array, Array] = jax.lax.with_sharding_constraint(
            (losses.sum(), right.sum()), self.layout.everywhere()
        )
        return sums

    def _head(self, weights: Arrays) -> Array:
        head = weights[self.net.HEAD]
        return head if self.way.whole is None else self.way.whole(self.net.HEAD, head)

    def _laid(self, batch: Batch, keys_N: Any) -> Arrays:
        """A batch on the devices as [parts, samples, ...]; rows that fill the last part ask for nothing."""
        own = self.layout.ways // self.ranks.world
        rows = own * min(self.micro_batch, -(-len(batch.inputs) // own))
        more = -len(batch.inputs) % rows
        named = (
            ("inputs", batch.inputs, 0),
            ("labels", batch.labels, IGNORED),
            ("keys", keys_N, 0),
            ("documents", batch.documents, 0),
        )
        arrays: list[tuple[str, Any, int]] = [one for one in named if one[1] is not None]
        sharding = self.layout.parts()
        return {
            name: jax.make_array_from_process_local_data(
                sharding, _filled(values, more, fill).reshape(-1, rows, *values.shape[1:])
            )
            for name, values, fill in arrays
        }

    def _everywhere(self, values: Any) -> Array:
        """A small array that every device has."""
        return jax.make_array_from_callback(np.shape(values), self.layout.everywhere(), lambda index: values[index])

    def _placed(self, name: str, values: Any) -> Array:
        """An array of a weight's shape in its place; zeros where there is none."""
        if values is None:
            values = np.zeros(self.held[name].shape, np.float32)
        sharding = self.layout.kept(name, values.shape)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def _copies(self, arrays: Arrays, prefix: str, mine: Mine) -> Iterator[Named]:
        family = open_family(self.shape.family)
        for name in [name for name in self.known if name in arrays]:
            here = arrays[name].is_fully_addressable or arrays[name].is_fully_replicated
            if here and not mine(prefix + name):
                continue
            # A copy: on a CPU the array's own memory is given away to the next step. What lies with others is gathered by all.
            values = np.array(arrays[name] if here else process_allgather(arrays[name], tiled=True))
            if mine(prefix + name):
                yield prefix + name, family.to_checkpoint(self.known[name], values, self.shape)


def _summed(slopes: Any, sums: tuple[Array, Arrays], part: Arrays) -> tuple[tuple[Array, Arrays], None]:
    """Loss and gradients with those of one micro-batch more, in the weights' own precision."""
    loss, grads = slopes(part)
    return (sums[0] + loss, jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums[1], grads)), None


def _filled(values: Any, more: int, value: int) -> Any:
    return np.pad(values, [(0, more), *[(0, 0)] * (values.ndim - 1)], constant_values=value) if more else values


def _twin(shape: Any) -> Any:
    """The family's net in JAX: models/FAMILY_jax.py has states, narrowed, Way and where its weights are cut."""
    return import_module(f"textmill.models.{shape.family}.net_jax")


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that torchrun or srun started, or this one alone."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Any, ranks: Ranks) -> JaxOnMesh:
    """The engine with an empty net; `load` fills it."""
    engine, train = config.engine, config.train
    assert isinstance(engine, JaxEngine)
    net = _twin(shape)
    devices = open_devices(engine.device)
    layout = Layout(open_mesh(engine.mesh, devices, net.splits_of(shape)), net.SPLIT)
    check_batch(train, layout.ways, engine.micro_batch, "device", "devices")
    wanted = engine.precision if engine.precision != "auto" else "fp32" if devices[0].platform == "cpu" else "bf16"
    precision = jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[wanted])
    head = shape.width // shape.heads
    fused = devices[0].platform == "gpu" and wanted == "bf16" and head % 8 == 0 and head <= 128
    way = net.Way(precision, engine.recompute, fused, config.model.lora)
    micro_batch = (
        engine.micro_batch if engine.micro_batch != "auto" else _fitting(config, shape, devices[0], layout, precision)
    )
    told = {**(ON_GPU if devices[0].platform == "gpu" else {}), **(DETERMINISTIC if engine.deterministic else {})}
    return JaxOnMesh(shape, train, way, layout, ranks, micro_batch, told or None)


def _fitting(config: RunConfig, shape: Any, device: jax.Device, layout: Layout, precision: Any) -> int:
    """The largest part of a device's samples that a simple rule lets through at once."""
    length, own = config.train.length or shape.positions, config.train.batch // layout.ways
    fits = CPU_LOGITS // (4 * length * shape.padded_vocab)
    if device.platform != "cpu":
        memory = (device.memory_stats() or {}).get("bytes_limit", 16 << 30)
        room = ROOM * memory - WEIGHT_BYTES * shape.parameters * layout.ways / layout.mesh.size
        layer = STATE_BYTES * shape.width + (8 * shape.heads * length if shape.attention_dropout else 0)
        fits = int(room / (layer * shape.layers * length * precision.itemsize / 2))
    return max(size for size in range(1, own + 1) if own % size == 0 and size <= max(1, fits))
