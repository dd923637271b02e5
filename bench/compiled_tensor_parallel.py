"""Gradient norms of one block that two tensor-parallel processes share, eager and compiled: a small program for a
fault that was seen on a GPU, where a compiled net had half the gradient norm (docs/parallel.md).

    python bench/compiled_tensor_parallel.py            # two processes on CPUs
    python bench/compiled_tensor_parallel.py cuda       # two processes that share the first GPU, over gloo, in bf16

The block is a column-parallel matrix, GELU and a row-parallel matrix. The ways to sum over the ranks differ in what
the compiler sees: `in place` is what a net uses, `functional` what torch's DTensor uses, both traced; `hidden` is not.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.verification.launcher import free_port

BACKENDS = ("eager", "aot_eager", "inductor")
WIDTH, INNER, TOKENS = 64, 256, 32


class Functional(TensorParallel):
    """Sums that return a new tensor."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", self.group))


class Hidden(TensorParallel):
    """Sums that the compiler does not trace."""

    all_reduce = torch.compiler.disable(TensorParallel.all_reduce)


SUMS = {"in place": TensorParallel, "functional": Functional, "hidden": Hidden}


def gradient_norm(tensor: TensorParallel, backend: str, device: torch.device) -> float:
    """The norm of the gradients of both ranks' parts and of the input."""

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inside = torch.nn.functional.gelu(tensor.to_parallel_region(x) @ up)
        return x + tensor.from_parallel_region(inside @ down)

    torch.compiler.reset()
    random = torch.Generator().manual_seed(1)
    sizes = (TOKENS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)
    x, up, down = (torch.randn(size, generator=random) / 8 for size in sizes)
    own = slice(INNER // 2 * tensor.rank, INNER // 2 * (tensor.rank + 1))
    values = [part.to(device).requires_grad_() for part in (x, up[:, own].clone(), down[own].clone())]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        torch.compile(block, backend=backend)(*values).square().sum().backward()
    squares = torch.tensor([float(value.grad.square().sum()) for value in values if value.grad is not None])
    dist.all_reduce(squares[1:])
    return float(squares.sum().sqrt())


def run(rank: int, kind: str, port: int) -> None:
    """One of the two processes; the first one prints a line for each way to sum."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:gloo" if kind == "cuda" else "gloo", rank=rank, world_size=2)
    for name, sums in SUMS.items():
        tensor = sums(dist.group.WORLD, rank, 2, sequence=False)
        norms = (f"{one} {gradient_norm(tensor, one, torch.device(kind)):.6f}" for one in BACKENDS)
        line = "  ".join((f"{name:<10}", *norms))
        if rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    mp.spawn(run, (sys.argv[1] if len(sys.argv) > 1 else "cpu", free_port()), nprocs=2)
