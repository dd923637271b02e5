"""Products that are chosen give the numbers of torch's own, whatever lies how in memory; where there is no GPU they are torch's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from textmill.kernels import matmul_torch as products_torch
from textmill.kernels.cublaslt import WORKSPACE, Product
from textmill.kernels.matmul_torch import Linear, chosen_linear, multiply, times

HALVES = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_linear_layer_and_its_slopes_are_torch_s_own() -> None:
    """Against torch.nn.functional.linear, in double precision, with and without a bias and a stream, all slopes."""
    x, weight, bias, slope = _drawn(5, 4, seed=1), _drawn(3, 4, seed=2), _drawn(3, seed=3), _drawn(5, 3, seed=4)
    for given in ((x, weight, bias, _drawn(5, 3, seed=5)), (x, weight, bias), (x, weight)):
        leaves = [[tensor.clone().requires_grad_() for tensor in given] for _ in range(2)]
        ours, theirs = Linear.apply(*leaves[0], *[None] * (4 - len(given))), torch.nn.functional.linear(*leaves[1][:3])
        theirs = theirs + leaves[1][3] if len(given) == 4 else theirs
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        ours.backward(slope)
        theirs.backward(slope)
        for one, other in zip(*leaves, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_the_ops_keep_what_torch_asks_of_ops() -> None:
    """torch's own checks: schema, shapes without data, autograd, tracing."""
    x, weight, bias = _drawn(5, 4, seed=1), _drawn(3, 4, seed=2), _drawn(3, seed=3)
    torch.library.opcheck(chosen_linear, (x, weight, bias, _drawn(5, 3, seed=5)))
    torch.library.opcheck(times, (x, weight.t(), torch.float32))


def test_a_frozen_weight_has_no_slope() -> None:
    x, weight = _drawn(5, 4, seed=1).requires_grad_(), _drawn(3, 4, seed=2)
    Linear.apply(x, weight, None, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 4), rtol=0, atol=1e-12)


