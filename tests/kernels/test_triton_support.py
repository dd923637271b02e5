"""Triton kernels are used if they can be built; otherwise the missing requirement is named."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from textmill.kernels import triton_support as building


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fake machine that has everything; returns the folder of its Python headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(building, "find_spec", lambda name: name)
    monkeypatch.setattr(building.shutil, "which", lambda name: "a path" if name == "clang" else None)
    monkeypatch.setattr(building.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    building.missing_requirement.cache_clear()
    yield tmp_path
    building.missing_requirement.cache_clear()


def test_nothing_is_missing() -> None:
    assert building.missing_requirement() == ""


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    assert building.missing_requirement().startswith("Triton")


def test_a_compiler_is_missing_unless_cc_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert building.missing_requirement() == "C compiler (install gcc)"
    building.missing_requirement.cache_clear()
    monkeypatch.setenv("CC", "tcc")
    assert building.missing_requirement() == ""


def test_the_headers_are_missing(machine: Path) -> None:
    (machine / "Python.h").unlink()
    assert building.missing_requirement() == f"Python.h in {machine} (install python3-dev or similar)"


@pytest.fixture
def imported_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Imports the module again, as a new process does."""

    def again() -> ModuleType:
        monkeypatch.delitem(sys.modules, building.__name__)
        return importlib.import_module(building.__name__)

    return again


def test_without_a_compiler_torch_is_the_fallback(
    imported_again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as if Triton was not installed: kernels can be imported, and none runs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    again = imported_again()
    assert again.missing_requirement() == "C compiler (install gcc)"
    assert not again.HAS_TRITON
    assert not again.can_run_kernels(SimpleNamespace(is_cuda=True))


def test_torch_without_gpus_does_not_import_triton(
    imported_again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert not imported_again().HAS_TRITON
    assert "triton" not in sys.modules
