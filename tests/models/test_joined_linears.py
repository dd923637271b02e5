"""Layers with one input as one matmul: the same outputs and gradients as each alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch
from textmill.models.lora_torch import AdaptedLinear, join_linears


@pytest.mark.parametrize(("bias", "sizes"), list(product((True, False), ((8, 8, 8), (8, 4, 4), (12, 12)))))
def test_joined_layers_compute_the_same(bias: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layers = tuple(nn.Linear(8, size, bias=bias).double() for size in sizes)
    x = torch.randn(2, 3, 8, dtype=torch.double, requires_grad=True)
    upstream = [torch.randn(2, 3, size, dtype=torch.double) for size in sizes]
    calls: list[int] = []
    linear = matmul_torch.linear

    def count(given: torch.Tensor, weight: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(weight))
        return linear(given, weight, bias_F)

    monkeypatch.setattr(matmul_torch, "linear", count)
    results = []
    for joined in (False, True):
        monkeypatch.setattr(matmul_torch, "use_tuned_matmul", lambda *_, joined=joined: joined and not calls)
        leaves = [x, *(one for layer in layers for one in layer.parameters())]
        outputs = join_linears(layers, x, None)
        grads = torch.autograd.grad(outputs, leaves, upstream)
        results.append([*outputs, *grads])
    assert calls == [sum(sizes)], "one matmul, only where it is tuned"
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_adapters_and_mixed_biases_stay_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter changes its own layer only, and a joined bias would need one for every layer."""
    monkeypatch.setattr(torch, "cat", None)
    monkeypatch.setattr(matmul_torch, "use_tuned_matmul", lambda *_: False)
    plain, bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    adapted = AdaptedLinear(nn.Linear(8, 8), LoraConfig(rank=2), 0)
    x = torch.randn(2, 3, 8)
    for layers in ((plain, adapted), (plain, bare)):
        for layer, found in zip(layers, join_linears(layers, x, None), strict=True):
            assert torch.equal(found, layer(x))
