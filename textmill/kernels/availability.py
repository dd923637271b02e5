"""Whether Triton kernels can be built on this machine; without them torch's own operations are the fallback."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def can_run_kernels(tensor: Any) -> bool:
    """True if Triton kernels can run on this tensor: on a GPU, or on any device if Triton interprets them."""
    return INTERPRETED or bool(tensor.is_cuda)


def load_kernels(module: str) -> Any:
    """Import a module of Triton kernels; None if they cannot be compiled here."""
    return None if missing_requirement() else import_module(module)