def test_a_sum_goes_on_in_its_own_precision() -> None:
    a, b = _drawn(3, 7, seed=1).bfloat16(), _drawn(7, 2, seed=2).bfloat16()
    total = torch.ones(3, 2)
    multiply(a, b, total, onto=total)
    torch.testing.assert_close(total, 1 + a.float() @ b.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (5.0, {"a": (1.0, 4.0), "b": (2.0, 3.0), "c": (3.0, 4.5)}, "b"),
        (5.0, {"a": (1.0, 4.96), "b": (2.0, 5.1)}, None),
        (5.0, {"a": (4.0, 4.9), "b": (1.0, 4.8), "c": (2.0, 4.7), "d": (3.0, 4.6), "e": (9.0, 1.0)}, "d"),
        (5.0, {"a": (float("inf"), float("inf"))}, None),
        (5.0, {}, None),
        (5.0, {"a": (1.0, 4.0), "b": (2.0, 3.0), "b's kin": (1.5, 2.5)}, "b's kin"),
        (5.0, {**{way: (1.0, 4.0) for way in "abcd"}, "e": (2.0, 4.0), "e's kin": (0.1, 0.1)}, "a"),
    ],
    ids=[
        "long turns decide",
        "a hundredth at least",
        "of the fastest four",
        "what cannot be made",
        "no proposals",
        "kin of the fast",
        "not of the slow",
    ],
)
def test_which_way_is_chosen(
    own: float, others: dict[str, tuple[float, float]], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of our own, which has for each way the time of a short trial and of a long one."""
    clock = {None: (own, own), **others}
    monkeypatch.setattr(products_torch, "_seconds", lambda work, spend: clock[work()][spend == products_torch.TURN])
    trials = {way: ((None, way) if way else None, lambda way=way: way) for way in clock}
    proposed = [trials[way] for way in others if "kin" not in way]
    found = products_torch._fastest(
        trials[None], proposed, lambda way: [trials[one] for one in others if one == f"{way}'s kin"]
    )
    assert found == (chosen and (None, chosen))


@on_gpu
@pytest.mark.parametrize("half", HALVES)
def test_every_way_gives_the_exact_product(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All proposals, kin of the first, what is chosen, against double precision: lying either way, a bias, a stream, a sum in fp32."""
    for name in ("HEAT", "TRY", "TURN"):
        monkeypatch.setattr(products_torch, name, 1e-3)
    kind, step = HALVES[half]
    m, k, n = 4096, 1024, 2304
    for a_turned in (False, True):
        for b_turned in (False, True):
            a, b = _drawn(m, k, seed=1).to("cuda", kind), (_drawn(k, n, seed=2) / k**0.5).to("cuda", kind)
            a, b = a.t().contiguous().t() if a_turned else a, b.t().contiguous().t() if b_turned else b
            row, exact = _drawn(n, seed=3).to("cuda", kind), a.double() @ b.double()
            stream, total = _drawn(m, n, seed=4).to("cuda", kind), torch.empty(m, n, device="cuda")
            for bias, onto, bound in (
                (None, None, 4 * step),
                (row, None, 4 * step),
                (row, stream, 4 * step),
                (None, total, 1e-4),
            ):
                out = total if onto is total else torch.empty(m, n, device="cuda", dtype=kind)
                wanted = (
                    exact
                    + (0 if bias is None else bias.double())
                    + (0 if onto is None else 1 if onto is total else onto.double())
                )
                form = products_torch._form_of(a, b, out, bias, onto)
                assert form is not None
                made, space = Product(form, out.device), torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8)
                ways = made.ways()
                kin = made.kin(ways[0])
                proposed = [partial(made.make, way, a, b, bias, onto, out, space) for way in (*ways, *kin)]
                assert len(ways) > 1
                assert len(kin) > 1
                for work in (*proposed, partial(multiply, a, b, out, bias=bias, onto=onto)):
                    out.fill_(1)
                    work()
                    assert (out.double() - wanted).abs().max() < bound * wanted.abs().max()


@on_gpu
def test_what_was_chosen_is_taken_up_in_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any trial, each form by the same way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products_torch, "_choices", {})
    a, bs = (
        torch.randn(4096, 1024, device="cuda").bfloat16(),
        [torch.randn(1024, n, device="cuda").bfloat16() for n in (1536, 2304, 4096)],
    )
    outs, row = (
        [torch.empty(4096, b.shape[1], device="cuda", dtype=torch.bfloat16) for b in bs],
        torch.randn(2304, device="cuda").bfloat16(),
    )

    def make() -> list[bytes]:
        for b, out in zip(bs, outs, strict=True):
            multiply(a, b, out.zero_())
            assert (out.float() - a.float() @ b.float()).norm() < 0.01 * out.float().norm()
        multiply(a, bs[1], outs[1].zero_(), bias=row)
        multiply(a, bs[1], outs[1], bias=row, onto=outs[1])
        return [b"" if choice is None else bytes(choice[1].kernel) for choice in products_torch._choices.values()]

    first = make()
    products_torch._choices.clear()
    monkeypatch.setattr(products_torch, "_seconds", None)  # no clock
    assert make() == first


@on_gpu
def test_what_cannot_be_chosen_is_torch_s() -> None:
    """Gaps between rows, a begin that is not aligned, a repeatable run: still the product."""
    a, b = _drawn(4096, 1100, seed=1).to("cuda", torch.bfloat16), _drawn(1024, 2304, seed=2).to("cuda", torch.bfloat16)
    out, whole = torch.empty(4096, 2304, device="cuda", dtype=torch.bfloat16), dict(products_torch._choices)
    for begin in (0, 3):
        multiply(a[:, begin : begin + 1024], b, out)
        assert torch.equal(out, a[:, begin : begin + 1024] @ b)
    assert products_torch._choices == whole
