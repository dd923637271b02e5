"""Triton kernels on a machine without a GPU: their tests again, on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_devices import DEVICE, INTERPRETED
from textmill.kernels.triton_support import missing_requirement

pytestmark = [
    pytest.mark.skipif(bool(missing_requirement()), reason=f"no {missing_requirement()}"),
    pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on the GPU here"),
    pytest.mark.skipif(INTERPRETED, reason="the kernels are interpreted here"),
]


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_match_their_formulas_in_the_interpreter(which: str, root: Path) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    files = sorted(str(file) for file in root.glob("tests/*/test_*.py") if "kernel_devices" in file.read_text())
    assert len(files) > 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m"]
    done = subprocess.run(
        [*command, f"kernels and ({which})", *files],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 15
