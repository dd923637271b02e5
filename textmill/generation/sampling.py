"""From scores to the next token: each rule a pure function on the rows that ask for it. Shapes in names: N texts, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from textmill.config import SampleConfig
from textmill.counters import GOLDEN, mix
from textmill.generation.gpu_sampling import COLDEST, NEVER, Draw, draw_of
from textmill.kernels.transfer_torch import on_device

try:
    from textmill.kernels import sampling_triton as fused
except ImportError:  # no kernel can be built here
    fused = None  # type: ignore[assignment]

AHEAD = 16
"""Steps whose random numbers are made at once."""


@dataclass
class State:
    """What sampling must know of one text."""

    sample: SampleConfig
    ends: tuple[int, ...]
    """Tokens that end it."""
    bias: tuple[tuple[int, float], ...] = ()
    number: int = 0
    """New tokens asked for so far."""
    seen_V: Tensor | None = None
    """Whether each token is in the text, kept where the repetition penalty asks."""
    said_V: Tensor | None = None
    """How often each token is in the new text, kept where the other penalties ask."""

    def add(self, id_: int) -> None:
        """One more new token, for the penalties."""
        if self.seen_V is not None:
            self.seen_V[id_] = True
        if self.said_V is not None:
            self.said_V[id_] += 1


def new_state(
    sample: SampleConfig,
    ids: Sequence[int],
    *,
    ends: tuple[int, ...],
    bias: tuple[tuple[int, float], ...],
    vocab: int,
    device: torch.device,
) -> State:
    """The state of a text of which only the prompt is there."""
    seen_V = said_V = None
    if sample.repetition_penalty != 1:
        seen_V = torch.zeros(vocab, dtype=torch.bool, device=device)
        seen_V[on_device([id_ for id_ in ids if id_ < vocab], device, torch.long)] = True
    if sample.presence_penalty or sample.frequency_penalty:
        said_V = torch.zeros(vocab, device=device)
    return State(sample, ends, tuple(dict(bias).items()), 0, seen_V, said_V)


def penalise(logits_NV: Tensor, seen_NV: Tensor, penalty_N1: Tensor) -> Tensor:
    """Make tokens already there less likely: positive scores are divided by the penalty, negative ones multiplied."""
    return torch.where(seen_NV, torch.where(logits_NV < 0, logits_NV * penalty_N1, logits_NV / penalty_N1), logits_NV)


def cool(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """Sharpen below 1, flatten above; the likeliest token is moved to 0 first, so that no temperature overflows."""
    return (logits_NV - logits_NV.amax(1, keepdim=True)) / temperature_N1.clamp(min=COLDEST)


def keep_top_k(logits_NV: Tensor, k_N1: Tensor, most: int) -> Tensor:
    """Only the k likeliest tokens, and those as likely as the last of them; `most` is the largest k."""
    k_N1 = k_N1.long().clamp(max=logits_NV.shape[1])
    least_N1 = logits_NV.topk(min(most, logits_NV.shape[1]), dim=1).values.gather(1, k_N1 - 1)
    return logits_NV.masked_fill(logits_NV < least_N1, NEVER)


def keep_top_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Only the fewest likeliest tokens whose probability together reaches p; one at least."""
    ordered_NV, order_NV = logits_NV.sort(dim=1, descending=True, stable=True)
    chances_NV = ordered_NV.softmax(1)
    reached_NV = chances_NV.cumsum(1) - chances_NV >= p_N1
    reached_NV[:, 0] = False
    return logits_NV.masked_fill(reached_NV.scatter(1, order_NV, reached_NV), NEVER)


def keep_min_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Only tokens at least p times as likely as the likeliest."""
    chances_NV = logits_NV.softmax(1)
    return logits_NV.masked_fill(chances_NV < p_N1 * chances_NV.amax(1, keepdim=True), NEVER)


def keep_typical(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Only the tokens nearest to the expected surprise whose probability together reaches p."""
    logs_NV = logits_NV.log_softmax(1)
    chances_NV = logs_NV.exp()
    expected_N1 = -(logs_NV * chances_NV).nansum(1, keepdim=True)
    ordered_NV, order_NV = (-logs_NV - expected_N1).abs().sort(dim=1, stable=True)
    last_N1 = (chances_NV.gather(1, order_NV).cumsum(1) < p_N1).sum(1, keepdim=True).clamp(max=logits_NV.shape[1] - 1)
    far_NV = ordered_NV > ordered_NV.gather(1, last_N1)
    return logits_NV.masked_fill(far_NV.scatter(1, order_NV, far_NV), NEVER)


