"""Products in fp8 against fp64: errors of each product and gradient, rows that hold nothing or no number, and training with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines.test_contract import VOCAB, batch_of, config_of, run, started
from tests.engines.test_losses import VOCAB as SCORES
from tests.engines.test_losses import apart, exact, given
from textmill.config import LoraConfig, RunConfig
from textmill.devices import check_fp8, precision_of
from textmill.engines import open_engine
from textmill.engines.losses_torch import summed_loss
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.fp8_torch import KIND, linear8, product8, rows8
from textmill.models.nets_torch import new_net


def _to_be_had() -> bool:
    """Whether this torch makes such products on a CPU; not every one does."""
    try:
        product8(rows8(torch.ones(16, 16)), rows8(torch.ones(16, 16)))
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _to_be_had(), reason="this torch has no fp8 products of rows on a CPU")
HALF_STEP = 2.0**-4
"""Three bits of mantissa: a rounded number is at most this share of itself away."""


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """A CPU without bf16 makes torch switch oneDNN off for the whole process; the other tests want it as it was."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def numbers(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=dice) * torch.logspace(-3, 3, rows)[:, None] * spread


def test_a_row_is_rounded_by_its_own_scale() -> None:
    x = numbers(40, 64, 1)
    x8, scale = rows8(x)
    assert x8.dtype == KIND
    assert torch.equal(scale[:, 0], x.abs().amax(1) / 448), "the greatest number of e4m3"
    error = (x8.double() * scale.double() - x.double()).abs()
    smallest = 2.0**-10 * scale.double()  # half a step of the numbers next to 0
    assert bool((error <= (x.double().abs() * HALF_STEP).maximum(smallest) * (1 + 1e-6)).all())


def test_a_product_is_that_of_the_rounded_rows() -> None:
    a, b = rows8(numbers(24, 64, 2)), rows8(numbers(32, 64, 3))
    wanted = (a[0].double() * a[1].double()) @ (b[0].double() * b[1].double()).T
    found = product8(a, b)
    assert found.dtype == torch.bfloat16
    assert apart(found, wanted) < 4e-3, "bf16's rounding of the result"


def test_a_layer_and_its_gradients() -> None:
    x, weight, dy = numbers(48, 64, 4).bfloat16(), numbers(80, 64, 5, 0.02), numbers(48, 80, 6, 1e-7).bfloat16()
    x.requires_grad_()
    weight.requires_grad_()
    y = linear8(x, weight)
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    x64, weight64, dy64 = x.detach().double(), weight.detach().double(), dy.double()
    assert apart(y.detach(), x64 @ weight64.T) < 5e-2
    assert apart(x.grad, dy64 @ weight64) < 5e-2
    assert apart(weight.grad, dy64.T @ x64) < 6e-3, "the weights' gradient is bf16's"
    assert weight.grad.dtype == torch.float32


def test_nothing_stays_nothing_and_no_number_is_not_hidden() -> None:
    x, weight = torch.zeros(3, 16), torch.ones(16, 16)
    x[1], x[2, 4] = 1.0, float("inf")
    y = linear8(x, weight)
    assert y[0].abs().max() == 0
    assert torch.equal(y[1], torch.full((16,), 16.0, dtype=torch.bfloat16))
    assert not torch.isfinite(y[2]).any()


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-3)])
def test_the_loss_and_its_gradients(smoothing: float, z: float) -> None:
    x, head, labels, shares = given(73, torch.bfloat16, "cpu")
    x.requires_grad_()
    head.requires_grad_()
    loss = summed_loss(x, head, labels, shares, SCORES, smoothing, z, fp8=True)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted, slope_x, slope_head = exact(x.detach(), head.detach(), labels, shares, smoothing, z)
    assert x.grad is not None
    assert head.grad is not None
    assert float(loss.detach()) == pytest.approx(float(wanted), rel=1e-2)
    assert apart(x.grad, slope_x) < 5e-2
    assert apart(head.grad, slope_head) < 5e-2


def in_fp8(recompute: int = 0, **options: Any) -> RunConfig:
    config = config_of("torch", **options)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"precision": "fp8", "recompute": recompute})})


def test_training_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns as bf16 does, goes on bit for bit, and gives the same where states are made again."""
    monkeypatch.setattr("textmill.engines.on_torch.check_fp8", lambda device: None)
    near = config_of("torch")
    near = near.model_copy(update={"engine": near.engine.model_copy(update={"precision": "bf16"})})
    wanted, engine = run(started(near), range(12), unequal=False), started(in_fp8())
    assert engine.facts()["precision"] == "float8"
    first = run(engine, range(6), unequal=False)
    weights, moments = list(engine.weights()), list(engine.moments())
    losses = first + run(engine, range(6, 12), unequal=False)
    assert losses == pytest.approx(wanted, rel=2e-2)
    assert losses != wanted
    assert losses[-1] < losses[0] - 0.5
    again = open_engine(in_fp8(recompute=1), open_family("gpt2").shape_of(near.model, vocab=VOCAB, end=0))
    again.load(weights, moments, 6, "saved")
    assert first + run(again, range(6, 12), unequal=False) == losses
    plain = started(near)
    plain.load(engine.weights(), [], 0, "the same weights")
    assert engine.eval_step(batch_of(0)) == plain.eval_step(batch_of(0)), "evaluation is in bf16"
    for (name, one), (_, other) in zip(engine.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


def test_refused_where_there_is_no_such_product(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TextmillError, match=r"fp8 needs a GPU of compute capability 8\.9 or more, found cpu; set engine\.precision=auto"):
        open_engine(in_fp8(), open_family("gpt2").shape_of(in_fp8().model, vocab=VOCAB, end=0))
    found = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    with pytest.raises(TextmillError, match=r"this one has 8\.0"):
        check_fp8(torch.device("cuda"))
    found = (8, 9)
    check_fp8(torch.device("cuda"))
    assert precision_of("fp8", torch.device("cpu")) == torch.bfloat16, "who only uses the model needs no such chip"


@pytest.mark.parametrize(
    ("width", "lora", "message"),
    [
        (36, None, "fp8 needs widths that 16 divides, found 36 and 144"),
        (32, LoraConfig(), "fp8 is not made for the narrow matrices of model.lora"),
    ],
)
def test_nets_it_cannot_take_are_refused(width: int, lora: LoraConfig | None, message: str) -> None:
    config = config_of("torch")
    shape = config.model.shape.model_copy(update={"width": width})  # type: ignore[union-attr]
    model = config.model.model_copy(update={"shape": shape})
    net = new_net(open_family("gpt2").shape_of(model, vocab=VOCAB, end=0), torch.device("cpu"), lora)
    with pytest.raises(TextmillError, match=message):
        net.use_fp8()
