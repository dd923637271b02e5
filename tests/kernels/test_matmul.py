"""Tuned matmuls give torch's results for every memory layout, and their algorithms are cached for later runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from textmill.errors import TextmillError
from textmill.kernels import matmul_torch
from textmill.kernels.cublaslt import WORKSPACE_BYTES, Matmul, MatmulSpec
from textmill.kernels.matmul_torch import Linear, matmul_into, matmul_to_dtype, tuned_linear
from textmill.storage.files import file_lock

HALVES = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_linear_layer_and_its_gradients_equal_torch() -> None:
    """Against torch.nn.functional.linear, in double precision, with and without a bias and a stream, all gradients."""
    x, weight, bias, dy = _normal(5, 4, seed=1), _normal(3, 4, seed=2), _normal(3, seed=3), _normal(5, 3, seed=4)
    for given in ((x, weight, bias, _normal(5, 3, seed=5)), (x, weight, bias), (x, weight)):
        leaves = [[tensor.clone().requires_grad_() for tensor in given] for _ in range(2)]
        ours, theirs = Linear.apply(*leaves[0], *[None] * (4 - len(given))), torch.nn.functional.linear(*leaves[1][:3])
        theirs = theirs + leaves[1][3] if len(given) == 4 else theirs
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        ours.backward(dy)
        theirs.backward(dy)
        for one, other in zip(*leaves, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_the_ops_pass_torchs_opcheck() -> None:
    """torch's own checks: schema, shapes without data, autograd, tracing."""
    x, weight, bias = _normal(5, 4, seed=1), _normal(3, 4, seed=2), _normal(3, seed=3)
    torch.library.opcheck(tuned_linear, (x, weight, bias, _normal(5, 3, seed=5)))
    torch.library.opcheck(matmul_to_dtype, (x, weight.t(), torch.float32))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = _normal(5, 4, seed=1).requires_grad_(), _normal(3, 4, seed=2)
    Linear.apply(x, weight, None, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 4), rtol=0, atol=1e-12)


def test_an_addend_is_summed_in_its_own_precision() -> None:
    a, b = _normal(3, 7, seed=1).bfloat16(), _normal(7, 2, seed=2).bfloat16()
    total = torch.ones(3, 2)
    matmul_into(a, b, total, addend=total)
    torch.testing.assert_close(total, 1 + a.float() @ b.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (5.0, {"a": (1.0, 4.0), "b": (2.0, 3.0), "c": (3.0, 4.5)}, "b"),
        (5.0, {"a": (1.0, 4.96), "b": (2.0, 5.1)}, None),
        (5.0, {"a": (4.0, 4.9), "b": (1.0, 4.8), "c": (2.0, 4.7), "d": (3.0, 4.6), "e": (9.0, 1.0)}, "d"),
        (5.0, {"a": (float("inf"), float("inf"))}, None),
        (5.0, {}, None),
        (5.0, {"a": (1.0, 4.0), "b": (2.0, 3.0), "b's variant": (1.5, 2.5)}, "b's variant"),
        (5.0, {**{algorithm: (1.0, 4.0) for algorithm in "abcd"}, "e": (2.0, 4.0), "e's variant": (0.1, 0.1)}, "a"),
    ],
    ids=[
        "long trials decide",
        "at least 1% faster",
        "of the fastest four",
        "a failing algorithm",
        "no proposals",
        "a variant of a fast one",
        "no variant of a slow one",
    ],
)
def test_which_algorithm_is_chosen(
    own: float, others: dict[str, tuple[float, float]], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake clock: for each algorithm the time of a short trial and of a long one."""
    clock = {None: (own, own), **others}
    monkeypatch.setattr(
        matmul_torch, "_seconds", lambda work, spend: clock[work()][spend == matmul_torch.LONG_TRIAL_SECONDS]
    )
    trials = {
        algorithm: ((None, algorithm) if algorithm else None, lambda algorithm=algorithm: algorithm)
        for algorithm in clock
    }
    proposed = [trials[algorithm] for algorithm in others if "variant" not in algorithm]
    found = matmul_torch._fastest(
        trials[None], proposed, lambda algorithm: [trials[one] for one in others if one == f"{algorithm}'s variant"]
    )
    assert found == (chosen and (None, chosen))


@on_gpu
@pytest.mark.parametrize("half", HALVES)
def test_every_algorithm_is_accurate(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All proposals, variants of the first and the choice, against fp64, in all memory layouts."""
    for name in ("WARM_UP_SECONDS", "SHORT_TRIAL_SECONDS", "LONG_TRIAL_SECONDS"):
        monkeypatch.setattr(matmul_torch, name, 1e-3)
    kind, step = HALVES[half]
    m, k, n = 4096, 1024, 2304
    for a_transposed in (False, True):
        for b_transposed in (False, True):
            a, b = _normal(m, k, seed=1).to("cuda", kind), (_normal(k, n, seed=2) / k**0.5).to("cuda", kind)
            a, b = a.t().contiguous().t() if a_transposed else a, b.t().contiguous().t() if b_transposed else b
            row, exact = _normal(n, seed=3).to("cuda", kind), a.double() @ b.double()
            stream, total = _normal(m, n, seed=4).to("cuda", kind), torch.empty(m, n, device="cuda")
            for bias, addend, bound in (
                (None, None, 4 * step),
                (row, None, 4 * step),
                (row, stream, 4 * step),
                (None, total, 1e-4),
            ):
                out = total if addend is total else torch.empty(m, n, device="cuda", dtype=kind)
                wanted = (
                    exact
                    + (0 if bias is None else bias.double())
                    + (0 if addend is None else 1 if addend is total else addend.double())
                )
                spec = matmul_torch._spec_of(a, b, out, bias, addend)
                assert spec is not None
                own, workspace = (
                    Matmul(spec, out.device),
                    torch.empty(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8),
                )
                algorithms = own.propose_algorithms()
                variants = own.list_variants(algorithms[0])
                proposed = [
                    partial(own.run, one, a, b, bias, addend, out, workspace) for one in (*algorithms, *variants)
                ]
                assert len(algorithms) > 1
                assert len(variants) > 1
                for work in (*proposed, partial(matmul_into, a, b, out, bias=bias, addend=addend)):
                    out.fill_(1)
                    work()
                    assert (out.double() - wanted).abs().max() < bound * wanted.abs().max()


@on_gpu
def test_another_run_uses_the_cached_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any trial, the same algorithm for each matmul."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul_torch, "_choices", {})
    a, bs = (
        torch.randn(4096, 1024, device="cuda").bfloat16(),
        [torch.randn(1024, n, device="cuda").bfloat16() for n in (1536, 2304, 4096)],
    )
    outs, row = (
        [torch.empty(4096, b.shape[1], device="cuda", dtype=torch.bfloat16) for b in bs],
        torch.randn(2304, device="cuda").bfloat16(),
    )

    def run_all() -> list[bytes]:
        for b, out in zip(bs, outs, strict=True):
            matmul_into(a, b, out.zero_())
            assert (out.float() - a.float() @ b.float()).norm() < 0.01 * out.float().norm()
        matmul_into(a, bs[1], outs[1].zero_(), bias=row)
        matmul_into(a, bs[1], outs[1], bias=row, addend=outs[1])
        return [b"" if choice is None else bytes(choice[1].algo) for choice in matmul_torch._choices.values()]

    first = run_all()
    matmul_torch._choices.clear()
    monkeypatch.setattr(matmul_torch, "_seconds", None)  # no clock
    assert run_all() == first


@on_gpu
def test_unsupported_matrices_use_torch() -> None:
    """Gaps between rows, an address that is not aligned: still the right result, and nothing is measured."""
    a, b = (
        _normal(4096, 1100, seed=1).to("cuda", torch.bfloat16),
        _normal(1024, 2304, seed=2).to("cuda", torch.bfloat16),
    )
    out, before = torch.empty(4096, 2304, device="cuda", dtype=torch.bfloat16), dict(matmul_torch._choices)
    for start in (0, 3):
        matmul_into(a[:, start : start + 1024], b, out)
        assert torch.equal(out, a[:, start : start + 1024] @ b)
    assert matmul_torch._choices == before


GPU = "NVIDIA H200, cuBLAS 130200"
SPEC = MatmulSpec(64, 32, 16, False, True, torch.bfloat16, torch.float32, True, False)
MATMUL: Any = SimpleNamespace(
    spec=SPEC, device="cuda:0", restore_algorithm={b"good": "good algorithm", b"bad": None}.__getitem__
)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul_torch, "gpu_key", lambda device: GPU)
    return tmp_path


