"""Triton, or a stand-in where its kernels cannot be built, so that one module has a kernel and its torch fallback.

Kernels are written as usual with `tl` and `triton` from here. They run where `can_run_kernels` is true; elsewhere
`triton.jit` leaves a function that nobody calls, and torch's own operations do the work.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

__all__ = ["HAS_TRITON", "INTERPRETED", "can_run_kernels", "libdevice", "missing_requirement", "tl", "triton"]

COMPILERS = ("gcc", "clang")
"""Compilers that Triton tries for its launcher code if CC is not set."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets kernels, slowly and without a GPU; read by Triton too, when it is imported."""


@cache
def missing_requirement() -> str:
    """What is missing for building Triton kernels, and how to install it; empty if nothing is missing."""
    if find_spec("triton") is None:
        return "Triton (it comes with torch's builds for GPUs on Linux)"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        return "C compiler (install gcc)"
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    return "" if (headers / "Python.h").is_file() else f"Python.h in {headers} (install python3-dev or similar)"


def _uses_triton() -> bool:
    """True if Triton is worth importing, which takes time: torch supports GPUs, and kernels can be built."""
    has_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return (has_gpus or INTERPRETED) and not missing_requirement()


HAS_TRITON = _uses_triton()
"""False: `triton`, `tl` and `libdevice` are stand-ins with which modules of kernels can be imported."""
if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=lambda value: value)
    libdevice = None


def can_run_kernels(tensor: Tensor) -> bool:
    """True if Triton kernels can run on this tensor: on a GPU, or on any device if Triton interprets them."""
    return HAS_TRITON and (INTERPRETED or tensor.is_cuda)
