"""Time textmill's own kernels of a training step on one GPU, each with several tile sizes, and their memory throughput.

    python bench/kernels_gpu.py [SIZE:BATCH] [seconds=0.05] [length=1024]

The default size is small:64; bf16, random numbers. Tile size, warps and number of programs are constants in a kernel's
module; the first line of each kernel has the values that textmill uses. Each choice is measured for `seconds`, twice,
after a warm-up; the better one counts. The last column is the bytes to read and write, divided by the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from matmuls_gpu import CHUNK, WARM_UP_SECONDS, milliseconds, normal

from textmill.config import ModelConfig
from textmill.models.gpt2 import facts as gpt2

VOCAB = 50257
Constants = dict[str, int]


def list_constants(module: Any, **values: Iterable[int]) -> list[Constants]:
    """Return the module's own values of its constants, then all other combinations."""
    own = {name: getattr(module, name) for name in values}
    combinations = (dict(zip(values, one, strict=True)) for one in product(*values.values()))
    return [own, *(other for other in combinations if other != own)]


def measure(
    name: str, module: Any, choices: list[Constants], work: Callable[[], Any], count: int, moved: int, seconds: float
) -> None:
    """Print a line for each choice of constants, then the first and the fastest again."""
    own, found = choices[0], []
    for constants in choices:
        for constant, value in constants.items():
            setattr(module, constant, value)
        try:
            each = min(milliseconds(work, seconds) for _ in range(2))
        except Exception as error:  # too much shared memory, too many registers
            print(f"  {name} {constants}: {type(error).__name__}")
            continue
        found.append((each, constants))
        print(f"  {name} {constants}: {count * each:.3f} ms per step, {moved / each / 1e9:.2f} TB/s", flush=True)
    for constant, value in own.items():
        setattr(module, constant, value)
    best, constants = min(found, key=lambda one: one[0])
    print(f"  {name}: {count * found[0][0]:.3f} ms per step as it is, {count * best:.3f} with {constants}", flush=True)


def measure_gelu(rows: int, inner: int, layers: int, seconds: float) -> None:
    """Measure bias and GELU, backward; forward already runs at the memory's speed."""
    from textmill.kernels import gelu_triton as module

    x, gradient, bias = normal(rows, inner), normal(rows, inner), torch.randn(inner, device="cuda")
    choices = list_constants(module, ROWS=(4, 8), COLUMNS=(512,), WARPS=(4, 8), PROGRAMS=(132, 264, 528))
    measure(
        "GELU's gradient",
        module,
        choices,
        lambda: module.bias_gelu_backward(gradient, x, bias, True),
        layers,
        6 * x.numel(),
        seconds,
    )


def measure_gelu_fp8(rows: int, inner: int, layers: int, seconds: float) -> None:
    """Measure bias, GELU and rounding to fp8, forward and backward."""
    from textmill.kernels import gelu_fp8_triton as module
    from textmill.kernels.fp8_torch import FP8_DTYPE, MIN_ROW_MAX

    h, gradient, bias = normal(rows, inner), normal(rows, inner), torch.randn(inner, device="cuda")
    choices = list_constants(module, COLUMNS_PER_THREAD=(16, 32), PROGRAMS=(528, 1056, 2112))
    work = lambda: module.forward(h, bias, True, FP8_DTYPE, MIN_ROW_MAX)  # noqa: E731
    measure("GELU to fp8", module, choices, work, layers, 5 * h.numel(), seconds)
    choices = list_constants(module, BACKWARD_COLUMNS_PER_THREAD=(16, 32), BACKWARD_PROGRAMS=(264, 528))
    work = lambda: module.backward(gradient, h, bias, True, FP8_DTYPE, MIN_ROW_MAX)  # noqa: E731
    measure("GELU's gradient to fp8", module, choices, work, layers, 7 * h.numel(), seconds)


def supports_fp8(shape: Any) -> bool:
    """True if GPU and widths support fp8."""
    from textmill.kernels.fp8_torch import WIDTH_MULTIPLE

    return (
        torch.cuda.get_device_capability() >= (8, 9)
        and shape.width % WIDTH_MULTIPLE == shape.inner % WIDTH_MULTIPLE == 0
    )


def measure_heads(samples: int, length: int, shape: Any, seconds: float) -> None:
    """Measure joining the gradients of queries, keys and values."""
    from textmill.kernels import qkv_triton as module

    parts = [normal(samples, length, shape.heads, shape.width // shape.heads).transpose(1, 2) for _ in range(3)]
    choices = list_constants(module, ROWS=(8, 16), COLUMNS=(128, 256), WARPS=(4,), PROGRAMS=(396, 660))
    measure(
        "joined heads",
        module,
        choices,
        lambda: module.join_gradients(*parts),
        shape.layers,
        12 * parts[0].numel(),
        seconds,
    )


def measure_norms(rows: int, width: int, layers: int, seconds: float) -> None:
    """Measure LayerNorm backward, with the sums for its weights and two biases."""
    from textmill.kernels import norms_triton as module

    gradient, x, stream, means = (
        normal(rows, width),
        normal(rows, width),
        normal(rows, width),
        torch.zeros(rows, device="cuda"),
    )
    choices = list_constants(module, CHUNK=(128, 256, 512), PROGRAMS=(264, 528, 792, 1056))
    work = lambda: module.backward(gradient, x, means, means, means[:width], stream, True)  # noqa: E731
    measure("LayerNorm's gradient", module, choices, work, 2 * layers, 8 * x.numel(), seconds)


def measure_losses(rows: int, padded: int, seconds: float) -> None:
    """Measure cross-entropy with its gradient, for as many tokens as the head processes at a time."""
    from textmill.kernels import cross_entropy_triton as module

    chunk = min(CHUNK, rows)
    logits, labels = normal(chunk, padded), torch.randint(0, VOCAB, (chunk,), device="cuda", dtype=torch.int32)
    weights = torch.full((chunk,), 1 / rows, device="cuda")
    choices = list_constants(module, LANES=(512, 1024), WARPS=(16, 32))
    work = lambda: module.cross_entropy_with_gradient(logits, labels, weights, VOCAB, 0.0, 0.0)  # noqa: E731
    measure("cross-entropy", module, choices, work, rows // chunk, 4 * logits.numel(), seconds)


def main(arguments: list[str]) -> None:
    """Measure all kernels of one size."""
    given = {
        key: float(value) for key, _, value in (argument.partition("=") for argument in arguments if "=" in argument)
    }
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    size, _, batch = next((argument for argument in arguments if "=" not in argument), "small:64").partition(":")
    samples, length, seconds = int(batch), int(given.get("length", 1024)), given.get("seconds", 0.05)
    shape = gpt2.shape_of(ModelConfig(size=size), vocab=VOCAB, end=0, length=length)
    heat = normal(8192, 8192)
    milliseconds(lambda: heat @ heat, WARM_UP_SECONDS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size}, {samples} x {length}")
    measure_gelu(samples * length, shape.inner, shape.layers, seconds)
    if supports_fp8(shape):
        measure_gelu_fp8(samples * length, shape.inner, shape.layers, seconds)
    measure_heads(samples, length, shape, seconds)
    measure_norms(samples * length, shape.width, shape.layers, seconds)
    measure_losses(samples * length, shape.padded_vocab, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
