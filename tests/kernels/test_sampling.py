"""The kernels that choose the next token, against torch's argmax and a cumulative distribution in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_devices import DEVICE, INTERPRETED, on_gpu_only

pytestmark = pytest.mark.kernels
SIZES = [*(on_gpu_only(*size) for size in ((1, 50257), (5, 777), (64, 2000))), (1, 130), (5, 77)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or four programs for each text in the interpreter, and several blocks for each program."""
    from textmill.kernels import sampling_triton

    for name, value in {"PROGRAMS": 12, "PARTS": 4, "BLOCK": 16}.items() if INTERPRETED else ():
        monkeypatch.setattr(sampling_triton, name, value)


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The real columns of padded logits, with many equal ones in bf16."""
    dice = torch.Generator().manual_seed(rows)
    return (3 * torch.randn(rows, vocab + 47, generator=dice)).to(DEVICE, dtype)[:, :vocab]


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_the_first_largest_allowed_logit_is_taken(rows: int, vocab: int) -> None:
    """With equal logits, banned ids, NaN and infinities."""
    from textmill.kernels.sampling_triton import greedy_ids

    logits = logits_of(rows, vocab)
    assert torch.equal(greedy_ids(logits, None), logits.float().argmax(1))
    banned = torch.stack([logits.float().argmax(1), torch.full((rows,), -1, device=DEVICE)], 1)
    left = logits.float().scatter(1, banned[:, :1], -torch.inf)
    assert torch.equal(greedy_ids(logits, banned), left.argmax(1))
    for bad in (float("nan"), float("inf"), -float("inf")):
        logits[rows - 1, vocab - 1] = bad
        assert greedy_ids(logits, banned)[-1] == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kept", [0, 7], ids=["all", "top 7"])
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_a_sampled_id_is_where_the_cumulative_distribution_reaches_the_number(
    rows: int, vocab: int, kept: int, dtype: torch.dtype
) -> None:
    from textmill.kernels.sampling_triton import sample_ids

    logits, dice = logits_of(rows, vocab, dtype), torch.Generator().manual_seed(3)
    uniforms = torch.rand(rows, generator=dice, dtype=torch.float64)
    uniforms[0] = 0.0
    temperatures = 0.5 + torch.rand(rows, generator=dice)
    temperatures[::2] = 1.0
    banned = torch.tensor([[vocab // 2, -1, 3]]).repeat(rows, 1)
    exact = logits.cpu().double().scatter(1, banned[:, ::2], -torch.inf)
    kth = exact.topk(kept).values[:, -1] if kept else None
    if kth is not None:
        exact[exact < kth[:, None]] = -torch.inf
    ends = (exact / temperatures[:, None]).softmax(1).cumsum(1)
    given = None if kth is None else kth.float().to(DEVICE)
    found = sample_ids(logits, banned.to(DEVICE), temperatures.to(DEVICE), given, uniforms.to(DEVICE)).cpu()
    ends = torch.cat([torch.zeros(rows, 1), ends], 1)
    before, after = (ends.gather(1, found[:, None] + more)[:, 0] for more in (0, 1))
    assert bool((after > before).all()), "an id that cannot be chosen"
    assert bool(((before <= uniforms + 1e-6) & (uniforms <= after + 1e-6)).all())
    logits[rows - 1, vocab - 1] = float("nan")
    assert sample_ids(logits, None, temperatures.to(DEVICE), None, uniforms.to(DEVICE))[-1] == -1
