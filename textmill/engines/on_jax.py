"""The JAX engine on one device or a mesh: an optimizer step, gradient accumulation and skipping included, is one program."""

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
from textmill.engines import Mine, Named, Ranks, Sums, compiled_in, every
from textmill.engines.shared_torch import part_of
from textmill.engines.spikes import State, new_guard
from textmill.errors import TextmillError
from textmill.models import Shape, find_part, to_checkpoint, weights_of
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

from textmill.engines.losses_jax import scored, summed_loss, token_weights, tokens_at_once
from textmill.engines.mesh_jax import Shardings, open_mesh
from textmill.engines.meshes import check_batch
from textmill.engines.micro_batch_jax import largest_micro_batch
from textmill.engines.optimizers.step_jax import JaxStep, Optimizer
from textmill.engines.ranks_jax import open_devices, open_ranks

ON_GPU = {"xla_gpu_enable_triton_gemm": False}
"""XLA options on a GPU: matmuls by cuBLAS; on an H200 a step is 2% faster than with XLA's own choice."""
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
"""XLA options for `engine.deterministic`: no sums in order of arrival, no kernels chosen by timing."""

Arrays = dict[str, Array]


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
        self.ranks, self.first = ranks, ranks.first
        self.shape, self.train, self.shardings, self.micro_batch = shape, train, shardings, micro_batch
        self.net = _jax_net(shape)
        divided = shardings.mesh.size > shardings.mesh.shape["replicate"]
        gathered = shardings.gathered if divided else None
        self.options = replace(options, gathered=gathered, by_sample=shardings.by_sample)
        self.device = shardings.mesh.devices.flat[0]
        self.at_once = tokens_at_once(self.device.platform, shape.padded_vocab) * shardings.data_devices
        self.known = {weight.name: weight for weight in weights_with(shape, options.lora)}
        self.optimizer = Optimizer(
            shape, train, options.lora, jnp.float32 if self.device.platform == "cpu" else jnp.bfloat16
        )
        self.guard = new_guard(train, jnp, self._replicated)
        self.held: Arrays = {}
        self.state: dict[str, Any] = {}
        self.compiled_shapes: set[str] = set()
        """Shapes of batches for which a program is compiled."""
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=xla)
        self.evaluate = jax.jit(self._evaluate, compiler_options=xla)

    def samples_of(self, batch: int) -> slice:
        """Neighbouring samples, as many for each process."""
        rows = batch // self.ranks.world
        return slice(self.ranks.rank * rows, (self.ranks.rank + 1) * rows)

    def train_step(self, batch: Batch, step: int, lr: float) -> JaxStep:
        """One compiled step; the host continues as soon as the arrays are sent."""
        began = time.perf_counter()
        keys_N = sample_keys(self.train.seed, step, batch.samples) if drops(self.shape, self.options.lora) else None
        parts = self._micro_batches(batch, keys_N)
        new = (shapes := str(jax.tree.map(jnp.shape, parts))) not in self.compiled_shapes
        self.compiled_shapes.add(shapes)
        memory = self.guard.state if self.guard else None
        self.held, self.state, memory, loss, norm, tokens = self.step(
            self.held, self.state, parts, np.float32(lr), memory, np.int32(step + 1)
        )
        if self.guard and memory:
            self.guard.state = memory
        return JaxStep(loss, norm, tokens, news=compiled_in(time.perf_counter() - began) if new else None)

    def eval_step(self, batch: Batch) -> Sums:
        """Losses of a batch by micro-batches, without dropout."""
        parts = self._micro_batches(part_of(batch, self.ranks.world, self.ranks.rank), None)
        sums = [
            self.evaluate(self.held, {name: values[number] for name, values in parts.items()})
            for number in range(len(parts["labels"]))
        ]
        loss, correct = sum(float(loss) for loss, _ in sums), sum(int(right) for _, right in sums)
        return Sums(loss, int((batch.labels != IGNORED).sum()), correct)

    def weights(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the weights; of a net with adapters, the adapters alone."""
        return self._copies(
            {weight.name: self.held[weight.name] for weight in saved_of(self.shape, self.options.lora)}, "", mine
        )

    def moments(self, mine: Mine = every) -> Iterator[Named]:
        """Host copies of the optimizer's state; none before the first update."""
        for kind in self.optimizer.kinds() if self.updates() else []:
            yield from self._copies(self.state[kind], f"{kind}/", mine)

    def replica_checksums(self) -> dict[str, int]:
        """The bits of each shard of a weight on this process, summed on its device: equal where shards are equal."""
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
            name: in_memory(self.known[name.partition("/")[2]], values, where) for name, values in moments if updates
        }
        self.state = {"count": self._replicated(np.int32(updates))}
        for kind, names in self.optimizer.kinds().items():
            self.state[kind] = {name: self._placed(name, given.pop(f"{kind}/{name}", None)) for name in names}

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        count, peak = self.shardings.mesh.size, peak_flops_by_name(self.device.device_kind)
        return {
            "device": f"{count} x {self.device.device_kind}" if count > 1 else self.device.device_kind,
            "precision": jnp.dtype(self.options.precision).name, "micro_batch": self.micro_batch, "peak_flops": peak and peak * count,
            "parameters": count_with(self.shape, self.options.lora), "trained": sum(self.optimizer.trained.values()),
        }  # fmt: skip

    def close(self) -> None:
        """Give the devices' memory back."""
        for array in jax.tree.leaves((self.held, self.state)):
            array.delete()
        self.held, self.state = {}, {}

    def _step(
        self, weights: Arrays, state: dict[str, Any], parts: Arrays, lr: Array, memory: State | None, number: Array
    ) -> tuple[Any, ...]:
        """An optimizer step: loss and gradients by micro-batches, clipping, the update or none."""
        token_weight, tokens = token_weights(parts["labels"], self.train.loss)
        parts = {**parts, "weights": token_weight}
        narrow = self.net.narrowed(weights, self.options.precision)
        trained = {name: narrow[name] for name in self.optimizer.trained}
        gradient = partial(jax.value_and_grad(self._loss), trained, narrow)
        if len(token_weight) == 1:
            loss, grads = gradient({name: values[0] for name, values in parts.items()})
        else:
            nothing = jnp.zeros(()), {name: jnp.zeros_like(weights[name]) for name in trained}
            loss, grads = jax.lax.scan(partial(_summed, gradient), nothing, parts)[0]
        grads = {
            name: jax.lax.with_sharding_constraint(grad, self.shardings.stored(name, grad.shape))
            for name, grad in grads.items()
        }
        spike = self.guard.judged(memory, loss) if self.guard and memory else jnp.array(False)
        weights, state, norm = self.optimizer.step(weights, state, grads, lr, spike)
        memory = self.guard.after(memory, loss, spike, jnp.isfinite(norm), number) if self.guard and memory else None
        memory, loss, norm, tokens = jax.lax.with_sharding_constraint(
            (memory, loss, norm, tokens), self.shardings.replicated()
        )
        return weights, state, memory, loss, norm, tokens

    def _loss(self, trained: Arrays, others: Arrays, part: Arrays) -> Array:
        """The loss of a micro-batch as a function of the trained weights."""
        weights = {**others, **trained}
        x_NTE = self.net.states(
            weights, self.shape, self.options, part["inputs"], part.get("keys"), part.get("documents")
        )
        head, train = self._head(weights), self.train
        return summed_loss(
            x_NTE,
            head,
            part["labels"],
            part["weights"],
            self.shape.vocab,
            self.at_once,
            train.label_smoothing,
            train.z_loss,
        )

    def _evaluate(self, weights: Arrays, part: Arrays) -> tuple[Array, Array]:
        """The summed loss of a micro-batch, and how many labels have the highest logit."""
        narrow = self.net.narrowed(weights, self.options.precision)
        x_NTE = self.net.states(narrow, self.shape, self.options, part["inputs"], None, part.get("documents"))
        losses, right = scored(x_NTE, self._head(weights), part["labels"], self.shape.vocab, self.at_once)
        sums: tuple[Array, Array] = jax.lax.with_sharding_constraint(
            (losses.sum(), right.sum()), self.shardings.replicated()
        )
        return sums

    def _head(self, weights: Arrays) -> Array:
        head = weights[self.net.HEAD]
        return head if self.options.gathered is None else self.options.gathered(self.net.HEAD, head)

    def _micro_batches(self, batch: Batch, keys_N: Any) -> Arrays:
        """A batch on the devices as [micro-batches, samples, ...]; rows that fill the last one have no labels."""
        own = self.shardings.data_devices // self.ranks.world
        rows = own * min(self.micro_batch, -(-len(batch.inputs) // own))
        more = -len(batch.inputs) % rows
        named = (
            ("inputs", batch.inputs, 0),
            ("labels", batch.labels, IGNORED),
            ("keys", keys_N, 0),
            ("documents", batch.documents, 0),
        )
        arrays: list[tuple[str, Any, int]] = [one for one in named if one[1] is not None]
        sharding = self.shardings.micro_batches()
        return {
            name: jax.make_array_from_process_local_data(
                sharding, _filled(values, more, fill).reshape(-1, rows, *values.shape[1:])
            )
            for name, values, fill in arrays
        }

    def _replicated(self, values: Any) -> Array:
        """A small array that every device has."""
        return jax.make_array_from_callback(np.shape(values), self.shardings.replicated(), lambda index: values[index])

    def _placed(self, name: str, values: Any) -> Array:
        """An array with a weight's sharding; zeros where there are no values."""
        if values is None:
            values = np.zeros(self.held[name].shape, np.float32)
        sharding = self.shardings.stored(name, values.shape)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def _copies(self, arrays: Arrays, prefix: str, mine: Mine) -> Iterator[Named]:
        for name in [name for name in self.known if name in arrays]:
            here = arrays[name].is_fully_addressable or arrays[name].is_fully_replicated
            if here and not mine(prefix + name):
                continue
            # A copy: on a CPU the next step reuses the array's memory. Shards of other processes are gathered by all.
            values = np.array(arrays[name] if here else process_allgather(arrays[name], tiled=True))
            if mine(prefix + name):
                yield prefix + name, to_checkpoint(self.known[name], values)


def _summed(gradient: Any, sums: tuple[Array, Arrays], part: Arrays) -> tuple[tuple[Array, Arrays], None]:
    """Loss and gradients with those of one micro-batch more, in the weights' own precision."""
    loss, grads = gradient(part)
    return (sums[0] + loss, jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums[1], grads)), None


def _filled(values: Any, more: int, value: int) -> Any:
    return np.pad(values, [(0, more), *[(0, 0)] * (values.ndim - 1)], constant_values=value) if more else values


def _jax_net(shape: Shape) -> Any:
    """The family's net in JAX: models/FAMILY/net_jax.py has HEAD, NetOptions, narrowed and states."""
    module = find_part(shape, "net_jax")
    if module is None:
        raise TextmillError(f"engine.kind: the family {shape.family} has no JAX net; set engine.kind=torch")
    return module


def new_ranks(config: RunConfig) -> Ranks:
    """The processes that torchrun or srun started, or this one alone."""
    return open_ranks(config.engine.device, config.engine.timeout)


def new_engine(config: RunConfig, shape: Shape, ranks: Ranks) -> OnJax:
    """The engine, its net without values; `load` fills it."""
    engine, train = config.engine, config.train
    assert isinstance(engine, JaxEngine)
    net = _jax_net(shape)
    devices = open_devices(engine.device)
    weights = weights_of(shape)
    sizes = shape.tensor_parallel_sizes() | {weight.parameter: weight.outputs for weight in weights if weight.by_token}
    split = {weight.name: weight.split for weight in weights if weight.split is not None}
    shardings = Shardings(open_mesh(engine.mesh, devices, sizes), split)
    check_batch(train, shardings.data_devices, engine.micro_batch, "device", "devices")
    wanted = engine.precision if engine.precision != "auto" else "fp32" if devices[0].platform == "cpu" else "bf16"
    precision = jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[wanted])
    head = shape.width // shape.heads
    fused = devices[0].platform == "gpu" and wanted == "bf16" and head % 8 == 0 and head <= 128
    options = net.NetOptions(precision, engine.recompute, fused, config.model.lora)
    micro_batch = (
        engine.micro_batch
        if engine.micro_batch != "auto"
        else largest_micro_batch(config, shape, devices[0], shardings, precision)
    )
    xla = {**(ON_GPU if devices[0].platform == "gpu" else {}), **(DETERMINISTIC if engine.deterministic else {})}
    return OnJax(shape, train, options, shardings, ranks, micro_batch, xla or None)
