"""Compiled nets on meshes: every layout gives the numbers of its eager run; on a GPU where there is one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import compiled_process
from tests.support.compiled_process import STEPS
from tests.support.together import run_together

ON_CPU = ("ddp-2", "shard-2", "tensor-2", "sequence-2", "bert-shard-2")
SHARED = (("ddp-2", "tensor-2"), ("shard-2", "sequence-2"))
"""In one launch each: all-reduces only, and all-gathers and reduce-scatters too."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def measured(folder: Path, device: str, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Losses and gradient norms of each layout, eager and compiled, and whether the net was compiled."""
    path = folder / "numbers.json"
    command = [sys.executable, compiled_process.__file__, str(path), device, *names]
    if (output := run_together(command, world)) != "ok":
        pytest.fail(output)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check(found: dict[str, Any], loss: float, norm: float) -> None:
    """Compare losses and gradient norms of all layouts, eager and compiled."""
    for name, kinds in found.items():
        eager, without = kinds["eager"]
        assert (without, len(eager)) == (False, STEPS)
        compiled, with_compiler = kinds["compiled"]
        assert with_compiler
        assert [one for one, _ in compiled] == pytest.approx([one for one, _ in eager], rel=loss), name
        assert [one for _, one in compiled] == pytest.approx([one for _, one in eager], rel=norm), name


@pytest.mark.long
def test_compiled_layouts_give_the_numbers_of_eager_ones(tmp_path: Path) -> None:
    """Two processes over gloo. The backend traces forward and backward but generates no code, which takes minutes."""
    check(measured(tmp_path, "cpu", 2, ON_CPU), 1e-6, 1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process on a GPU, with data parallelism and with FSDP in groups of one rank."""
    return measured(tmp_path_factory.mktemp("alone"), "cuda", 1, ("ddp-2", "shard-2"))


@needs_gpu
def test_a_mesh_of_one_process_on_a_gpu(alone: dict[str, Any]) -> None:
    """Hooks, FSDP and NCCL run, with a single rank in each group."""
    check(alone, 2e-2, 0.1)
    for kind in ("eager", "compiled"):
        replicated, sharded = (alone[name][kind][0] for name in alone)
        assert [loss for loss, _ in replicated] == pytest.approx([loss for loss, _ in sharded], rel=2e-2)


@needs_gpu
@pytest.mark.parametrize("layouts", SHARED, ids=str)
def test_two_processes_share_a_gpu(layouts: tuple[str, ...], alone: dict[str, Any], tmp_path: Path) -> None:
    """Over gloo, since NCCL refuses two ranks on one GPU; the losses are those of a single process."""
    found = measured(tmp_path, "cuda", 2, layouts)
    check(found, 2e-2, 0.1)
    wanted = [loss for loss, _ in alone["ddp-2"]["eager"][0]]
    for name in layouts:
        assert [loss for loss, _ in found[name]["eager"][0]] == pytest.approx(wanted, rel=2e-2), name
