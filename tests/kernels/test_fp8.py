"""fp8 matmuls against fp64: errors of results and gradients, rows of zeros or NaN, training; the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import engine_runs
from tests.support.engine_runs import VOCAB, batch_of, config_of, run, started
from tests.support.kernel_devices import DEVICE, DEVICES, INTERPRETED, on_gpu_only
from tests.support.loss_oracle import VOCAB as SCORES
from tests.support.loss_oracle import exact, given, relative_difference
from textmill.config import LoraConfig, ModelConfig, RunConfig
from textmill.devices import check_fp8, torch_dtype
from textmill.engines import open_engine
from textmill.engines.losses_torch import WeightedLabels, summed_loss
from textmill.errors import TextmillError
from textmill.kernels import fp8_torch
from textmill.kernels.fp8_torch import (
    FP8_DTYPE,
    FP8_GATES,
    bias_gelu8,
    bias_gelu8_backward,
    fp8_gated_mlp,
    fp8_matmul,
    fp8_mlp,
    gate8,
    gate8_backward,
    quantize_rows,
)
from textmill.models import initial_weights, open_family
from textmill.models.base_torch import ACTIVATIONS
from textmill.models.nets_torch import fill, new_net


def _cpu_supports_fp8() -> bool:
    """True if this torch supports row-scaled fp8 matmuls on a CPU; not every version does."""
    try:
        fp8_matmul(quantize_rows(torch.ones(16, 16)), quantize_rows(torch.ones(16, 16)))
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _cpu_supports_fp8(), reason="this torch has no row-scaled fp8 matmuls on a CPU")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
HALF_STEP = 2.0**-4
"""Largest relative rounding error with three bits of mantissa."""


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """On a CPU without bf16 torch switches oneDNN off for the entire process; restore it for the other tests."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def numbers(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=dice) * torch.logspace(-3, 3, rows)[:, None] * spread


def test_a_row_is_rounded_by_its_own_scale() -> None:
    x = numbers(40, 64, 1)
    x8, scale = quantize_rows(x)
    assert x8.dtype == FP8_DTYPE
    assert torch.equal(scale[:, 0], x.abs().amax(1) / 448), "the greatest number of e4m3"
    error = (x8.double() * scale.double() - x.double()).abs()
    smallest = 2.0**-10 * scale.double()  # half a step of the numbers next to 0
    assert bool((error <= (x.double().abs() * HALF_STEP).maximum(smallest) * (1 + 1e-6)).all())


def test_a_matmul_uses_the_rounded_rows() -> None:
    a, b = quantize_rows(numbers(24, 64, 2)), quantize_rows(numbers(32, 64, 3))
    wanted = (a[0].double() * a[1].double()) @ (b[0].double() * b[1].double()).T
    found = fp8_matmul(a, b)
    assert found.dtype == torch.bfloat16
    assert relative_difference(found, wanted) < 4e-3, "bf16's rounding of the result"


