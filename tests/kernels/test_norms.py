"""LayerNorm with the residual stream equals torch's LayerNorm in values and gradients; its kernel too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kernel_devices import DEVICE, on_gpu_only
from textmill.kernels import norms_torch
from textmill.kernels.norms_torch import norm_backward, norm_with_residual_gradient


def _norm(width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("biases", [False, True])
def test_norm_and_residual_has_the_gradients_of_torchs_norm(biases: bool) -> None:
    """With a bias added before and another after the norm."""
    torch.manual_seed(1)
    norm, x, gradients = _norm(12), torch.randn(2, 5, 12), torch.randn(2, 2, 5, 12)
    before, after = torch.randn(12), torch.randn(12)
    results = []
    for ours in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, before, after)]
        norm.zero_grad()
        if ours and biases:
            y, stream = norm_with_residual_gradient(leaves[0] + leaves[1].detach(), norm, leaves[1], leaves[2])
            stream = stream + leaves[2].detach()
        else:
            stream = leaves[0] + leaves[1]
            y, stream = norm_with_residual_gradient(stream, norm) if ours else (norm(stream), stream)
            stream = stream + leaves[2]
        torch.autograd.backward([y, stream], list(gradients))
        results.append([y, stream, *(leaf.grad for leaf in leaves), norm.weight.grad, norm.bias.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _given(rows: int, width: int, kind: torch.dtype, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    dy, x, stream = (torch.randn(rows, width).to(device, kind) for _ in range(3))
    x = x * 3 + 1
    inverse_stds, means = torch.var_mean(x.float(), 1, correction=0)
    return dy, x, means, (inverse_stds + 1e-5).rsqrt(), torch.randn(width, device=device), stream


def test_the_op_passes_torchs_opcheck() -> None:
    for biases in (False, True):
        torch.library.opcheck(norm_backward, (*_given(5, 12, torch.float32, "cpu"), biases))


@pytest.mark.kernels
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("kind", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "programs"),
    [on_gpu_only((4096, 768), 528), on_gpu_only((1000, 1600), 528), ((7, 48), 528), ((7, 100), 3), ((1, 1024), 528)],
)
def test_the_kernel_matches_fp64(
    shape: tuple[int, int],
    programs: int,
    kind: torch.dtype,
    bound: float,
    biases: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against autograd through torch's LayerNorm in fp64; every run gives the same bits."""
    monkeypatch.setattr(norms_torch, "PROGRAMS", programs)
    dy, x, means, inverse_stds, weight, stream = _given(*shape, kind, DEVICE)
    x64, weight64, shift64 = (tensor.double().requires_grad_() for tensor in (x, weight, torch.zeros_like(weight)))
    F.layer_norm(x64, weight.shape, weight64, shift64).backward(dy.double())
    wanted = x64.grad + stream.double()
    dx, sums = norm_backward(dy, x, means, inverse_stds, weight, stream, biases)
    assert (dx.double() - wanted).norm() < bound * wanted.norm()
    exact = [weight64.grad, shift64.grad, wanted.sum(0), stream.double().sum(0)]
    assert len(sums) == (4 if biases else 2)
    for number, (found, right) in enumerate(zip(sums, exact, strict=False)):
        scale = (dy, dy, wanted, stream)[number].double().abs().sum(0).norm()
        assert (found.double() - right).norm() < bound * scale
    again = norm_backward(dy, x, means, inverse_stds, weight, stream, biases)
    assert torch.equal(dx, again[0])
    assert torch.equal(sums, again[1])
