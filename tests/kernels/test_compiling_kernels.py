"""Every Triton kernel compiles for an H200, as nets launch it; no GPU is needed for that."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.kernels.triton_support import missing_requirement

SHARED_MEMORY = 227 << 10
"""Bytes that a program can have on a GPU of compute capability 9.0."""


def launched_kernels(root: Path) -> set[str]:
    """The kernels that are launched somewhere, as `name[grid](...)`, with their modules."""
    found = set()
    for file in root.glob("textmill/**/*.py"):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        kernels = {one.name for one in functions if "triton.jit" in map(ast.unparse, one.decorator_list)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                found |= {f"{module}.{name}"} if name in kernels else set()
    return found


@pytest.mark.long
@pytest.mark.skipif(bool(missing_requirement()), reason=f"no {missing_requirement()}")
def test_kernels_compile_as_nets_launch_them(root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_kernels"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "\n".join(f"{line['case']}: {line['error']}" for line in lines if "error" in line) == ""
    assert {line["kernel"] for line in lines} == launched_kernels(root)
    assert all(line["shared"] <= SHARED_MEMORY and line["cubin"] for line in lines)
