"""Where tests run Triton kernels: on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

A test that runs kernels has the mark `kernels`. Without a GPU it is skipped here, and tests/kernels/test_interpreted.py
runs it in a process with the interpreter, which must be chosen before Triton is imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from textmill.kernels.triton_support import INTERPRETED, missing_requirement

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
"""The device of tensors for kernels."""
DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.kernels, id="kernels")]
"""A CPU with torch's operations, and the kernels' device: `device` of tests that compare both with formulas."""


def why_no_kernels() -> str:
    """Why no kernels run in this process; empty if they do."""
    if not INTERPRETED:
        return "" if DEVICE == "cuda" else "no CUDA device here; test_interpreted.py runs these kernels on the CPU"
    return f"no {missing_requirement()}" if missing_requirement() else ""


def mark_kernels(items: list[pytest.Item]) -> None:
    """Skip tests of kernels that cannot run here.

    The interpreter is slow: it gets each value of a test's parameters once, and only the first test of each function is
    not long.
    """
    known: dict[Any, set[Any]] = {}
    for item in items:
        if why_no_kernels():
            item.add_marker(pytest.mark.skip(reason=why_no_kernels()))
        elif INTERPRETED and not any(True in mark.args for mark in item.iter_markers("skipif")):
            function = item.path, getattr(item, "originalname", item.name)
            values = {(name, str(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            if function in known:
                item.add_marker("long")
                if values <= known[function]:
                    item.add_marker(pytest.mark.skip(reason="each of its parameters is in another test"))
            known.setdefault(function, set()).update(values)


def on_gpu_only(*values: Any) -> Any:
    """Parameters with which a test takes too long in the interpreter."""
    return pytest.param(*values, marks=pytest.mark.skipif(INTERPRETED, reason="too slow in Triton's interpreter"))


def patch_interpreter() -> None:
    """What the interpreter lacks: CUDA's libdevice, and correct rounding to bf16 and fp8, which it truncates."""
    from triton.runtime import interpreter

    from textmill.kernels import gelu_torch
    from textmill.kernels.triton_support import tl

    # Looked up when they are called: inside a kernel the interpreter replaces the functions of `tl`.
    gelu_torch.libdevice = SimpleNamespace(exp2=lambda x: tl.exp2(x), fast_dividef=lambda x, y: x / y)
    interpreter._convert_float = round_as_torch


def round_as_torch(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert an array between Triton's float types; types that numpy lacks are in it as unsigned integers."""
    kinds = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    tensor = torch.from_numpy(np.atleast_1d(values).copy()).view(kinds[source.name]).to(kinds[target.name])
    integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    return tensor.view(integers[tensor.itemsize]).numpy().reshape(np.shape(values))


if INTERPRETED and not missing_requirement():
    patch_interpreter()