@pytest.mark.usefixtures("cache_folder")
def test_several_gpus_and_matmuls_share_the_file() -> None:
    assert matmul_torch.load_algorithm(GPU, "a") is None
    for gpu, matmul, algorithm in ((GPU, "a", b"\x00\xff" * 32), (GPU, "b", b""), ("another", "a", b"1")):
        matmul_torch.store_algorithm(gpu, matmul, algorithm)
    assert [matmul_torch.load_algorithm(GPU, matmul) for matmul in "abc"] == [b"\x00\xff" * 32, b"", None]
    assert matmul_torch.load_algorithm("another", "a") == b"1"


@pytest.mark.usefixtures("cache_folder")
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


def test_an_unwritable_cache_is_no_error(cache_folder: Path) -> None:
    (cache_folder / "textmill").write_text("a file where the folder would be")
    matmul_torch.store_algorithm(GPU, "a", b"algorithm")
    assert matmul_torch.load_algorithm(GPU, "a") is None


def test_nothing_is_cached_without_file_locks(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example on a Lustre file system mounted without locks."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    matmul_torch.store_algorithm(GPU, "a", b"algorithm")
    assert matmul_torch.load_algorithm(GPU, "a") is None
    message = r"a\.lock: its file system does not support file locks \(Function not implemented\); "
    with pytest.raises(TextmillError, match=message), file_lock(cache_folder / "a.lock", "busy"):
        pass


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize(
    ("cached", "known"),
    [(None, None), (b"", (None,)), (b"good", ((MATMUL, "good algorithm"),)), (b"bad", None)],
    ids=["not measured", "torch's own", "an algorithm", "an algorithm that the library refuses"],
)
def test_the_cached_choice_of_an_earlier_run(cached: bytes | None, known: Any) -> None:
    if cached is not None:
        matmul_torch.store_algorithm(GPU, str(SPEC), cached)
    assert matmul_torch._cached_choice(MATMUL) == known


@pytest.mark.usefixtures("cache_folder")
def test_concurrent_writers_lose_nothing() -> None:
    with ThreadPoolExecutor(8) as many:
        list(many.map(lambda number: matmul_torch.store_algorithm(GPU, str(number), b"algorithm"), range(40)))
    assert all(matmul_torch.load_algorithm(GPU, str(number)) == b"algorithm" for number in range(40))
