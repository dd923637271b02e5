"""Each matrix product of a training step in the ways that cuBLAS proposes for it, against the one that torch takes, on one GPU.

    python bench/products_gpu.py [SIZE:BATCH ...] [seconds=0.12] [length=1024]

Without sizes: small:64 and medium:32, bf16, random numbers. A card that trains is at its power limit, where the fastest kernel may be
another than on a cool one: each way has its turn for `seconds` without a pause, twice, after some seconds of other products. Milliseconds
of one product and, at the end, of all those of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from textmill.config import ModelConfig
from textmill.kernels.cublaslt import WORKSPACE, Form, Product
from textmill.models.gpt2 import facts as gpt2

PIECE = 32768
"""Tokens whose scores are made at a time."""
HEAT = 2.0


def milliseconds(work: Callable[[], Any], seconds: float) -> float:
    """Of one piece of work, done again and again."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = 3
    for _ in range(2):  # the first says how often
        begun.record()
        for _ in range(times):
            work()
        ended.record()
        ended.synchronize()
        each = begun.elapsed_time(ended) / times
        times = max(3, int(seconds * 1e3 / each))
    return each


def drawn(*shape: int) -> Tensor:
    """Numbers as a net has them, more or less."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.5


def compared(name: str, a: Tensor, b: Tensor, seconds: float) -> tuple[float, float]:
    """One product: the better of two turns of torch, and of the best of the ways."""
    (m, k), n, found = a.shape, b.shape[1], []
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    product = Product(
        Form(m, n, k, a.stride(1) != 1, b.stride(1) != 1, a.dtype, a.dtype, bias=False, adds=False), out.device
    )
    ways, given = product.ways(), (a, b, None, None, out, torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8))
    torchs = [milliseconds(lambda: torch.mm(a, b, out=out), seconds)]
    for _ in range(2):
        found.append([milliseconds(lambda way=way: product.make(way, *given), seconds) for way in ways])  # type: ignore[misc]
    torchs.append(milliseconds(lambda: torch.mm(a, b, out=out), seconds))
    exact = out.clone()
    times = [min(one) for one in zip(*found, strict=True)]
    best = min(range(len(times)), key=lambda number: times[number])
    product.make(ways[best], *given)
    off = ((out.float() - exact.float()).norm() / exact.float().norm()).item()
    told = f"{times[best]:.4f} ms by way {best} of {len(ways)}, {off:.0e} apart"
    print(f"  {name:<20} torch {min(torchs):.4f} ms | first proposal {times[0]:.4f} | best {told}", flush=True)
    return min(torchs), min(times[best], min(torchs))


def products_of(size: str, batch: int, length: int) -> list[tuple[str, int, int, int, int]]:
    """A step's products: name, rows, inputs, outputs, how often."""
    shape, rows = gpt2.shape_of(ModelConfig(size=size), vocab=50257, end=0, length=length), batch * length
    wide, inner, layers, piece = shape.width, shape.inner, shape.layers, min(PIECE, batch * length)
    inside = [("qkv", wide, 3 * wide), ("attention out", wide, wide), ("MLP in", wide, inner), ("MLP out", inner, wide)]
    return [
        *((name, rows, ins, outs, layers) for name, ins, outs in inside),
        ("head", piece, wide, shape.padded_vocab, rows // piece),
    ]


def main(words: list[str]) -> None:
    """All products of each size."""
    options = {
        "seconds": 0.12,
        "length": 1024.0,
        **{key: float(value) for key, _, value in (word.partition("=") for word in words if "=" in word)},
    }
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    heat = drawn(8192, 8192)
    milliseconds(lambda: heat @ heat, HEAT)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for word in [word for word in words if "=" not in word] or ["small:64", "medium:32"]:
        size, _, batch = word.partition(":")
        totals, seconds = [0.0, 0.0], options["seconds"]
        print(f"{size}, {batch} x {options['length']:.0f}")
        for name, rows, ins, outs, often in products_of(size, int(batch), int(options["length"])):
            x, weight, slope = drawn(rows, ins), drawn(outs, ins) * 0.04, drawn(rows, outs)
            for kind, a, b in (
                ("forward", x, weight.t()),
                ("inputs' slope", slope, weight),
                ("weights' slope", slope.t(), x),
            ):
                both = compared(f"{name}, {kind}", a, b, seconds)
                totals = [total + often * one for total, one in zip(totals, both, strict=True)]
        print(
            f"  all products of a step: torch {totals[0]:.1f} ms, the best of each {totals[1]:.1f} ms, ratio {totals[0] / totals[1]:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