Rule = Callable[[Tensor, Tensor], Tensor]
WARPERS: list[tuple[str, float, Callable[..., Tensor]]] = [
    ("temperature", 1.0, cool), ("top_k", 0, keep_top_k), ("top_p", 1.0, keep_top_p), ("min_p", 0.0, keep_min_p),
    ("typical_p", 1.0, keep_typical),
]  # fmt: skip
"""Key, the value that changes nothing, and the rule; in transformers' order."""


Early = dict[tuple[int, ...], tuple[Tensor, Tensor]]
"""Rows that may not end yet, to where the ends stand in the scores."""


class Uniforms:
    """Numbers from 0 to below 1, each made of a row's seed and of how many new tokens it has; some steps are made ahead."""

    def __init__(self, states: Sequence[State], device: torch.device) -> None:
        self.seeds_N = mix(np.array([state.sample.seed for state in states], np.uint64) + GOLDEN)
        self.numbers_N = np.array([state.number for state in states], np.uint64)
        self.device, self.start, self.made_SN = device, 0, torch.empty(0)

    def of(self, number: int) -> Tensor:
        """The numbers of the rows when the first of them has so many new tokens; all rows count on together."""
        step = number - int(self.numbers_N[0])
        if not 0 <= step - self.start < len(self.made_SN):
            steps_S1 = np.arange(step, step + AHEAD, dtype=np.uint64)[:, None]
            keys_SN = mix(self.seeds_N * GOLDEN + (self.numbers_N + steps_S1) + GOLDEN)
            made_SN = torch.from_numpy((keys_SN >> np.uint64(11)).astype(np.float64) / (1 << 53))
            self.start, self.made_SN = (
                step,
                made_SN.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made_SN,
            )
        return self.made_SN[step - self.start]


@dataclass(frozen=True)
class Rules:
    """The rows that ask for each rule, and with what; made anew when texts join or leave."""

    warpers: tuple[tuple[Rule, Tensor | None, Tensor], ...]
    """A rule, the rows that ask for it (None: all) and their values."""
    drawing: bool
    """Whether any token is drawn."""
    drawn_N: Tensor | None
    """The rows whose token is drawn, where others take the likeliest."""
    draw: Draw | None
    """What is all that the rows ask for, where all are drawn and ask for no more."""
    uniforms: Uniforms
    marked: tuple[int, ...]
    """Rows with a bias or a penalty."""
    young: tuple[int, ...]
    """Rows that may not end yet."""
    early: Early = field(default_factory=dict)
    barred: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    """Rows that may not end yet, to the ids that are barred to each row, -1 for none."""


def rules_of(states: Sequence[State], device: torch.device) -> Rules:
    """The rules that rows ask for."""
    drawing = [row for row, state in enumerate(states) if state.sample.temperature > 0]
    warpers = []
    for key, neutral, rule in WARPERS:
        rows = [row for row in drawing if getattr(states[row].sample, key) != neutral]
        if rows:
            values = [getattr(states[row].sample, key) for row in rows]
            known = partial(rule, most=max(values)) if key == "top_k" else rule
            which = None if len(rows) == len(states) else on_device(rows, device)
            warpers.append((known, which, on_device(values, device, torch.float32).unsqueeze(1)))
    drawn_N = None
    if drawing and len(drawing) < len(states):
        drawn_N = on_device([state.sample.temperature > 0 for state in states], device)
    asked = {key for key, neutral, _ in WARPERS if any(getattr(states[row].sample, key) != neutral for row in drawing)}
    plain = drawing and drawn_N is None and asked <= {"temperature", "top_k"}
    draw = draw_of([state.sample for state in states], device) if plain else None
    marked = tuple(
        row for row, state in enumerate(states) if state.bias or state.seen_V is not None or state.said_V is not None
    )
    young = tuple(row for row, state in enumerate(states) if state.number < state.sample.min_tokens)
    return Rules(tuple(warpers), bool(drawing), drawn_N, draw, Uniforms(states, device), marked, young)


def young_of(states: Sequence[State], rules: Rules) -> tuple[int, ...]:
    """The rows that may not end with this token."""
    return tuple(row for row in rules.young if states[row].number < states[row].sample.min_tokens)


