"""The fused QKV projection equals a plain linear layer that is split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.kernels.qkv_torch import join_heads, project_qkv

LAYOUTS = {
    "as attention leaves them": lambda draw, N, H, T, D: draw(N, T, H, D).transpose(1, 2),
    "dense by head": lambda draw, N, H, T, D: draw(N, H, T, D),
    "with gaps, no side dense": lambda draw, N, H, T, D: draw(D, N, T + 3, H, 2)[:, :, 3:, :, 1].permute(1, 3, 2, 0),
}


def _plain(x: Tensor, weight: Tensor, bias: Tensor, D: int) -> tuple[Tensor, ...]:
    parts = F.linear(x, weight, bias).view(*x.shape[:2], -1, 3, D).unbind(3)
    return tuple(part.transpose(1, 2) for part in parts)


def test_values_and_gradients_equal_a_split_linear_layer() -> None:
    torch.manual_seed(1)
    given = torch.randn(2, 5, 12), torch.randn(36, 12), torch.randn(36)
    results = []
    for way in (project_qkv, _plain):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        parts = way(*leaves, 4)
        torch.manual_seed(2)
        torch.autograd.backward(parts, [torch.randn(part.shape) for part in parts])
        results.append([*parts, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_op_passes_torchs_opcheck() -> None:
    torch.library.opcheck(join_heads, tuple(lay(torch.randn, 2, 3, 5, 4) for lay in LAYOUTS.values()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_gradients_are_joined_bit_by_bit_and_summed_in_fp32(layout: str) -> None:
    torch.manual_seed(4)
    parts = [LAYOUTS[layout](lambda *sizes: torch.randn(*sizes, dtype=torch.bfloat16), 2, 3, 29, 32) for _ in range(3)]
    joined, sums = join_heads(*parts)
    wanted = torch.stack([part.transpose(1, 2) for part in parts], 3).flatten(2).flatten(0, 1)
    assert torch.equal(joined, wanted)
    assert sums.dtype == torch.float32
    assert (sums.double() - wanted.double().sum(0)).norm() <= 1e-5 * wanted.double().abs().sum(0).norm()
