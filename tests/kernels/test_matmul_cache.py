"""The chosen matmul algorithms are cached for later runs; a damaged or unwritable cache does no harm."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from textmill.errors import TextmillError
from textmill.kernels import matmul_torch
from textmill.kernels.cublaslt import MatmulSpec
from textmill.storage.files import file_lock

GPU = "NVIDIA H200, cuBLAS 130200"
SPEC = MatmulSpec(64, 32, 16, False, True, torch.bfloat16, torch.float32, True, False)
MATMUL: Any = SimpleNamespace(
    spec=SPEC, device="cuda:0", restore_algorithm={b"good": "good algorithm", b"bad": None}.__getitem__
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul_torch, "gpu_key", lambda device: GPU)
    return tmp_path


def test_several_gpus_and_matmuls_share_the_file() -> None:
    assert matmul_torch.load_algorithm(GPU, "a") is None
    for gpu, matmul, algorithm in ((GPU, "a", b"\x00\xff" * 32), (GPU, "b", b""), ("another", "a", b"1")):
        matmul_torch.store_algorithm(gpu, matmul, algorithm)
    assert [matmul_torch.load_algorithm(GPU, matmul) for matmul in "abc"] == [b"\x00\xff" * 32, b"", None]
    assert matmul_torch.load_algorithm("another", "a") == b"1"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"NVIDIA H200, cuBLAS 130200": 3}', '{"NVIDIA H200, cuBLAS 130200": {"a": "xy"}}', "\x00"]
)
def test_a_damaged_file_counts_as_empty_and_is_rewritten(text: str) -> None:
    matmul_torch.cache_path().parent.mkdir()
    matmul_torch.cache_path().write_text(text)
    assert matmul_torch.load_algorithm(GPU, "a") is None
    matmul_torch.store_algorithm(GPU, "a", b"algorithm")
    assert matmul_torch.load_algorithm(GPU, "a") == b"algorithm"
    assert set(json.loads(matmul_torch.cache_path().read_text())) == {GPU}


def test_an_unwritable_cache_is_no_error(folder: Path) -> None:
    (folder / "textmill").write_text("a file where the folder would be")
    matmul_torch.store_algorithm(GPU, "a", b"algorithm")
    assert matmul_torch.load_algorithm(GPU, "a") is None


def test_nothing_is_cached_without_file_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example on a Lustre file system mounted without locks."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    matmul_torch.store_algorithm(GPU, "a", b"algorithm")
    assert matmul_torch.load_algorithm(GPU, "a") is None
    message = r"a\.lock: its file system does not support file locks \(Function not implemented\); "
    with pytest.raises(TextmillError, match=message), file_lock(folder / "a.lock", "busy"):
        pass


@pytest.mark.parametrize(
    ("cached", "known"),
    [(None, None), (b"", (None,)), (b"good", ((MATMUL, "good algorithm"),)), (b"bad", None)],
    ids=["not measured", "torch's own", "an algorithm", "an algorithm that the library refuses"],
)
def test_the_cached_choice_of_an_earlier_run(cached: bytes | None, known: Any) -> None:
    if cached is not None:
        matmul_torch.store_algorithm(GPU, str(SPEC), cached)
    assert matmul_torch._cached_choice(MATMUL) == known


def test_concurrent_writers_lose_nothing() -> None:
    with ThreadPoolExecutor(8) as many:
        list(many.map(lambda number: matmul_torch.store_algorithm(GPU, str(number), b"algorithm"), range(40)))
    assert all(matmul_torch.load_algorithm(GPU, str(number)) == b"algorithm" for number in range(40))
