"""Fused attention equals torch's own; on a GPU with cuDNN, also with gradients written into our memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.kernels import attention_torch
from textmill.kernels.attention_torch import attend, attend_backward, fused_attention, split_qkv

by_cudnn = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no such GPU here"
)
SHAPES = [(2, 128, 2, 64), (3, 1024, 12, 64), (1, 192, 5, 128), (2, 100, 3, 64), (1, 256, 2, 80)]
"""Samples, tokens, heads and their width."""


def plain(x: Tensor, layer: nn.Linear, D: int) -> Tensor:
    found = F.scaled_dot_product_attention(*split_qkv(layer(x), D), is_causal=True)
    return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_equal_torch(compiled: bool) -> None:
    torch.manual_seed(1)
    layer, x, slope = nn.Linear(24, 72), torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    found = []
    for way in (torch.compile(fused_attention, backend="aot_eager") if compiled else fused_attention, plain):
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        y = way(leaves[0], layer, 8)
        found.append([y, *torch.autograd.grad(y, leaves, slope)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_ops_pass_torchs_opcheck() -> None:
    qkv = torch.randn(2, 5, 36)
    torch.library.opcheck(attend, (qkv, 4))
    torch.library.opcheck(attend_backward, (torch.randn(2, 5, 12), qkv, *attend(qkv, 4), 4))


def test_torch_writes_into_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two fake CPU operators, one calling the other, that allocate memory as cuDNN's do."""
    monkeypatch.setattr(attention_torch, "CUDA_KEY", torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))
    outer, inner = (getattr(torch.ops.aten, name).default for name in attention_torch.BACKWARD_OPERATORS)
    qkv = torch.randn(2, 5, 36)

    def makes(*given: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one).copy_(one * 2) for one in given[1:4])

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention_backward", lambda *given: inner(*given), "CPU")
        library.impl("_cudnn_attention_backward", makes, "CPU")
        whole = torch.zeros_like(qkv)
        parts, places = split_qkv(qkv, 4), split_qkv(whole, 4)
        with attention_torch._AllocateInto(places):
            found = outer(parts[0], *parts, *[parts[0]] * 2, *[torch.zeros(())] * 2, *[None] * 3, 5, 5, -0.0, True)
    assert [one.data_ptr() for one in found] == [place.data_ptr() for place in places]
    assert torch.equal(whole, 2 * qkv)


def test_the_constant_marker_is_the_one_that_torch_sets() -> None:
    def constant() -> None: ...

    torch.compiler.assume_constant_result(constant)  # type: ignore[no-untyped-call]
    assert vars(constant)
    assert vars(constant).items() <= vars(attention_torch._cudnn_supports).items()


def test_importing_an_engine_does_not_load_the_compiler() -> None:
    """Loading it takes seconds, and fails where DeepSpeed has replaced tensor classes."""
    code = "import sys, textmill.engines.on_torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@by_cudnn
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_in_place_gradients_are_accurate(kind: torch.dtype) -> None:
    """In-place and joined gradients in turn, with shapes that fill cuDNN's tiles and others, against fp64 attention."""
    assert attention_torch._in_place_works(torch.device("cuda", 0), kind)
    step = torch.finfo(kind).eps
    for N, T, H, D in SHAPES:
        dice = torch.Generator("cuda").manual_seed(3)
        qkv, dy = (torch.randn(N, T, parts * H * D, device="cuda", dtype=kind, generator=dice) for parts in (3, 1))
        y, logs = attend(qkv, D)
        exact = qkv.double().requires_grad_()
        q, k, v = split_qkv(exact, D)
        scores = (q @ k.transpose(2, 3) / D**0.5).masked_fill(
            torch.ones(T, T, device="cuda").triu(1).bool(), float("-inf")
        )
        wanted = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        wanted.backward(dy.double())
        assert (y - wanted).norm() < 4 * step * wanted.norm()
        assert exact.grad is not None
        for way in (
            attention_torch._gradient_in_place,
            attention_torch._gradient_joined,
            attention_torch._gradient_in_place,
        ):
            found = way(dy, qkv, y, logs, D)
            found, there = found if isinstance(found, tuple) else (found, True)
            assert there
            assert (found - exact.grad).norm() < 4 * step * exact.grad.norm()
        torch.library.opcheck(attend, (qkv, D))
        torch.library.opcheck(attend_backward, (dy, qkv, y, logs, D), atol=0.05, rtol=0.05)


@by_cudnn
def test_gradients_are_joined_if_torch_allocates_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a shape that no other test has, because torch caches its plan for the process."""
    monkeypatch.setattr(attention_torch, "_AllocateInto", lambda places: torch.no_grad())
    qkv, dy = (torch.randn(2, 320, width, device="cuda", dtype=torch.bfloat16) for width in (576, 192))
    given = dy, qkv, *attend(qkv, 64), 64
    found, there = attention_torch._gradient_in_place(*given)
    assert not there
    torch.testing.assert_close(found, attention_torch._gradient_joined(*given), rtol=0.02, atol=0.02)
