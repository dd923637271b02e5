"""The rules equal transformers' processors, and the choice follows the probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from textmill.config import SampleConfig
from textmill.counters import uniform_at
from textmill.errors import TextmillError
from textmill.generation import sampling

N, T, V, END = 3, 12, 50, 4


def logits_of(seed: int, spread: float = 3.0) -> tuple[Any, Any]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(N, V, generator=dice) * spread, torch.randint(0, V, (N, T), generator=dice)


def same(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal as distributions: moving all scores by one number changes nothing."""
    torch.testing.assert_close(ours.log_softmax(1), wanted.log_softmax(1), atol=1e-5, rtol=1e-5)


seeds = st.integers(0, 2**31)


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.2, 5.0))
def test_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    logits, seen = logits_of(seed)
    torch.testing.assert_close(sampling.penalise(logits, seen, penalty), theirs.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits))


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.05, 10.0))
def test_temperature_is_that_of_transformers(seed: int, temperature: float) -> None:
    logits, seen = logits_of(seed)
    same(sampling.cool(logits, temperature), theirs.TemperatureLogitsWarper(temperature)(seen, logits))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, V + 5))
def test_top_k_is_that_of_transformers(seed: int, k: int) -> None:
    logits, seen = logits_of(seed)
    logits = logits.round()  # many ties
    torch.testing.assert_close(sampling.keep_top_k(logits, k), theirs.TopKLogitsWarper(k)(seen, logits))


@settings(max_examples=60, deadline=None)
@given(seeds, st.floats(0.01, 0.999), st.floats(0.1, 6.0))
def test_top_p_is_that_of_transformers(seed: int, p: float, spread: float) -> None:
    logits, seen = logits_of(seed, spread)
    sums = logits.sort(descending=True).values.softmax(1).cumsum(1)
    if (sums - p).abs().min() < 1e-5:
        return  # on the border the two may round otherwise
    torch.testing.assert_close(sampling.keep_top_p(logits, p), theirs.TopPLogitsWarper(p)(seen, logits))


@pytest.mark.parametrize("number", [0, 2, 3, 9])
def test_no_end_before_min_tokens_as_in_transformers(number: int) -> None:
    logits, seen = logits_of(1)
    wanted = theirs.MinNewTokensLengthLogitsProcessor(T - number, 3, END)(seen, logits)
    ours = sampling.shaped(logits, seen, number=number, end=END, sample=SampleConfig(min_tokens=3, temperature=0))
    torch.testing.assert_close(ours, wanted)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_all_rules_together_in_the_order_of_transformers(seed: int) -> None:
    logits, seen = logits_of(seed)
    rules = theirs.LogitsProcessorList([
        theirs.RepetitionPenaltyLogitsProcessor(1.3), theirs.MinNewTokensLengthLogitsProcessor(T, 2, END),
        theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.83),
    ])  # fmt: skip
    sample = SampleConfig(repetition_penalty=1.3, min_tokens=2, temperature=0.7, top_k=20, top_p=0.83)
    same(sampling.shaped(logits, seen, number=1, end=END, sample=sample), rules(seen, logits))


def test_top_p_keeps_one_token_at_least() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sampling.keep_top_p(logits, 1e-9).isfinite().tolist() == [[False, True, False]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_temperature_near_zero_is_the_greedy_choice(temperature: float) -> None:
    logits, seen = logits_of(5)
    sample = SampleConfig(temperature=temperature)
    ids = sampling.next_ids(logits, seen, seeds=[1, 2, 3], number=0, end=END, sample=sample)
    assert ids == logits.argmax(1).tolist()


def test_choices_follow_the_probabilities() -> None:
    """Pearson's chi-square over 20,000 draws stays below its 99.9% point."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf"), 0.5, 3.0]])
    draws = 20_000
    chosen = sampling.choose(logits.expand(draws, -1), [uniform_at(99, number) for number in range(draws)])
    counts = torch.bincount(torch.tensor(chosen), minlength=7).double()
    wanted = logits[0].double().softmax(0) * draws
    assert counts[4] == 0
    possible = wanted > 0
    chi_square = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert chi_square < 20.52  # five degrees of freedom


def test_the_ends_of_the_line_are_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    assert sampling.choose(logits, [0.0]) == [1]
    assert sampling.choose(logits, [1 - 2**-53]) == [3]


def test_a_row_is_chosen_as_if_alone() -> None:
    logits, seen = logits_of(8)
    sample = SampleConfig(top_p=0.9, repetition_penalty=1.2)
    together = sampling.next_ids(logits, seen, seeds=[5, 6, 7], number=3, end=END, sample=sample)
    alone = [sampling.next_ids(logits[[row]], seen[[row]], seeds=[5 + row], number=3, end=END, sample=sample)[0] for row in range(N)]
    assert together == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(bad: float) -> None:
    logits, seen = logits_of(2)
    logits[1, 3] = bad
    with pytest.raises(TextmillError, match="not finite"):
        sampling.next_ids(logits, seen, seeds=[1, 2, 3], number=0, end=END, sample=SampleConfig())
