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


LIMITS: dict[str, dict[str, float]] = {
    "all": {},
    "top_k": {"k": 7},
    "top_p": {"p": 0.6},
    "min_p": {"m": 0.2},
    "top_k, top_p and min_p": {"k": 9, "p": 0.9, "m": 0.03},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_a_sampled_id_is_where_the_cumulative_distribution_reaches_the_number(
    rows: int, vocab: int, limits: str, dtype: torch.dtype
) -> None:
    """Against sorted probabilities in fp64. The last row has no limits, the one before is greedy."""
    from textmill.kernels.sampling_triton import RowSettings, sample_ids

    logits, dice = logits_of(rows, vocab, dtype), torch.Generator().manual_seed(3)
    uniforms = torch.rand(rows, generator=dice, dtype=torch.float64)
    uniforms[0] = 0.0
    temperatures = 0.5 + torch.rand(rows, generator=dice)
    temperatures[::2] = 1.0
    banned = torch.tensor([[vocab // 2, -1, 3]]).repeat(rows, 1)
    exact = logits.cpu().double().scatter(1, banned[:, ::2], -torch.inf)
    values = {"k": 0, "p": 1.0, "m": 0.0, **LIMITS[limits]}
    k, p, m = (torch.full((rows,), value) for value in values.values())
    if rows > 1:
        k[-1], p[-1], m[-1] = 0, 1.0, 0.0
        temperatures[-2] = 0.0
    for row in range(rows):
        if k[row]:
            exact[row, exact[row] < exact[row].topk(int(k[row])).values[-1]] = -torch.inf
        chances, order = (exact[row] / temperatures[row].clamp(min=1e-30)).softmax(0).sort(descending=True)
        last = order[int((chances.cumsum(0) - chances < p[row].double()).sum()) - 1]
        if p[row] < 1:
            exact[row, exact[row] < exact[row, last]] = -torch.inf
        if m[row]:
            exact[row, ((exact[row] - exact[row].max()) / temperatures[row]).exp() < m[row]] = -torch.inf
    settings = RowSettings(
        temperatures.to(DEVICE),
        k.int().to(DEVICE) if "k" in LIMITS[limits] else None,
        p.to(DEVICE) if "p" in LIMITS[limits] else None,
        m.double().log().to(DEVICE),
    )
    found = sample_ids(logits, banned.to(DEVICE), settings, uniforms.to(DEVICE)).cpu()
    if rows > 1:
        assert found[-2] == exact[-2].argmax()
        temperatures[-2] = 1e-30
    ends = (exact / temperatures[:, None]).softmax(1).cumsum(1)
    ends = torch.cat([torch.zeros(rows, 1), ends], 1)
    before, after = (ends.gather(1, found[:, None] + more)[:, 0] for more in (0, 1))
    assert bool((after > before).all()), "an id that cannot be chosen"
    assert bool(((before <= uniforms + 1e-6) & (uniforms <= after + 1e-6))[temperatures > 1e-29].all())
    logits[rows - 1, vocab - 1] = float("nan")
    assert sample_ids(logits, None, settings, uniforms.to(DEVICE))[-1] == -1
