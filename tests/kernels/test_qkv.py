"""The fused QKV projection equals a plain linear layer that is split; its kernel too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernel_devices import DEVICE, on_gpu_only
from textmill.kernels import attention_torch
from textmill.kernels.attention_torch import join_heads, project_qkv

LAYOUTS = {
    "as attention leaves them": lambda draw, N, H, T, D: draw(N, T, H, D).transpose(1, 2),
    "dense by head": lambda draw, N, H, T, D: draw(N, H, T, D),
    "with gaps, no side dense": lambda draw, N, H, T, D: draw(D, N, T + 3, H, 2)[:, :, 3:, :, 1].permute(1, 3, 2, 0),
    "the same for all": lambda draw, N, H, T, D: draw(H, 1, D).expand(N, H, T, D),
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
    torch.library.opcheck(join_heads, tuple(lay(torch.randn, 2, 3, 5, 4) for lay in list(LAYOUTS.values())[:3]))


@pytest.mark.kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "programs"),
    [
        on_gpu_only((3, 12, 1000, 64), 660),
        ((2, 3, 29, 32), 660),
        ((2, 5, 29, 32), 4),
        ((1, 5, 7, 80), 660),
        ((1, 1, 1, 16), 660),
    ],
)
def test_the_kernel_joins_and_sums(
    layout: str, kind: torch.dtype, shape: tuple[int, int, int, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joined gradient has torch's bits, the sums are close to fp64, and every run gives the same bits."""
    monkeypatch.setattr(attention_torch, "PROGRAMS", programs)
    torch.manual_seed(4)
    parts = [LAYOUTS[layout](partial(torch.randn, device=DEVICE, dtype=kind), *shape) for _ in range(3)]
    joined, sums = join_heads(*parts)
    wanted = torch.stack([part.transpose(1, 2) for part in parts], 3).flatten(2).flatten(0, 1)
    assert torch.equal(joined, wanted)
    assert sums.dtype == torch.float32
    assert (sums.double() - wanted.double().sum(0)).norm() <= 1e-5 * wanted.double().abs().sum(0).norm()
    assert all(torch.equal(one, other) for one, other in zip((joined, sums), join_heads(*parts), strict=True))
