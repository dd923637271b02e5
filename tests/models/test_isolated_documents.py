"""Isolated documents with a block mask, as on a GPU, against the explicit mask: mask, hidden states, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from textmill.models import base_torch, initial_weights
from textmill.models.base_torch import document_block_mask, document_mask
from textmill.models.gpt2.family import Shape
from textmill.models.gpt2.net_torch import Net
from textmill.models.nets_torch import fill, new_net

N, T = 2, 256


def documents() -> Tensor:
    """Documents that start and end inside blocks, one of a single token, and padding at the end."""
    rows = [torch.repeat_interleave(torch.arange(1, 6), torch.tensor([37, 1, 100, 90, 28])), torch.arange(T) // 130 + 1]
    rows[1][240:] = 0
    return torch.stack(rows).int()


@pytest.fixture
def net() -> Net:
    shape = Shape(vocab=90, positions=T, layers=2, heads=2, width=32, inner=64, eos_id=0)
    made = new_net(shape, torch.device("cpu"))
    fill(made, initial_weights(shape, 3), "the first weights")
    assert isinstance(made, Net)
    return made


def states_and_gradients(net: Net, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = net(ids, documents_NT=documents())
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    return x.detach(), list(torch.autograd.grad(x, list(net.parameters()), slope))


def test_the_block_mask_equals_the_mask() -> None:
    mask = document_block_mask(documents())
    assert torch.equal(flex_attention.create_mask(mask.mask_mod, N, 1, T, T, device="cpu"), document_mask(documents()))
    assert mask.kv_num_blocks.sum() + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.sum()) < 2 * 4


def test_states_and_gradients_are_the_same(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 90, (N, T), generator=torch.Generator().manual_seed(1))
    wanted, slopes = states_and_gradients(net, ids)
    used = []
    monkeypatch.setattr(base_torch, "use_block_mask", lambda documents_NT, width: used.append(width) or True)
    # On a CPU torch has the gradient and refuses it, since it is slow there.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *given: None)
    found, gradients = states_and_gradients(net, ids)
    assert used == [16]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, slopes, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm()) + 1e-6


def test_a_cpu_uses_the_explicit_mask(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        base_torch, "document_block_mask", lambda documents_NT, causal: pytest.fail("blocks do not pay here")
    )
    net(torch.zeros(N, T, dtype=torch.long), documents_NT=documents())
