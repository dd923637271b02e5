"""What Triton's kernels are built with, and whether it is here: on a GPU without it the same work is done by torch's own."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

COMPILERS = ("gcc", "clang")
"""What Triton builds the hosts' side of its kernels with, if CC names nothing else."""


@cache
def lacking() -> str:
    """What there is not, and how it comes; nothing, if kernels can be built."""
    if find_spec("triton") is None:
        return "Triton (it comes with torch's builds for GPUs on Linux)"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        return "C compiler (install gcc)"
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    return "" if (headers / "Python.h").is_file() else f"Python.h in {headers} (install python3-dev or the like)"