def check_gradients(leaves: list[torch.Tensor], exact: list[torch.Tensor], bound: float) -> None:
    """Every leaf has a gradient in its own dtype, within `bound` of that of its exact twin."""
    for leaf, right in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert right.grad is not None
        assert relative_difference(leaf.grad, right.grad) < bound


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", None),
        ("cpu", "aot_eager"),
        pytest.param("cuda", None, marks=on_gpu),
        pytest.param("cuda", "inductor", marks=on_gpu),
    ],
)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_an_mlp_and_its_gradients(approximate: str, device: str, backend: str | None) -> None:
    """Everything against fp64, within the error of two fp8 matmuls; weight gradients also against their bf16 inputs."""
    dice = torch.Generator().manual_seed(4)
    x, fc, bias, proj, dy = (
        (torch.randn(size, generator=dice) * spread).to(device)
        for size, spread in (((48, 64), 1.0), ((80, 64), 0.2), ((80,), 0.5), ((32, 80), 0.1), ((48, 32), 1e-7))
    )
    x, dy = x.bfloat16(), dy.bfloat16()
    leaves = [tensor.requires_grad_() for tensor in (x, fc, bias, proj)]
    made = fp8_mlp if backend is None else torch.compile(fp8_mlp, backend=backend, fullgraph=True, dynamic=False)
    y = made(*leaves, approximate == "tanh")
    y.backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    x64, fc64, bias64, proj64 = exact
    wanted = F.gelu(x64 @ fc64.T + bias64, approximate=approximate) @ proj64.T
    wanted.backward(dy.double())
    assert relative_difference(y.detach(), wanted.detach()) < 7e-2
    check_gradients(leaves, exact, 7e-2)
    h64 = (
        fp8_matmul(quantize_rows(x.detach()), quantize_rows(fc.detach())).double() + bias64.detach()
    ).requires_grad_()
    y64 = F.gelu(h64, approximate=approximate)
    y64.backward(fp8_matmul(quantize_rows(dy), quantize_rows(proj.detach().T)).double())
    assert h64.grad is not None
    near = (
        (fc, h64.grad.T @ x64.detach(), 6e-3),
        (bias, h64.grad.sum(0), 1e-3),
        (proj, dy.double().T @ y64.detach(), 6e-3),
    )
    for leaf, right, bound in near:
        assert leaf.grad is not None
        assert relative_difference(leaf.grad, right) < bound


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", None),
        ("cpu", "aot_eager"),
        pytest.param("cuda", None, marks=on_gpu),
        pytest.param("cuda", "inductor", marks=on_gpu),
    ],
)
@pytest.mark.parametrize("activation", FP8_GATES)
def test_a_gated_mlp_and_its_gradients(activation: str, device: str, backend: str | None) -> None:
    """Everything against fp64, within the error of two fp8 matmuls; weight gradients also against their bf16 inputs."""
    dice = torch.Generator().manual_seed(4)
    x, gate, up, down, dy = (
        (torch.randn(size, generator=dice) * spread).to(device)
        for size, spread in (((48, 64), 1.0), ((80, 64), 0.2), ((80, 64), 0.1), ((32, 80), 0.1), ((48, 32), 1e-7))
    )
    x, dy = x.bfloat16(), dy.bfloat16()
    leaves = [tensor.requires_grad_() for tensor in (x, gate, up, down)]
    made = fp8_gated_mlp
    if backend is not None:
        made = torch.compile(fp8_gated_mlp, backend=backend, fullgraph=True, dynamic=False)
    y = made(*leaves, activation)
    y.backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    x64, gate64, up64, down64 = exact
    wanted = (ACTIVATIONS[activation](x64 @ gate64.T) * (x64 @ up64.T)) @ down64.T
    wanted.backward(dy.double())
    assert relative_difference(y.detach(), wanted.detach()) < 9e-2
    check_gradients(leaves, exact, 9e-2)
    x8 = quantize_rows(x.detach())
    h64 = [fp8_matmul(x8, quantize_rows(one.detach())).double().requires_grad_() for one in (gate, up)]
    y64 = ACTIVATIONS[activation](h64[0]) * h64[1]
    y64.backward(fp8_matmul(quantize_rows(dy), quantize_rows(down.detach().T)).double())
    for leaf, h in ((gate, h64[0]), (up, h64[1])):
        assert leaf.grad is not None
        assert h.grad is not None
        assert relative_difference(leaf.grad, h.grad.T @ x64.detach()) < 6e-3
    assert down.grad is not None
    assert relative_difference(down.grad, dy.double().T @ y64.detach()) < 6e-3


def test_frozen_weights_need_no_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.kernels.fp8_torch.matmul_to_dtype", None)
    x, fc, bias, proj = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16), torch.ones(16), torch.ones(16, 16)
    fp8_mlp(x, fc, bias, proj, True).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, torch.full((16, 16), 256.0)), "what is in fp32 has its gradient in fp32"  # type: ignore[arg-type]
    gated = torch.ones(16, 16, requires_grad=True)
    fp8_gated_mlp(gated, fc, fc, proj, "relu2").sum().backward()  # type: ignore[no-untyped-call]
    # y = 16 (sum x)^3 in each of 16 outputs, with 16 inner channels: the slope is 16 * 16 * 3 * 16^2.
    assert torch.allclose(gated.grad, torch.full((16, 16), 16.0 * 16 * 3 * 256), rtol=0.1)  # type: ignore[arg-type]


