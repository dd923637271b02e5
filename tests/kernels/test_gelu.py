"""The bias and GELU kernel against torch in fp64; skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(3000, 3072), (37, 200), (1, 64)])
def test_values_and_gradients(approximate: str, dtype: torch.dtype, bound: float, shape: tuple[int, int]) -> None:
    from textmill.kernels.gelu_triton import bias_gelu

    dice = torch.Generator("cuda").manual_seed(2)
    x, slope = (torch.randn(shape, device="cuda", generator=dice).to(dtype) for _ in range(2))
    bias = torch.randn(shape[1], device="cuda", generator=dice)
    x64, bias64 = x.double().requires_grad_(), bias.double().requires_grad_()
    wanted = F.gelu(x64 + bias64, approximate=approximate)
    wanted.backward(slope.double())
    x.requires_grad_()
    bias.requires_grad_()
    got = bias_gelu(x, bias, approximate == "tanh")
    got.backward(slope)
    for one, other in ((got, wanted), (x.grad, x64.grad), (bias.grad, bias64.grad)):
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() / other.norm() < bound
