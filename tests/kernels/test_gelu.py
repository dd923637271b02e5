"""The bias and GELU kernels against torch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernel_devices import DEVICE, on_gpu_only

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "programs"), [on_gpu_only((3000, 3072), None), ((37, 200), None), ((37, 600), 2), ((1, 64), None)]
)
def test_values_and_gradients(
    approximate: str,
    dtype: torch.dtype,
    bound: float,
    shape: tuple[int, int],
    programs: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few programs each has several rows, and some have one more than others."""
    from textmill.kernels import gelu_torch

    if programs:
        monkeypatch.setattr(gelu_torch, "PROGRAMS", programs)
    dice = torch.Generator().manual_seed(2)
    x, slope = (torch.randn(shape, generator=dice).to(DEVICE, dtype) for _ in range(2))
    bias = torch.randn(shape[1], generator=dice).to(DEVICE)
    x64, bias64 = x.double().requires_grad_(), bias.double().requires_grad_()
    wanted = F.gelu(x64 + bias64, approximate=approximate)
    wanted.backward(slope.double())
    x.requires_grad_()
    bias.requires_grad_()
    got = gelu_torch.bias_gelu(x, bias, approximate == "tanh")
    got.backward(slope)
    for one, other in ((got, wanted), (x.grad, x64.grad), (bias.grad, bias64.grad)):
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() / other.norm() < bound