def test_zeros_stay_zero_and_infinities_stay_visible() -> None:
    x, weight, dy = torch.zeros(4, 16), torch.ones(16, 16), torch.ones(4, 16)
    x[1], x[2, 4] = 1.0, float("inf")
    dy[0], dy[3, 7] = 0.0, float("inf")
    x.requires_grad_()
    y = fp8_mlp(x, weight, torch.zeros(16), weight, True)
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert y[0].abs().max() == 0
    assert torch.equal(y[1], torch.full((16,), 256.0, dtype=torch.bfloat16))
    assert not torch.isfinite(y[2]).any()
    assert x.grad[0].abs().max() == 0
    assert torch.equal(x.grad[1], torch.full((16,), 256.0))
    assert not torch.isfinite(x.grad[2:]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_nan_makes_only_its_rows_scale_nan(bad: float, device: str) -> None:
    """The scale of a row of zeros is finite."""
    h, dy = torch.zeros(2, 3, 48, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(48, device=device)
    h[1, 40], dy[1] = bad, 1.0
    _, y8, scale = bias_gelu8(h, bias, True)
    _, dx8, back, _ = bias_gelu8_backward(dy, h, bias, True)
    h[1, 40], dy[1, 40] = 0.0, bad
    _, dx8_too, back_too, _ = bias_gelu8_backward(dy, h, bias, True)
    for rounded, of_row in ((y8, scale), (dx8, back), (dx8_too, back_too)):
        assert torch.isfinite(of_row[:, 0]).tolist() == [True, False, True]
        assert rounded[0].float().abs().max() == 0
        assert rounded[1, 40].isnan()


def some(rows: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, the output of the first matrix, and its bias."""
    dice = torch.Generator().manual_seed(7)
    dy, h = (torch.randn(rows, width, generator=dice).bfloat16().to(device) for _ in range(2))
    return dy, h, torch.randn(width, generator=dice).to(device)


def test_the_ops_pass_torchs_opcheck() -> None:
    dy, h, bias = some(5, 48, "cpu")
    torch.library.opcheck(bias_gelu8, (h, bias, True))
    torch.library.opcheck(bias_gelu8_backward, (dy, h, bias, False))
    torch.library.opcheck(gate8, (h, True))
    torch.library.opcheck(gate8_backward, (dy[:, :24].contiguous(), h, False))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs in the interpreter, so that a few rows are several for each."""
    for name in ("PROGRAMS", "BACKWARD_PROGRAMS") if INTERPRETED else ():
        monkeypatch.setattr(fp8_torch, name, 2)


WIDE = [(600, 3072), (530, 208), (37, 5120), (1, 6400)]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.kernels
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("shape", [*map(on_gpu_only, WIDE), (7, 16), (1, 48)])
def test_the_kernels_match_the_formulas(shape: tuple[int, int], tanh: bool) -> None:
    """fp64's values within bf16 rounding; fp8 as by quantize_rows, except ties; fp64 sums; every run is the same."""
    given = some(*shape, DEVICE)
    dy, h, bias = (tensor.cpu() for tensor in given)
    x64, bias64 = h.double().requires_grad_(), bias.double().requires_grad_()
    y64 = F.gelu(x64 + bias64, approximate="tanh" if tanh else "none")
    y64.backward(dy.double())
    assert x64.grad is not None
    assert bias64.grad is not None
    (y, *y8), (dx, *dx8, sums) = bias_gelu8(*given[1:], tanh), bias_gelu8_backward(*given, tanh)
    for found, wanted, in8 in ((y, y64.detach(), y8), (dx, x64.grad, dx8)):
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2**-7, atol=1e-5)
        right8, right = quantize_rows(found)
        torch.testing.assert_close(in8[1], right, rtol=1e-6, atol=0)
        step = (right8.float().abs() * 2.0**-3).clamp_min(2.0**-9)
        assert bool(((in8[0].float() - right8.float()).abs() <= step).all())
        assert int((in8[0].float() != right8.float()).sum()) < max(2, 1e-2 * found.numel()), "ties are few"
    assert float((sums.cpu().double() - bias64.grad).norm()) < 1e-5 * float(dy.double().abs().sum(0).norm())
    again = *bias_gelu8(*given[1:], tanh), *bias_gelu8_backward(*given, tanh)
    assert all(torch.equal(one, other) for one, other in zip((y, *y8, dx, *dx8, sums), again, strict=True))


WIDE_GATES = [(600, 2048), (530, 208), (3000, 1408), (37, 8960), (1, 5632)]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.kernels
@pytest.mark.parametrize("activation", FP8_GATES)
@pytest.mark.parametrize("shape", [*map(on_gpu_only, WIDE_GATES), (7, 16), (1, 48)])
def test_the_gates_kernels_match_the_formulas(shape: tuple[int, int], activation: str) -> None:
    """fp64's values within bf16 rounding; fp8 as by quantize_rows, except ties."""
    (rows, width), silu = shape, activation == "silu"
    dy, h, _ = some(rows, 2 * width, DEVICE)
    dy = dy[:, :width].contiguous()
    y8, (y, dh, *dh8) = gate8(h, silu), gate8_backward(dy, h, silu)
    h64 = h.cpu().double().requires_grad_()
    y64 = ACTIVATIONS[activation](h64[:, :width]) * h64[:, width:]
    y64.backward(dy.cpu().double())
    assert h64.grad is not None
    for found, wanted, in8 in ((y, y64.detach(), y8), (dh, h64.grad, dh8)):
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2**-7, atol=1e-5)
        right8, right = quantize_rows(found)
        torch.testing.assert_close(in8[1], right, rtol=1e-6, atol=0)
        step = (right8.float().abs() * 2.0**-3).clamp_min(2.0**-9)
        assert bool(((in8[0].float() - right8.float()).abs() <= step).all())
        assert int((in8[0].float() != right8.float()).sum()) < max(2, 1e-2 * found.numel()), "ties are few"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("column", [5, 70])
def test_one_nan_in_a_gated_row_makes_only_its_scale_nan(column: int, silu: bool, device: str) -> None:
    h, dy = torch.ones(3, 96, dtype=torch.bfloat16, device=device), torch.ones(3, 48, device=device).bfloat16()
    h[0], dy[0] = 0.0, 0.0
    h[1, column] = float("nan")
    (y8, scale), (_, _, dh8, back) = gate8(h, silu), gate8_backward(dy, h, silu)
    for rounded, of_row in ((y8, scale), (dh8, back)):
        assert torch.isfinite(of_row[:, 0]).tolist() == [True, False, True]
        assert rounded[0].float().abs().max() == 0
        assert rounded[1].isnan().any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradients(smoothing: float) -> None:
    x, head, labels, shares = given(73, torch.bfloat16, "cpu")
    x.requires_grad_()
    head.requires_grad_()
    loss = summed_loss(x, head, WeightedLabels(labels, shares), SCORES, smoothing=smoothing, fp8=True)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted, slope_x, slope_head = exact(x.detach(), head.detach(), labels, shares, smoothing)
    assert x.grad is not None
    assert head.grad is not None
    assert float(loss.detach()) == pytest.approx(wanted.item(), rel=1e-2)
    assert relative_difference(x.grad, slope_x) < 5e-2
    assert relative_difference(head.grad, slope_head) < 5e-2


def in_fp8(recompute: int = 0, **options: Any) -> RunConfig:
    config = config_of("torch", **options)
    return config.model_copy(
        update={"engine": config.engine.model_copy(update={"precision": "fp8", "activation_checkpointing": recompute})}
    )


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(one, marks=pytest.mark.long) for one in ("llama", "bert"))])
def test_training_in_fp8(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """It learns as well as bf16, resumes bitwise, and gives the same with activation checkpointing."""
    monkeypatch.setattr(engine_runs, "FAMILY", [family])
    monkeypatch.setattr("textmill.engines.on_torch.check_fp8", lambda device: None)
    near = config_of("torch")
    near = near.model_copy(update={"engine": near.engine.model_copy(update={"precision": "bf16"})})
    wanted, engine = run(started(near), range(12), unequal=False), started(in_fp8())
    assert engine.describe()["precision"] == "float8"
    first = run(engine, range(6), unequal=False)
    weights, moments = list(engine.weights()), list(engine.optimizer_state())
    losses = first + run(engine, range(6, 12), unequal=False)
    assert losses == pytest.approx(wanted, rel=2e-2)
    assert losses != wanted
    assert losses[-1] < losses[0] - 0.5
    config = in_fp8(recompute=1)
    again = open_engine(config.engine, config.train, open_family(family).shape_of(near.model, vocab=VOCAB, eos_id=0))
    again.load(weights, moments, 6, "saved")
    assert first + run(again, range(6, 12), unequal=False) == losses
    plain = started(near)
    plain.load(engine.weights(), [], 0, "the same weights")
    assert engine.eval_step(batch_of(0)) == plain.eval_step(batch_of(0)), "evaluation is in bf16"
    for (name, one), (_, other) in zip(engine.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = in_fp8()
    with pytest.raises(
        TextmillError,
        match=r"fp8 needs a GPU of compute capability 8\.9 or more, found cpu; set engine\.precision=auto",
    ):
        open_engine(config.engine, config.train, open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0))
    found = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    with pytest.raises(TextmillError, match=r"this one has 8\.0"):
        check_fp8(torch.device("cuda"))
    found = (8, 9)
    check_fp8(torch.device("cuda"))
    assert torch_dtype("fp8", torch.device("cpu")) == torch.bfloat16, "who only uses the model needs no such chip"


@pytest.mark.parametrize(
    ("family", "numbers", "lora", "message"),
    [
        ("gpt2", {"width": 36}, None, "fp8 needs widths that are multiples of 16, found 36 and 144"),
        ("gpt2", {}, LoraConfig(), r"fp8 does not support model\.lora"),
        ("gpt2", {"activation": "relu"}, None, "fp8 has no relu, only gelu_new and gelu"),
        ("llama", {"inner": 100}, None, "fp8 needs widths that are multiples of 16, found 32 and 100"),
        ("llama", {}, LoraConfig(), r"fp8 does not support model\.lora"),
        ("llama", {"activation": "gelu"}, None, "fp8 has no gelu, only silu and relu2"),
        ("llama", {"mlp_bias": True}, None, "fp8 does not support mlp_bias"),
        ("bert", {"activation": "relu"}, None, "fp8 has no relu, only gelu_new and gelu"),
        ("bert", {}, LoraConfig(), r"fp8 does not support model\.lora"),
    ],
)
def test_unsupported_nets_are_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, numbers: dict[str, Any], lora: LoraConfig | None, message: str
) -> None:
    monkeypatch.setattr(engine_runs, "FAMILY", [family])
    shape: Any = open_family(family).shape_of(config_of("torch").model, vocab=VOCAB, eos_id=0)
    if "width" in numbers:
        numbers = {**numbers, "inner": 4 * numbers["width"]}
    net = new_net(replace(shape, **numbers), torch.device("cpu"), lora)
    with pytest.raises(TextmillError, match=message):
        net.use_fp8()