def shaped(logits_NV: Tensor, states: Sequence[State], rules: Rules) -> Tensor:
    """The scores after every rule: bias, penalties, min_tokens, then those of chance; a row is changed by its own rules only."""
    young = young_of(states, rules)
    changed_NV = logits_NV.float()
    if changed_NV is logits_NV and (rules.marked or young or any(rows_N is not None for _, rows_N, _ in rules.warpers)):
        changed_NV = logits_NV.clone()
    penalise_rows(changed_NV, states, rules.marked)
    forbid_ends(changed_NV, states, young, rules.early)
    for rule, rows_N, values_N1 in rules.warpers:
        if rows_N is None:
            changed_NV = rule(changed_NV, values_N1)
        else:
            changed_NV[rows_N] = rule(changed_NV[rows_N], values_N1)
    return changed_NV


def penalise_rows(logits_NV: Tensor, states: Sequence[State], rows: Sequence[int]) -> None:
    """Bias and penalties of these rows, in place."""
    for row in rows:
        state, logits_V = states[row], logits_NV[row]
        if state.bias:
            ids, values = zip(*state.bias, strict=True)
            logits_V[on_device(ids, logits_V.device)] += on_device(values, logits_V.device, torch.float32)
        if state.seen_V is not None:
            logits_V.copy_(
                penalise(logits_V, state.seen_V, torch.tensor(state.sample.repetition_penalty, device=logits_V.device))
            )
        if state.said_V is not None:
            logits_V -= (
                state.said_V * state.sample.frequency_penalty + (state.said_V > 0) * state.sample.presence_penalty
            )


def forbid_ends(logits_NV: Tensor, states: Sequence[State], rows: tuple[int, ...], early: Early) -> None:
    """No end of text for these rows, in place."""
    if rows and rows not in early:
        places_N2 = on_device([(row, id_) for row in rows for id_ in states[row].ends], logits_NV.device)
        early[rows] = places_N2[:, 0], places_N2[:, 1]
    if rows:
        logits_NV[early[rows]] = NEVER


def choose(logits_NV: Tensor, uniforms: Tensor) -> Tensor:
    """The token that each number from 0 to below 1 points at when the probabilities are laid end to end."""
    # In double precision everywhere: single precision would move the borders between tokens from one device to another.
    ends_NV = logits_NV.double().softmax(1).cumsum(1)
    whole_N1 = ends_NV[:, -1:]
    points_N1 = (uniforms.unsqueeze(1) * whole_N1).minimum(torch.nextafter(whole_N1, torch.zeros_like(whole_N1)))
    return torch.searchsorted(ends_NV, points_N1, right=True).squeeze(1)


def next_ids(logits_NV: Tensor, states: Sequence[State], rules: Rules) -> Tensor:
    """The next token of each text: a function of its scores, its seed and how many new tokens it has; -1: its scores are no numbers."""
    if fused is not None and logits_NV.is_cuda and not rules.marked and (rules.draw or not rules.drawing):
        return _next_ids_fused(logits_NV, states, rules)
    low_N, high_N = logits_NV.aminmax(dim=1)
    whole_N = high_N.float() - low_N.float() < math.inf
    logits_NV = shaped(logits_NV, states, rules)
    if not rules.drawing:
        ids_N = logits_NV.argmax(1)
    else:
        ids_N = choose(logits_NV, rules.uniforms.of(states[0].number))
        if rules.drawn_N is not None:
            ids_N = torch.where(rules.drawn_N, ids_N, logits_NV.argmax(1))
    return torch.where(whole_N, ids_N, -1)


def _next_ids_fused(logits_NV: Tensor, states: Sequence[State], rules: Rules) -> Tensor:
    barred_NK = _barred(states, rules, logits_NV.device)
    if rules.draw is None:
        ids_N: Tensor = fused.likeliest(logits_NV, barred_NK)
    else:
        uniforms_N, kth_N = rules.uniforms.of(states[0].number), rules.draw.kth(logits_NV, barred_NK)
        ids_N = fused.drawn(logits_NV, barred_NK, rules.draw.temperatures_N, kth_N, uniforms_N)
    return ids_N


def _barred(states: Sequence[State], rules: Rules, device: torch.device) -> Tensor | None:
    """The ends of those rows that may not end yet; None, if all may."""
    young = young_of(states, rules)
    if young not in rules.barred:
        most = max((len(states[row].ends) for row in young), default=0)
        kept = [states[row].ends if row in young else () for row in range(len(states))]
        ids = [[*ends, *[-1] * (most - len(ends))] for ends in kept]
        rules.barred[young] = on_device(ids, device) if young else None
    return rules.barred[young]
