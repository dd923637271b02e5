"""Sampling rules equal transformers' logits processors, and choices follow the probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from textmill.config import SampleConfig
from textmill.counters import uniform_from
from textmill.generation import sampling

N, T, V, END = 3, 12, 50, 4


def logits_of(seed: int, spread: float = 3.0) -> tuple[Any, Any]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(N, V, generator=dice) * spread, torch.randint(0, V, (N, T), generator=dice)


def seen_of(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(seen), V, dtype=torch.bool).scatter(1, seen, True)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def states_of(
    seen: torch.Tensor, *samples: SampleConfig, number: int = 0, bias: tuple[tuple[int, float], ...] = ()
) -> list[sampling.SamplingState]:
    """Return a state per row of ids, the last `number` of them new."""
    states = []
    for row, sample in zip(seen.tolist(), samples * (len(seen) // len(samples)), strict=True):
        prompt, new = row[: len(row) - number], row[len(row) - number :]
        state = sampling.new_state(sample, prompt, ends=(END,), bias=bias, vocab=V, device=torch.device("cpu"))
        for id_ in new:
            state.add(id_)
            state.new_tokens += 1
        states.append(state)
    return states


def apply_rules(logits: torch.Tensor, states: list[sampling.SamplingState]) -> torch.Tensor:
    return sampling.apply_rules(logits, states, sampling.collect_rules(states, logits.device))


def next_ids(logits: torch.Tensor, states: list[sampling.SamplingState]) -> list[int | None]:
    found = sampling.choose_next_ids(logits, states, sampling.collect_rules(states, logits.device)).tolist()
    return [None if id_ < 0 else id_ for id_ in found]


def assert_same(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare as distributions: adding a constant to all logits changes nothing."""
    torch.testing.assert_close(ours.log_softmax(1), wanted.log_softmax(1), atol=1e-5, rtol=1e-5)


seeds = st.integers(0, 2**31)


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.2, 5.0))
def test_repetition_penalty_equals_transformers(seed: int, penalty: float) -> None:
    logits, seen = logits_of(seed)
    torch.testing.assert_close(
        sampling.apply_repetition_penalty(logits, seen_of(seen), column(penalty)),
        theirs.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits),
    )


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.05, 10.0))
def test_temperature_equals_transformers(seed: int, temperature: float) -> None:
    logits, seen = logits_of(seed)
    assert_same(
        sampling.apply_temperature(logits, column(temperature)),
        theirs.TemperatureLogitsWarper(temperature)(seen, logits),
    )


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, V + 5))
def test_top_k_equals_transformers(seed: int, k: int) -> None:
    logits, seen = logits_of(seed)
    logits = logits.round()  # many ties
    torch.testing.assert_close(
        sampling.keep_top_k(logits, column(*[k] * N), k), theirs.TopKLogitsWarper(k)(seen, logits)
    )


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0.01, 0.999), st.floats(0.1, 6.0))
def test_top_p_equals_transformers(seed: int, p: float, spread: float) -> None:
    logits, seen = logits_of(seed, spread)
    sums = logits.sort(descending=True).values.softmax(1).cumsum(1)
    if (sums - p).abs().min() < 1e-5:
        return  # on the border the two may round otherwise
    torch.testing.assert_close(sampling.keep_top_p(logits, column(p)), theirs.TopPLogitsWarper(p)(seen, logits))


@pytest.mark.parametrize("number", [0, 2, 3, 9])
def test_min_tokens_equals_transformers(number: int) -> None:
    logits, seen = logits_of(1)
    wanted = theirs.MinNewTokensLengthLogitsProcessor(T - number, 3, END)(seen, logits)
    ours = apply_rules(logits, states_of(seen, SampleConfig(min_tokens=3, temperature=0), number=number))
    torch.testing.assert_close(ours, wanted)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_rules_apply_in_the_order_of_transformers(seed: int) -> None:
    logits, seen = logits_of(seed)
    rules = theirs.LogitsProcessorList(
        [
            theirs.SequenceBiasLogitsProcessor([[[7], 1.5], [[9], -2.0]]),
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.MinNewTokensLengthLogitsProcessor(T - 1, 2, END),
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.83),
            theirs.MinPLogitsWarper(0.02),
        ]
    )
    sample = SampleConfig(repetition_penalty=1.3, min_tokens=2, temperature=0.7, top_k=20, top_p=0.83, min_p=0.02)
    assert_same(apply_rules(logits, states_of(seen, sample, number=1, bias=((7, 1.5), (9, -2.0)))), rules(seen, logits))


