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
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future
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


class ThroughHost(dist.ProcessGroup):
    """Gloo in memory of the host. NCCL refuses two ranks on one GPU, and gloo's own collectives of tensors on a GPU end
    the process in torch 2.11 (all-gather) or do not exist (send)."""

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self.gloo = dist.ProcessGroupGloo(store, rank, world, timeout)

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        return "through_host"

    def run(self, method: str, outputs: list[Tensor], inputs: list[Tensor] | None, *rest: Any) -> Any:
        """One collective of single tensors; without inputs, in place."""
        on_host = [tensor.detach().cpu() for tensor in outputs]
        given = (on_host,) if inputs is None else (on_host[0], inputs[0].detach().cpu())
        getattr(self.gloo, method)(*given, *rest).wait()
        for tensor, found in zip(outputs, on_host, strict=True):
            tensor.detach().copy_(found)
        done: Any = torch.futures.Future()
        done.set_result(outputs)
        return _create_work_from_future(done)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.run("allreduce", tensors, None, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.run("broadcast", tensors, None, opts)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        return self.run("_allgather_base", [output], [given], opts)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        return self.run("_reduce_scatter_base", [output], [given], opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        return self.run("_allgather_base", outputs, inputs, AllgatherOptions())

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        return self.run("_reduce_scatter_base", outputs, inputs, opts)

    # The names of torch 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        full = torch.stack(outputs[0])
        work = self._allgather_base(full, inputs[0].contiguous(), opts)
        for output, part in zip(outputs[0], full, strict=True):
            output.copy_(part)
        return work

    def barrier(self, opts: Any) -> Any:
        return self.gloo.barrier(opts)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self.gloo.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self.gloo.recv(tensors, source, tag)


class Exchanged:
    """One tensor on its way to or from another rank in memory of the host."""

    def __init__(self, operation: dist.P2POp) -> None:
        self.received, self.tensor = operation.op is dist.irecv, operation.tensor.detach()
        self.on_host = self.tensor.cpu()
        self.work: Any = operation.op(self.on_host, operation.peer, group=operation.group, tag=operation.tag)

    def wait(self) -> None:
        """Wait, and copy what has come to the GPU."""
        self.work.wait()
        if self.received:
            self.tensor.copy_(self.on_host)


def share_the_card(device: str = "cuda") -> None:
    """Every rank takes the first GPU."""
    dist.Backend.register_backend("through_host", ThroughHost, devices=["cpu", "cuda"])
    initialise, send, recv = dist.init_process_group, dist.send, dist.recv
    ranks_torch.choose_device = lambda *_: torch.device(device, 0)

    def received(tensor: Tensor, src: int, group: Any = None) -> None:
        on_host = torch.empty_like(tensor, device="cpu")
        recv(on_host, src, group=group)
        tensor.copy_(on_host)

    dist.init_process_group = lambda _, **given: initialise("through_host", **given)  # type: ignore[assignment]
    dist.send = lambda tensor, dst, group=None: send(tensor.cpu(), dst, group=group)
    dist.recv = received
    dist.batch_isend_irecv = lambda operations: [Exchanged(one) for one in operations]


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
            self.data_parallel = DataParallel(parameters, self.group("replicate"))


def open_one() -> Any:
    """A single rank whose engines have groups of one process."""
    torch.cuda.set_device(0)
    wait = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    on_torch.Parallel = OneProcessMesh  # type: ignore[misc]
    on_torch.OnTorch._is_small = lambda _: False  # type: ignore[method-assign]  # no CUDA graphs, as on a larger mesh
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
            kinds = ("eager", "compiled")
            found[name] = {kind: measure(name, ranks, compiled=kind == "compiled") for kind in kinds}
        if ranks.first:
            path.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
