"""Meshes of any size in one process: a rank whose collectives return at once, and a record of what they would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from textmill.config import ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.engines.on_torch import OnTorch, new_engine
from textmill.models import initial_weights, open_family
from textmill.processes.ranks import Ranks
from textmill.tokens.batches.batch import Batch

VOCAB, LENGTH, PASSES, MICRO_BATCH = 512, 32, 2, 2
FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class FakeRanks(Ranks):
    """Rank 0 of a mesh whose other ranks do not exist."""

    def __init__(self, world: int) -> None:
        self.world = world

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """As if all ranks had these values."""
        return [value * self.world for value in values]


@dataclass(frozen=True)
class Collective:
    """One collective of this rank."""

    kind: str
    ranks: int
    sent: float
    """Bytes that a rank sends in a ring: n - 1 of n parts, for an all-reduce twice."""


class Collectives(TorchDispatchMode):
    """While open, records every collective of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation; if it is a collective, record it."""
        out = func(*args, **(kwargs or {}))
        tensors = [one for given in (*args, out) for one in (given if isinstance(given, list) else [given])]
        sizes = [one.nbytes for one in tensors if isinstance(one, torch.Tensor)]
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
            kind = func._opname.strip("_").removesuffix("_base")
        elif func.namespace == "_c10d_functional" and func._opname in FUNCTIONAL:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            kind = FUNCTIONAL[func._opname]
        else:
            return out
        ring = (group.size() - 1) / group.size() * (2 if kind == "allreduce" else 1)
        ring = {"send": 1.0, "recv": 0.0}.get(kind, ring)
        if kind == "recv":  # ones are the votes of other pipeline stages for fixed shapes
            next(one for one in tensors if isinstance(one, torch.Tensor)).fill_(1)
        self.found.append(Collective(kind, group.size(), ring * max(sizes)))
        return out

    def sent(self, kind: str, ranks: int) -> float:
        """All bytes sent by one kind of collective in groups of so many ranks."""
        return sum(one.sent for one in self.found if (one.kind, one.ranks) == (kind, ranks))


def config_of(mesh: dict[str, Any], world: int, family: str = "gpt2", layers: int = 2, **engine: Any) -> RunConfig:
    """A small net, with two micro-batches of two samples in a step of each rank."""
    own = {"kv_heads": 8} if family == "llama" else {}
    shape = ShapeConfig(layers=layers, heads=8, width=64, positions=LENGTH, **own)
    data_ranks = world // (mesh.get("tensor", 1) * mesh.get("pipeline", 1))
    return RunConfig(
        model=ModelConfig(family=family, size="nano" if family == "gpt2" else "small", shape=shape),
        train=TrainConfig(batch=PASSES * MICRO_BATCH * data_ranks, length=LENGTH),
        engine=TorchEngine(device="cpu", precision="fp32", micro_batch=MICRO_BATCH, mesh=MeshConfig(**mesh), **engine),
    )


def shape_of(config: RunConfig) -> Any:
    """Return the shape of the config's net."""
    return open_family(config.model.family).shape_of(config.model, vocab=VOCAB, eos_id=0)


def started(config: RunConfig, world: int) -> OnTorch:
    """Open the engine of rank 0, inside `fake_ranks`."""
    engine = new_engine(config.engine, config.train, shape_of(config), config.model.lora, FakeRanks(world))
    engine.load(initial_weights(engine.net.shape, 5), [], 0, "the first weights")
    return engine


def batch_of_rank() -> Batch:
    """The samples of one rank."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (PASSES * MICRO_BATCH, LENGTH + 1), dtype=np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(len(ids)))