def test_top_p_keeps_at_least_one_token() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sampling.keep_top_p(logits, column(1e-9)).isfinite().tolist() == [[False, True, False]]


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 400), st.floats(0.01, 0.999), st.sampled_from([0.3, 3.0]), st.booleans())
def test_numpy_and_torch_sort_alike_bit_for_bit(seed: int, k: int, p: float, spread: float, ties: bool) -> None:
    logits = torch.randn(N, 400, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.mul(3).round() if ties else logits
    descending = logits.sort(dim=1, descending=True).values
    probabilities = descending.softmax(1)
    kept = (probabilities.cumsum(1) - probabilities < p).sum(1, keepdim=True)
    for ours, count in (
        (sampling.keep_top_k(logits, column(*[k] * N), k), k),
        (sampling.keep_top_p(logits, column(p)), kept),
    ):
        least = descending.gather(1, torch.as_tensor(count).expand(N, 1) - 1)
        assert torch.equal(ours, logits.masked_fill(logits < least, -torch.inf))
    assert torch.equal(sampling.find_maxima(logits), logits.argmax(1))


@pytest.mark.parametrize("top_p", [1e-60, 1e-9])
def test_top_p_near_zero_is_greedy(top_p: float) -> None:
    logits, seen = logits_of(5)
    assert next_ids(logits, states_of(seen, SampleConfig(top_p=top_p))) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits, seen = logits_of(5)
    sample = SampleConfig(temperature=temperature)
    ids = next_ids(logits, states_of(seen, sample))
    assert ids == logits.argmax(1).tolist()


def test_choices_follow_the_probabilities() -> None:
    """Pearson's chi-square of 20,000 samples stays below its 99.9% quantile."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf"), 0.5, 3.0]])
    draws = 20_000
    chosen = sampling.sample_ids(
        logits.expand(draws, -1),
        torch.tensor([uniform_from(99, number) for number in range(draws)], dtype=torch.double),
    )
    counts = torch.bincount(chosen, minlength=7).double()
    wanted = logits[0].double().softmax(0) * draws
    assert counts[4] == 0
    possible = wanted > 0
    chi_square = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert chi_square < 20.52  # five degrees of freedom


def test_random_numbers_near_0_and_1_give_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    assert sampling.sample_ids(logits, torch.zeros(1, dtype=torch.double)).tolist() == [1]
    assert sampling.sample_ids(logits, torch.tensor([1 - 2**-53], dtype=torch.double)).tolist() == [3]


MANY = [
    SampleConfig(temperature=0),
    SampleConfig(seed=5, top_p=0.9, repetition_penalty=1.2),
    SampleConfig(seed=6, top_k=5, min_p=0.1),
    SampleConfig(seed=7, temperature=2.0),
    SampleConfig(seed=8, presence_penalty=1.0, frequency_penalty=0.5, top_k=7),
    SampleConfig(temperature=0, repetition_penalty=1.5, min_tokens=100),
]


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_choice_in_a_row_does_not_depend_on_other_rows(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    logits, seen = torch.randn(len(MANY), V, generator=dice) * 3, torch.randint(0, V, (len(MANY), T), generator=dice)
    states = states_of(seen, *MANY, number=3)
    together = next_ids(logits, states)
    assert together == [next_ids(logits[[row]], [state])[0] for row, state in enumerate(states)]


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.01, 0.99))
def test_min_p_equals_transformers(seed: int, p: float) -> None:
    logits, seen = logits_of(seed)
    torch.testing.assert_close(sampling.keep_min_p(logits, column(p)), theirs.MinPLogitsWarper(p)(seen, logits))


def test_presence_and_frequency_penalties_count_new_text_only() -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    logits, _ = logits_of(3)
    seen = torch.tensor([[1, 2, 3, 2, 2, 5]] * N)
    ours = apply_rules(
        logits, states_of(seen, SampleConfig(temperature=0, presence_penalty=0.7, frequency_penalty=0.25), number=3)
    )
    wanted = logits.clone()
    wanted[:, 2] -= 2 * 0.25 + 0.7
    wanted[:, 5] -= 0.25 + 0.7
    torch.testing.assert_close(ours, wanted)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 10**6)), min_size=1, max_size=5))
def test_random_numbers_of_a_batch_equal_those_of_its_rows(pairs: list[tuple[int, int]]) -> None:
    states = [sampling.SamplingState(SampleConfig(seed=seed), (END,), new_tokens=number) for seed, number in pairs]
    uniforms = sampling.UniformNumbers(states, torch.device("cpu"))
    for step in (0, 1, 15, 16, 40, 3):
        ours = uniforms.at(states[0].new_tokens + step)
        np.testing.assert_array_equal(ours.numpy(), [uniform_from(seed, number + step) for seed, number in pairs])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_no_token_and_do_not_affect_other_rows(bad: float, temperature: float) -> None:
    logits, seen = logits_of(2)
    states = states_of(seen, SampleConfig(temperature=temperature))
    full = next_ids(logits, states)
    logits[1, 3] = bad
    assert next_ids(logits, states) == [full[0], None, full[2]]


CAPTURED = [
    *([SampleConfig(temperature=0), SampleConfig(temperature=0, min_tokens=9)] * 2),
    *([SampleConfig(seed=5, top_p=0.8), SampleConfig(seed=6, top_k=5, min_p=0.1), SampleConfig(temperature=0)] * 2),
    *([SampleConfig(seed=7, temperature=2.0, min_tokens=9)] * 3),
]


def test_captured_sampling_chooses_what_the_kernels_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that grow, shrink and change their rules, with a graph that runs the work again. The kernels are the
    formulas of the CPU, row by row; logits are at one address for each padded size."""
    memory = torch.zeros(8, V)
    graphs = []

    class Graph:
        def __init__(self, work: Any) -> None:
            graphs.append(work)
            self.replay = work

    def kernels(logits: Any, banned: Any, settings: Any, uniforms: Any) -> Any:
        changed = logits.clone()
        for row in range(len(logits)):
            for id_ in [] if banned is None else banned[row].tolist():
                if id_ >= 0:
                    changed[row, id_] = -torch.inf
        if settings is None:
            return changed.argmax(1)
        chosen = []
        for row, temperature in enumerate(settings.temperatures_N.tolist()):
            one = changed[row][None]
            if temperature == 0:
                chosen.append(int(one.argmax()))
                continue
            one = sampling.apply_temperature(one, column(temperature))
            if settings.top_k_N is not None and settings.top_k_N[row]:
                one = sampling.keep_top_k(one, settings.top_k_N[row][None, None], int(settings.top_k_N[row]))
            if settings.top_p_N is not None and settings.top_p_N[row] < 1:
                one = sampling.keep_top_p(one, settings.top_p_N[row][None, None])
            one = one.masked_fill(one < settings.log_min_p_N[row], -torch.inf)
            chosen.append(int(sampling.sample_ids(one, uniforms[row : row + 1])))
        return torch.tensor(chosen)

    monkeypatch.setattr(sampling, "_run_kernels", kernels)
    captured = sampling.CapturedSampling(lambda: lambda work, undo: (Graph(work), work()), 6)
    dice = torch.Generator().manual_seed(4)
    for begin, end in ((0, 3), (0, 4), (3, 8), (4, 10), (5, 6), (4, 7), (8, 13), (0, 3)):
        samples = CAPTURED[begin:end]
        states = states_of(torch.randint(0, V, (len(samples), T), generator=dice), *samples)
        rules = sampling.collect_rules(states, memory.device)
        for _ in range(3):
            memory[:] = torch.randn(memory.shape, generator=dice) * 3
            logits = memory[: len(samples)]
            wanted = sampling.choose_next_ids(logits, states, rules)
            monkeypatch.setattr(sampling, "can_run_kernels", lambda _: True)
            assert torch.equal(sampling.choose_next_ids(logits, states, rules, captured), wanted)
            monkeypatch.undo()
            monkeypatch.setattr(sampling, "_run_kernels", kernels)
            for state in states:
                state.new_tokens += 1
    assert len(graphs) < 8, "equal sizes and rules share a graph"
