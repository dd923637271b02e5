"""Layers with one input as one matmul: the same outputs and gradients as each alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from textmill.config import LoraConfig, ModelConfig
from textmill.kernels import matmul_torch
from textmill.models import open_family
from textmill.models.base_torch import AdaptedLinear, Context, linears
from textmill.models.bert.net_torch import SelfAttention


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
        outputs = linears(x, layers, Context())
        grads = torch.autograd.grad(outputs, leaves, upstream)
        results.append([*outputs, *grads])
    assert calls == [sum(sizes)], "one matmul, only where it is tuned"
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_adapters_and_mixed_biases_stay_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter changes its own layer only, and a joined bias would need one for every layer."""
    joined: list[Any] = []
    monkeypatch.setattr(torch, "cat", joined.append)
    monkeypatch.setattr(matmul_torch, "use_tuned_matmul", lambda *_: True)
    monkeypatch.setattr(matmul_torch, "linear", nn.functional.linear)
    plain, bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    adapted = AdaptedLinear(nn.Linear(8, 8), LoraConfig(rank=2), 0)
    x = torch.randn(2, 3, 8)
    for layers in ((plain, adapted), (plain, bare)):
        for layer, found in zip(layers, linears(x, layers, Context()), strict=True):
            assert torch.equal(found, layer(x))
    assert joined == []


def test_compiled_attention_of_bert_is_one_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on a GPU, with the operator of tuned matmuls; outputs and gradients are those of the eager layers."""
    torch.manual_seed(1)
    shape: Any = open_family("bert").shape_of(ModelConfig(family="bert", size="tiny"), vocab=50, eos_id=0, length=8)
    attention = SelfAttention(replace(shape, width=32, heads=2))
    x = torch.randn(2, 8, 32, requires_grad=True)
    leaves = [x, *attention.parameters()]
    wanted = attention(x, Context())
    wanted_grads = torch.autograd.grad(wanted.square().sum(), leaves)
    monkeypatch.setattr(matmul_torch, "use_tuned_matmul", lambda *_: torch.compiler.is_compiling())
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(attention, backend=backend, fullgraph=True)(x, Context())
    grads = torch.autograd.grad(found.square().sum(), leaves)
    assert sum("autograd_function_apply" in target for [*targets] in seen for target in targets) == 1, seen
    for one, other in zip([found, *grads], [wanted, *wanted_grads], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
