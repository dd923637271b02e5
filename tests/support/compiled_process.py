"""One rank in the tests of compiled meshes: compiled_process.py FILE DEVICE LAYOUT...

It writes the losses and gradient norms of each layout, eager and compiled. On a GPU all ranks share the card, over
gloo, and tensor parallelism is not compiled; a single rank has groups of one process, over NCCL.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support import layout_process
from tests.support.layout_process import LAYOUTS, family_of, started, stepped
from tests.support.masked_batches import rows_of
from textmill.config import ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.engines import on_torch, open_ranks, ranks_torch
from textmill.engines.parallel_torch import DataParallel, Parallel
from textmill.kernels import matmul_torch
from textmill.processes.ranks import Ranks
from textmill.processes.signals import run_and_exit
from textmill.tokens.batches.batch import Batch

STEPS, ROWS, LENGTH = 4, 8, 128
GPU_VOCAB = layout_process.VOCAB
Numbers = list[tuple[float, float]]


def on_cpu(name: str, ranks: Any, *, compiled: bool) -> tuple[Numbers, bool]:
    """The net of all layout tests; compiled by a backend that traces all, but generates no code."""
    config = layout_process.config_of(LAYOUTS[name], family_of(name))
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"compile": compiled})})
    engine = started(config, ranks)
    return stepped(engine, range(STEPS), config.model.family), engine.compiled is not None  # type: ignore[attr-defined]


def on_gpu(name: str, ranks: Any, *, compiled: bool) -> tuple[Numbers, bool]:
    """A net that is large enough for our own kernels, with two micro-batches in a step."""
    mesh = {} if ranks.world == 1 else LAYOUTS[name]
    shape = ShapeConfig(layers=2, heads=4, width=128, positions=LENGTH, dropout=0.1)
    config = RunConfig(
        model=ModelConfig(size="nano", shape=shape),
        train=TrainConfig(batch=ROWS, length=LENGTH, learning_rate=3e-3),
        engine=TorchEngine(device="cuda", precision="bf16", micro_batch=2, compile=compiled, mesh=MeshConfig(**mesh)),
    )
    engine: Any = started(config, ranks)
    ids = np.random.default_rng(1).integers(0, GPU_VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    batch, found = rows_of(Batch(ids[:, :-1], ids[:, 1:], np.arange(ROWS)), engine.samples_of(ROWS)), []
    for step in range(STEPS):
        result = engine.train_step(batch, step, 3e-3)
        found.append((result.loss, result.norm))
    return found, engine.compiled is not None


def share_the_card() -> None:
    """Every rank takes the first GPU, over gloo: NCCL refuses two ranks on one GPU."""
    initialise = dist.init_process_group
    ranks_torch.choose_device = lambda *_: torch.device("cuda", 0)
    dist.init_process_group = lambda _, **given: initialise("cpu:gloo,cuda:gloo", **given)  # type: ignore[assignment]


class OneProcessMesh(Parallel):
    """A mesh of one process whose collectives run, over NCCL."""

    sharding = False

    def __init__(self, mesh: Any, rank: int, device: torch.device) -> None:
        super().__init__(mesh, rank, device)
        self.axes = init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=("replicate", "shard", "tensor"))

    def shard_net(self, net: Any) -> None:
        """With FSDP, whatever the size of the mesh."""
        if self.sharding:
            self._shard_blocks(net)

    def sum_gradients(self, parameters: Any) -> None:
        """With data parallelism, whatever the size of the mesh."""
        if not self.sharding:
            self.data_parallel = DataParallel(parameters, self._group("replicate"))


def open_one() -> Any:
    """A single rank whose engines have groups of one process."""
    torch.cuda.set_device(0)
    wait = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    on_torch.Parallel = OneProcessMesh  # type: ignore[misc]
    return Ranks()


def main(path: Path, device: str, names: list[str]) -> int:
    """Measure these layouts, which all have the same number of ranks."""
    alone = os.environ["WORLD_SIZE"] == "1"
    if device == "cpu":
        compile_ = torch.compile
        torch.compile = lambda *given, **more: compile_(*given, **{**more, "backend": "aot_eager"})  # type: ignore[assignment]
    else:
        matmul_torch.MIN_FLOPS = 0
        if not alone:
            share_the_card()
    measure = on_cpu if device == "cpu" else on_gpu
    found: dict[str, Any] = {}
    with closing(open_one() if alone else open_ranks(layout_process.config_of({}).engine)) as ranks:
        for name in names:
            OneProcessMesh.sharding = name.startswith("shard")
            refused = device == "cuda" and "tensor" in LAYOUTS[name]
            kinds = ("eager",) if refused else ("eager", "compiled")
            found[name] = {kind: measure(name, ranks, compiled=kind == "compiled") for kind in kinds}
        if ranks.first:
            path.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