def test_a_family_without_fp8_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = new_net(open_family("gpt2").shape_of(config_of("torch").model, vocab=VOCAB, eos_id=0), torch.device("cpu"))
    monkeypatch.setattr(type(net), "fp8_activations", ())
    with pytest.raises(TextmillError, match="the family gpt2 has no fp8 code"):
        net.use_fp8()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_berts_mlp_is_the_same_with_fp8_matmuls(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an exact matmul in place of fp8's, outputs and gradients equal those of the plain net in fp32."""
    shape: Any = open_family("bert").shape_of(ModelConfig(family="bert", size="tiny"), vocab=VOCAB, eos_id=0, length=16)
    shape = replace(shape, norm=norm, width=32, heads=2, inner=48)
    net = new_net(shape, torch.device("cpu"))
    fill(net, initial_weights(shape, 1), "the initial weights")
    ids = torch.arange(24).view(2, 12)
    found = []
    for fp8 in (False, True):
        if fp8:
            monkeypatch.setattr(
                "textmill.models.base_torch.fp8_mlp",
                lambda x, fc, bias, proj, tanh: F.linear(F.gelu(F.linear(x, fc, bias)), proj),
            )
            net.use_fp8()
        net.zero_grad()
        states = net(ids)
        states.square().sum().backward()
        grads = {name: one.grad.clone() for name, one in net.named_parameters() if one.grad is not None}
        found.append({"states": states.detach(), **grads})
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        assert torch.allclose(found[1][name], wanted, rtol=1e-5, atol=1e-6), name
