"""The head and its cross-entropy in one, against torch's own in fp64; the Triton kernels too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernel_devices import DEVICES, INTERPRETED
from tests.support.loss_oracle import PADDED, VOCAB, exact, given, relative_difference
from textmill.engines import losses_torch
from textmill.engines.losses_torch import WeightedLabels, loss_and_correct, summed_loss
from textmill.tokens.batches.batch import IGNORED

# Relative errors of gradients: fp32 sums, and operands and gradient of the scores rounded to bf16.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("smoothing", "lean"), [(0.0, 0), (0.2, 0), (0.0, 16), (0.2, 16)])
def test_loss_and_gradients(
    device: str, dtype: torch.dtype, smoothing: float, lean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lean some tokens have a denominator whose log is far below zero, others one far above."""
    monkeypatch.setattr(losses_torch, "CPU_LOGITS", 20 * PADDED)
    monkeypatch.setattr(losses_torch, "GPU_TOKENS", 20)
    x, head, labels, weights = given(23 if INTERPRETED else 73, dtype, device, lean)
    x.requires_grad_()
    head.requires_grad_()
    weighted = WeightedLabels(labels, weights)
    loss = summed_loss(x, head, weighted, VOCAB, smoothing=smoothing)
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    wanted, grad_x, grad_head = exact(x.detach(), head.detach(), labels, weights, smoothing)
    assert x.grad is not None
    assert head.grad is not None
    assert float(loss.detach()) == pytest.approx(wanted.item(), rel=1e-6 if dtype == torch.float32 else 1e-3)
    bound = BOUNDS[dtype] * (1 + lean / 4)  # rounding errors grow with the logits
    assert relative_difference(x.grad, 3 * grad_x) < bound
    assert relative_difference(head.grad, 3 * grad_head) < bound
    assert head.grad[VOCAB:].abs().max() == 0, "padding rows have no gradient"
    assert x.grad[::5].abs().max() == 0, "tokens without a label have no gradient"
    x.grad = head.grad = None
    again = summed_loss(x, head, weighted, VOCAB, smoothing=smoothing, gradient_is_one=True)
    again.backward()  # type: ignore[no-untyped-call]
    assert relative_difference(x.grad, grad_x) < bound
    assert relative_difference(head.grad, grad_head) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [301, 383, 384, 2048, 5000])
def test_any_vocabulary(device: str, vocab: int) -> None:
    dice = torch.Generator().manual_seed(3)
    padded = -(-vocab // 128) * 128
    x, head = torch.randn(9, 16, generator=dice).to(device), torch.randn(padded, 16, generator=dice).to(device)
    labels = torch.tensor([0, vocab - 1, vocab // 2, IGNORED, 7, 8, 9, 10, 11], dtype=torch.int32, device=device)
    head.requires_grad_()
    loss = summed_loss(x, head, WeightedLabels(labels, torch.ones(9, device=device)), vocab)
    (gradient,) = torch.autograd.grad(loss, head)
    head64 = head.detach().double().requires_grad_()
    wanted = F.cross_entropy((x.double() @ head64.T)[:, :vocab], labels.long(), ignore_index=IGNORED, reduction="sum")
    (grad,) = torch.autograd.grad(wanted, head64)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert relative_difference(gradient, grad) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
def test_correct_predictions_are_counted(device: str) -> None:
    x, head, labels, _ = given(30 if INTERPRETED else 200, torch.float32, device)
    scores = (x.double() @ head.double().T)[:, :VOCAB]
    labels[1::3] = scores.argmax(1).int()[1::3]
    labels[::5] = IGNORED
    losses, right = loss_and_correct(x, head, labels, VOCAB)
    wanted = F.cross_entropy(scores, labels.long(), ignore_index=IGNORED, reduction="none")
    assert relative_difference(losses, wanted) < 1e-6
    assert int(right.sum()) == int((scores.argmax(1) == labels).sum()) > len(labels) // 4


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_first_counts(device: str) -> None:
    x, head = torch.ones(2, 8, device=device), torch.ones(256, 8, device=device)
    _, right = loss_and_correct(x, head, torch.tensor([0, 1], dtype=torch.int32, device=device), 200)
    assert [bool(one) for one in right] == [True, False]
