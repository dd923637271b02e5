"""Each matmul of a training step on one GPU: every algorithm that cuBLAS proposes, against the one that torch uses.

    python bench/matmuls_gpu.py [SIZE:BATCH ...] [seconds=0.12] [length=1024]

Without sizes: small:64 and medium:32, bf16, random numbers. A GPU that trains runs at its power limit, where the
fastest kernel may differ from that of a cool one: each algorithm runs for `seconds` without a pause, twice, after a
warm-up. Prints milliseconds of each matmul and, at the end, of all matmuls of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from textmill.config import ModelConfig
from textmill.kernels.cublaslt import WORKSPACE_BYTES, Matmul, MatmulSpec
from textmill.models.gpt2 import facts as gpt2

CHUNK = 32768
"""Tokens whose logits are computed at a time."""
WARM_UP_SECONDS = 2.0


def milliseconds(work: Callable[[], Any], seconds: float) -> float:
    """The average time of one call."""
    start, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = 3
    for _ in range(2):  # the first gives the number of repeats
        start.record()
        for _ in range(times):
            work()
        ended.record()
        ended.synchronize()
        each = start.elapsed_time(ended) / times
        times = max(3, int(seconds * 1e3 / each))
    return each


def normal(*shape: int) -> Tensor:
    """Normal random numbers, about as large as those in a net."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.5


def compare(name: str, a: Tensor, b: Tensor, seconds: float) -> tuple[float, float]:
    """One matmul: the better of two measurements of torch, and of the best algorithm."""
    (m, k), n, found = a.shape, b.shape[1], []
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    matmul = Matmul(
        MatmulSpec(m, n, k, a.stride(1) != 1, b.stride(1) != 1, a.dtype, a.dtype, bias=False, has_addend=False),
        out.device,
    )
    algorithms, given = (
        matmul.propose_algorithms(),
        (a, b, None, None, out, torch.empty(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)),
    )
    torchs = [milliseconds(lambda: torch.mm(a, b, out=out), seconds)]
    for _ in range(2):
        found.append([milliseconds(partial(matmul.run, one, *given), seconds) for one in algorithms])
    torchs.append(milliseconds(lambda: torch.mm(a, b, out=out), seconds))
    exact = out.clone()
    times = [min(one) for one in zip(*found, strict=True)]
    best = min(range(len(times)), key=lambda number: times[number])
    matmul.run(algorithms[best], *given)
    off = ((out.float() - exact.float()).norm() / exact.float().norm()).item()
    result = f"{times[best]:.4f} ms by algorithm {best} of {len(algorithms)}, relative difference {off:.0e}"
    print(f"  {name:<20} torch {min(torchs):.4f} ms | first proposal {times[0]:.4f} | best {result}", flush=True)
    return min(torchs), min(times[best], min(torchs))


def matmuls_of(size: str, batch: int, length: int) -> list[tuple[str, int, int, int, int]]:
    """A step's matmuls: name, rows, inputs, outputs, how often."""
    shape, rows = gpt2.shape_of(ModelConfig(size=size), vocab=50257, end=0, length=length), batch * length
    wide, inner, layers, chunk = shape.width, shape.inner, shape.layers, min(CHUNK, batch * length)
    inside = [("qkv", wide, 3 * wide), ("attention out", wide, wide), ("MLP in", wide, inner), ("MLP out", inner, wide)]
    return [
        *((name, rows, ins, outs, layers) for name, ins, outs in inside),
        ("head", chunk, wide, shape.padded_vocab, rows // chunk),
    ]


def main(arguments: list[str]) -> None:
    """All matmuls of each size."""
    options = {
        "seconds": 0.12,
        "length": 1024.0,
        **{key: float(value) for key, _, value in (one.partition("=") for one in arguments if "=" in one)},
    }
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    matrix = normal(8192, 8192)
    milliseconds(lambda: matrix @ matrix, WARM_UP_SECONDS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for model in [one for one in arguments if "=" not in one] or ["small:64", "medium:32"]:
        size, _, batch = model.partition(":")
        totals, seconds = [0.0, 0.0], options["seconds"]
        print(f"{size}, {batch} x {options['length']:.0f}")
        for name, rows, ins, outs, often in matmuls_of(size, int(batch), int(options["length"])):
            x, weight, dy = normal(rows, ins), normal(outs, ins) * 0.04, normal(rows, outs)
            for kind, a, b in (
                ("forward", x, weight.t()),
                ("input gradient", dy, weight),
                ("weight gradient", dy.t(), x),
            ):
                both = compare(f"{name}, {kind}", a, b, seconds)
                totals = [total + often * one for total, one in zip(totals, both, strict=True)]
        print(
            f"  all matmuls of a step: torch {totals[0]:.1f} ms, the best of each {totals[1]:.1f} ms, "
            f"ratio {totals[0] / totals[1]:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
