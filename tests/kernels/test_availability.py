"""Kernels of our own are taken where they can be built, and what is lacking elsewhere is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from textmill.engines import shared_torch as torch_parts
from textmill.kernels import availability as building


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One with all that is needed, whatever this one has: the folder of Python's headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(building, "find_spec", lambda name: name)
    monkeypatch.setattr(building.shutil, "which", lambda name: "a path" if name == "clang" else None)
    monkeypatch.setattr(building.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    building.lacking.cache_clear()
    yield tmp_path
    building.lacking.cache_clear()


def test_nothing_is_lacking() -> None:
    assert building.lacking() == ""


def test_triton_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    assert building.lacking().startswith("Triton")


def test_a_compiler_is_lacking_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert building.lacking() == "C compiler (install gcc)"
    building.lacking.cache_clear()
    monkeypatch.setenv("CC", "tcc")
    assert building.lacking() == ""


def test_the_headers_are_lacking(machine: Path) -> None:
    (machine / "Python.h").unlink()
    assert building.lacking() == f"Python.h in {machine} (install python3-dev or similar)"


def test_what_cannot_be_built_is_as_if_it_were_not_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton is not installed: torch does the work."""
    (machine / "Python.h").unlink()
    monkeypatch.delitem(sys.modules, "textmill.kernels.require_triton", raising=False)
    with pytest.raises(ImportError, match=r"missing: Python\.h"):
        importlib.import_module("textmill.kernels.require_triton")
    assert torch_parts.kernels("textmill.kernels.adam_triton") is None
