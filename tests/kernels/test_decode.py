"""The kernels of a decoding step give the numbers of formulas in torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import decode_kernels as formulas
from tests.support.kernel_devices import DEVICE, INTERPRETED, on_gpu_only
from textmill.kernels import decode_triton as kernels
from textmill.models.llama.net_torch import RMSNorm

pytestmark = pytest.mark.kernels
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def numbers(*size: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(kind: str, width: int, dtype: torch.dtype) -> Any:
    """A LayerNorm or RMSNorm with random weights."""
    norm: Any = nn.LayerNorm(width) if kind == "layer" else RMSNorm(width, 1e-6)
    for seed, parameter in enumerate(norm.parameters(), 5):
        parameter.data = 1 + 0.3 * numbers(width, seed=seed).to(parameter)
    return norm.to(DEVICE, dtype)


def exactly(given: Any) -> Any:
    """Tensors and layers in fp64, for the formulas."""
    if isinstance(given, nn.Module):
        copy: Any = SimpleNamespace(weight=given.weight.double(), eps=given.eps)
        if isinstance(given, nn.LayerNorm):
            copy = nn.LayerNorm(len(given.weight), given.eps, device=DEVICE, dtype=torch.float64)
            copy.load_state_dict(given.state_dict())
        return copy
    if isinstance(given, SimpleNamespace):
        return SimpleNamespace(**{name: exactly(value) for name, value in vars(given).items()})
    if isinstance(given, tuple):
        return tuple(map(exactly, given))
    return given.double() if isinstance(given, Tensor) and given.is_floating_point() else given


@torch.no_grad()
def check(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < BOUNDS[found.dtype]


@dtypes
@pytest.mark.parametrize("learned", [True, False])
def test_embed(dtype: torch.dtype, learned: bool) -> None:
    tokens, positions = numbers(50, 36, dtype=dtype), numbers(20, 36, seed=2, dtype=dtype)
    ids, places = torch.tensor([3, -1, 49], device=DEVICE), torch.tensor([0, 19, 7], device=DEVICE)
    given = (tokens, positions) if learned else (tokens,)
    check(kernels.embed(ids, places, *given), formulas.embed(ids, places, *exactly(given)))


@dtypes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_add_norm(dtype: torch.dtype, kind: str, bias: bool) -> None:
    x, delta, shift = numbers(5, 100, dtype=dtype) + 2, numbers(5, 100, seed=2, dtype=dtype), numbers(100, dtype=dtype)
    given = (x, delta, shift if bias else None, norm_of(kind, 100, dtype))
    for found, wanted in zip(kernels.add_norm(*given), formulas.add_norm(*exactly(given)), strict=True):
        check(found, wanted)


@dtypes
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu", "gelu_new"])
def test_multiply_gate(dtype: torch.dtype, activation: str) -> None:
    both = numbers(3, 2200, dtype=dtype)
    check(kernels.multiply_gate(both, activation), formulas.multiply_gate(both.double(), activation))


LINEARS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "residual": {"added": True},
    "LayerNorm, GELU": {"bias": True, "norm": "layer", "activation": "gelu_new"},
    "LayerNorm, exact GELU": {"bias": True, "norm": "layer", "activation": "gelu"},
    "RMSNorm": {"norm": "rms"},
    "gate": {"norm": "rms", "activation": "silu", "gated": True},
    "gate with biases": {"bias": True, "norm": "rms", "activation": "relu2", "gated": True},
}


@dtypes
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("outputs", [30, on_gpu_only(1030)])
def test_fused_linear(dtype: torch.dtype, outputs: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # several rows for each program, as with many outputs
        monkeypatch.setattr(kernels, "_rows_per_program", lambda outputs, columns: 4)
    settings = dict(LINEARS[name])
    rows = outputs * (2 if settings.get("gated") else 1)
    bias = numbers(rows, seed=3, dtype=dtype) if settings.pop("bias", False) else None
    linear = SimpleNamespace(weight=numbers(rows, 72, seed=2, dtype=dtype) * 0.2, bias=bias)
    if "norm" in settings:
        settings["norm"] = norm_of(settings["norm"], 72, dtype)
    if "added" in settings:
        settings["added"] = numbers(3, outputs, seed=4, dtype=dtype)
    x = numbers(3, 72, dtype=dtype) + 1
    wanted = formulas.fused_linear(*exactly((x, linear)), **{key: exactly(one) for key, one in settings.items()})
    check(kernels.fused_linear(x, linear, **settings), wanted)


@dtypes
@pytest.mark.parametrize(("rows", "spread"), [(3, 1), (3, 264), on_gpu_only(40, 264)])
@pytest.mark.parametrize(
    ("heads", "key_heads", "head", "settings"),
    [
        (4, 4, 24, "interleaved"),
        (4, 4, 64, "turned"),
        (6, 2, 20, "turned"),
        (6, 1, 128, "turned and normalised"),
        (4, 2, 16, "turned and normalised"),
    ],
)
def test_attend(
    dtype: torch.dtype,
    rows: int,
    spread: int,
    heads: int,
    key_heads: int,
    head: int,
    settings: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts of different lengths; the cache has the new keys and values afterwards, and other slots are unchanged.

    With a spread of 1 a text's positions are not divided among programs."""
    monkeypatch.setattr(sys.modules[kernels.attend.__module__], "SPREAD", spread)
    count = heads * 3 if settings == "interleaved" else heads + 2 * key_heads
    qkv = numbers(rows, count, head, dtype=dtype)
    qkv = qkv.view(rows, heads, 3, head) if settings == "interleaved" else qkv
    cache = numbers(rows + 1, 150, key_heads, 2, head, seed=2, dtype=dtype)
    positions = torch.tensor(([0, 1, 31, 32, 33, 149, 100] * rows)[-rows:], device=DEVICE)
    arrivals = torch.zeros((rows + 1) * heads, dtype=torch.int32, device=DEVICE)
    angles = torch.arange(150, device=DEVICE)[:, None] * numbers(head // 2).abs()
    more: tuple[Any, ...] = () if settings == "interleaved" else ((angles.cos(), angles.sin()),)
    if settings == "turned and normalised":
        norms = norm_of("rms", head, dtype), norm_of("rms", head, dtype)
        norms[1].weight.data *= -2
        more = (*more, norms)
    exact = exactly(cache)
    wanted = formulas.attend(exactly(qkv), exact, positions, arrivals, *exactly(more))
    for _ in range(1 if spread == 1 else 2):  # it writes the same again, and leaves its counters at 0
        check(kernels.attend(qkv, cache, positions, arrivals, *more), wanted)
        check(cache, exact)
        assert arrivals.abs().max() == 0
