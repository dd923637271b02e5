"""The kernels of our own in a training step on one GPU, each in several forms: milliseconds a step, and how near to the memory's rate.

    python bench/kernels_gpu.py [SIZE:BATCH] [seconds=0.05] [length=1024]

Without a size: small:64, bf16, random numbers. A form is the tile, the warps and the number of programs that a kernel's module has as
constants; the first of each is what the product has. Each has its turn for `seconds`, twice, after some heat, and the better turn counts.
The last column is the bytes that must be read and written, over the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from products_gpu import HEAT, PIECE, drawn, milliseconds

from textmill.config import ModelConfig
from textmill.models.gpt2 import facts as gpt2

VOCAB = 50257
Form = dict[str, int]


def forms(module: Any, **values: Iterable[int]) -> list[Form]:
    """What the module has, and then all others that its constants may be."""
    own = {name: getattr(module, name) for name in values}
    return [own, *(form for one in product(*values.values()) if (form := dict(zip(values, one, strict=True))) != own)]


def timed(
    name: str, module: Any, choices: list[Form], work: Callable[[], Any], often: int, moved: int, seconds: float
) -> None:
    """A line for each form, the fastest at the end again."""
    own, found = choices[0], []
    for form in choices:
        for constant, value in form.items():
            setattr(module, constant, value)
        try:
            each = min(milliseconds(work, seconds) for _ in range(2))
        except Exception as error:  # too much shared memory, too many registers
            print(f"  {name} {form}: {type(error).__name__}")
            continue
        found.append((each, form))
        print(f"  {name} {form}: {often * each:.3f} ms a step, {moved / each / 1e9:.2f} TB/s", flush=True)
    for constant, value in own.items():
        setattr(module, constant, value)
    best, form = min(found, key=lambda one: one[0])
    print(f"  {name}: {often * found[0][0]:.3f} ms a step as it is, {often * best:.3f} with {form}", flush=True)


def gelus(rows: int, inner: int, layers: int, seconds: float) -> None:
    """Bias and GELU, backward: what forward takes is the memory's already."""
    from textmill.kernels import gelu_triton as module

    x, slope, bias = drawn(rows, inner), drawn(rows, inner), torch.randn(inner, device="cuda")
    choices = forms(module, ROWS=(4, 8), COLUMNS=(512,), WARPS=(4, 8), PROGRAMS=(132, 264, 528))
    timed(
        "GELU's gradient",
        module,
        choices,
        lambda: module.bias_gelu_backward(slope, x, bias, True),
        layers,
        6 * x.numel(),
        seconds,
    )


def gelus8(rows: int, inner: int, layers: int, seconds: float) -> None:
    """Bias, GELU and the rounding to fp8, forward and backward."""
    from textmill.kernels import gelu_fp8_triton as module
    from textmill.kernels.fp8_torch import KIND, TINY

    h, slope, bias = drawn(rows, inner), drawn(rows, inner), torch.randn(inner, device="cuda")
    choices = forms(module, COLUMNS=(16, 32), PROGRAMS=(528, 1056, 2112))
    work = lambda: module.forward(h, bias, True, KIND, TINY)  # noqa: E731
    timed("GELU to fp8", module, choices, work, layers, 5 * h.numel(), seconds)
    choices = forms(module, COLUMNS_BACK=(16, 32), PROGRAMS_BACK=(264, 528))
    work = lambda: module.backward(slope, h, bias, True, KIND, TINY)  # noqa: E731
    timed("GELU's gradient to fp8", module, choices, work, layers, 7 * h.numel(), seconds)


def takes_fp8(shape: Any) -> bool:
    """Whether card and widths do."""
    from textmill.kernels.fp8_torch import MULTIPLE

    return torch.cuda.get_device_capability() >= (8, 9) and shape.width % MULTIPLE == shape.inner % MULTIPLE == 0


def heads(samples: int, length: int, shape: Any, seconds: float) -> None:
    """The gradients of queries, keys and values joined."""
    from textmill.kernels import qkv_triton as module

    parts = [drawn(samples, length, shape.heads, shape.width // shape.heads).transpose(1, 2) for _ in range(3)]
    choices = forms(module, ROWS=(8, 16), COLUMNS=(128, 256), WARPS=(4,), PROGRAMS=(396, 660))
    timed("joined heads", module, choices, lambda: module.joined(*parts), shape.layers, 12 * parts[0].numel(), seconds)


def norms(rows: int, width: int, layers: int, seconds: float) -> None:
    """A LayerNorm backward, with the sums of its weights and of two biases."""
    from textmill.kernels import norms_triton as module

    slope, x, stream, means = (
        drawn(rows, width),
        drawn(rows, width),
        drawn(rows, width),
        torch.zeros(rows, device="cuda"),
    )
    choices = forms(module, CHUNK=(128, 256, 512), PROGRAMS=(264, 528, 792, 1056))
    work = lambda: module.backward(slope, x, means, means, means[:width], stream, True)  # noqa: E731
    timed("LayerNorm's gradient", module, choices, work, 2 * layers, 8 * x.numel(), seconds)


def losses(rows: int, padded: int, seconds: float) -> None:
    """The cross-entropy with its gradient, of as many tokens as the head takes at a time."""
    from textmill.kernels import cross_entropy_triton as module

    piece = min(PIECE, rows)
    logits, labels = drawn(piece, padded), torch.randint(0, VOCAB, (piece,), device="cuda", dtype=torch.int32)
    shares = torch.full((piece,), 1 / rows, device="cuda")
    choices = forms(module, LANES=(512, 1024), WARPS=(16, 32))
    work = lambda: module.grade(logits, labels, shares, VOCAB, 0.0, 0.0)  # noqa: E731
    timed("cross-entropy", module, choices, work, rows // piece, 4 * logits.numel(), seconds)


def main(words: list[str]) -> None:
    """All kernels of one size."""
    given = {key: float(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    size, _, batch = next((word for word in words if "=" not in word), "small:64").partition(":")
    samples, length, seconds = int(batch), int(given.get("length", 1024)), given.get("seconds", 0.05)
    shape = gpt2.shape_of(ModelConfig(size=size), vocab=VOCAB, end=0, length=length)
    heat = drawn(8192, 8192)
    milliseconds(lambda: heat @ heat, HEAT)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size}, {samples} x {length}")
    gelus(samples * length, shape.inner, shape.layers, seconds)
    if takes_fp8(shape):
        gelus8(samples * length, shape.inner, shape.layers, seconds)
    heads(samples, length, shape, seconds)
    norms(samples * length, shape.width, shape.layers, seconds)
    losses(samples * length, shape.padded_vocab, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
