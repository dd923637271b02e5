"""Chooses the next token from the logits, for the texts of a batch, which may have different settings.

`choose_next_ids` is one step. It applies, in this order: logit bias, repetition, presence and frequency penalty, the
ban on ending before min_tokens, and the warpers. Then it samples. `collect_rules` groups the rows by the rules that
they use, and is called again only when a text joins or leaves the batch.

The warpers come in the order of transformers; each is a pure function on the rows that use it. What they keep of four
tokens with the probabilities 0.5, 0.3, 0.15 and 0.05:

    top_k=3          0.5  0.3  0.15       the three most likely
    top_p=0.7        0.5  0.3             0.5 is less than 0.7, 0.5 + 0.3 is not
    min_p=0.2        0.5  0.3  0.15       at least 0.2 x 0.5

Shapes in names: N texts (rows), V vocabulary, S steps, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.config import SampleConfig
from textmill.counters import GOLDEN_RATIO, mix, to_uniform
from textmill.devices import copy_to_device
from textmill.generation.constraints import Constraint, allowed_tokens
from textmill.kernels import sampling_triton
from textmill.kernels.sampling_triton import RowSettings
from textmill.kernels.triton_support import can_run_kernels

MASKED = -math.inf
"""The logit of a token that cannot be chosen."""
FORBIDDEN = -1e30
"""The logit of a token that a constraint forbids; finite, since kernels report logits that are not."""
SMALLEST = 1e-30
"""A smaller temperature, top_p or min_p underflows in single precision. Its effect is the same long before."""
STEPS_AHEAD = 16
"""Steps whose random numbers are computed at once."""


@dataclass
class SamplingState:
    """What sampling must know about one text."""

    sample: SampleConfig
    ends: tuple[int, ...]
    """Tokens that end the text."""
    bias: tuple[tuple[int, float], ...] = ()
    new_tokens: int = 0
    """New tokens chosen so far, one more than the host has received if it runs ahead."""
    seen_V: Tensor | None = None
    """Whether each token is in the prompt or the new text; kept if there is a repetition penalty."""
    counts_V: Tensor | None = None
    """How often each token is in the new text; kept if there is a presence or frequency penalty."""
    constraint: Constraint | None = None
    """What the text must follow."""

    def add(self, id_: int) -> None:
        """Count one more new token for the penalties."""
        if self.seen_V is not None:
            self.seen_V[id_] = True
        if self.counts_V is not None:
            self.counts_V[id_] += 1
        if self.constraint is not None:
            self.constraint.add(id_)

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits are changed by more than the ban on ending and the warpers."""
        return bool(self.bias) or any(one is not None for one in (self.seen_V, self.counts_V, self.constraint))

    @property
    def needs_last_token(self) -> bool:
        """Whether the next token can only be chosen when the host knows the last one."""
        return any(one is not None for one in (self.seen_V, self.counts_V, self.constraint))


def new_state(
    sample: SampleConfig,
    ids: Sequence[int],
    *,
    ends: tuple[int, ...],
    bias: tuple[tuple[int, float], ...],
    vocab: int,
    device: torch.device,
) -> SamplingState:
    """Return the state of a text that has only its prompt."""
    seen_V = counts_V = None
    if sample.repetition_penalty != 1:
        seen_V = torch.zeros(vocab, dtype=torch.bool, device=device)
        seen_V[copy_to_device([id_ for id_ in ids if id_ < vocab], device, torch.long)] = True
    if sample.presence_penalty or sample.frequency_penalty:
        counts_V = torch.zeros(vocab, device=device)
    return SamplingState(sample, ends, tuple(dict(bias).items()), 0, seen_V, counts_V)


EndPositions = dict[tuple[int, ...], tuple[Tensor, Tensor]]
"""For a set of rows that may not end yet: row and column indices of their end tokens in the logits."""


class UniformNumbers:
    """Random numbers in [0, 1): each is computed from a row's seed and its number of new tokens, some steps ahead."""

    def __init__(self, states: Sequence[SamplingState], device: torch.device) -> None:
        self.seeds_N = mix(np.array([state.sample.seed for state in states], np.uint64) + GOLDEN_RATIO)
        self.counts_N = np.array([state.new_tokens for state in states], np.uint64)
        self.device = device
        self.first_step = 0
        self.numbers_SN = torch.empty(0)

    def at(self, new_tokens: int) -> Tensor:
        """Return all rows' numbers for the step at which the first row has `new_tokens` new tokens."""
        step = new_tokens - int(self.counts_N[0])
        if not 0 <= step - self.first_step < len(self.numbers_SN):
            steps_S1 = np.arange(step, step + STEPS_AHEAD, dtype=np.uint64)[:, None]
            keys_SN = mix(self.seeds_N * GOLDEN_RATIO + (self.counts_N + steps_S1) + GOLDEN_RATIO)
            numbers_SN = torch.from_numpy(to_uniform(keys_SN))
            if self.device.type == "cuda":
                numbers_SN = numbers_SN.pin_memory().to(self.device, non_blocking=True)
            self.first_step = step
            self.numbers_SN = numbers_SN
        return self.numbers_SN[step - self.first_step]


class RowsWarper(NamedTuple):
    """A sampling rule, and the rows that use it."""

    apply: Warper
    rows_N: Tensor | None
    """None: all rows."""
    values_N1: Tensor
    """The setting's value in each of the rows."""


@dataclass(frozen=True)
class SamplingRules:
    """Which rows use which rule, with which values; collected again when a text joins or leaves the batch."""

    warpers: tuple[RowsWarper, ...]
    sampled_N: Tensor | None
    """Which rows have a temperature above 0; None if all or none have. The others take the most likely token."""
    settings: RowSettings | None
    """What the kernels need; None if no row is sampled."""
    uniforms: UniformNumbers
    adjusted: tuple[int, ...]
    """Rows with a logit bias, a penalty or a constraint."""
    below_min_tokens: tuple[int, ...]
    """Rows that may not end yet."""
    end_positions: EndPositions = field(default_factory=dict)
    banned_ids: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    """For a set of rows that may not end yet: the banned ids of every row, padded with -1."""


def collect_rules(states: Sequence[SamplingState], device: torch.device) -> SamplingRules:
    """Collect the rules of all rows.

    Three texts, the first with temperature 0, the second with temperature 0.8, the third also with top_k 50: the warper
    of the temperature has rows 1 and 2 and the values 0.8 and 0.8, that of top_k has row 2 and the value 50. Row 0 is
    not sampled.
    """
    is_sampled = [state.sample.temperature > 0 for state in states]
    warpers = _collect_warpers(states, is_sampled, device)
    sampled_N = copy_to_device(is_sampled, device) if any(is_sampled) and not all(is_sampled) else None
    settings = new_row_settings([state.sample for state in states], device) if any(is_sampled) else None
    adjusted = tuple(row for row, state in enumerate(states) if state.is_adjusted)
    below = tuple(row for row, state in enumerate(states) if state.new_tokens < state.sample.min_tokens)
    uniforms = UniformNumbers(states, device)
    return SamplingRules(warpers, sampled_N, settings, uniforms, adjusted, below)


def _collect_warpers(
    states: Sequence[SamplingState], is_sampled: Sequence[bool], device: torch.device
) -> tuple[RowsWarper, ...]:
    found = []
    for key, neutral, function in WARPERS:
        settings = [getattr(state.sample, key) for state in states]
        rows = [row for row, value in enumerate(settings) if is_sampled[row] and value != neutral]
        if rows:
            values = [settings[row] for row in rows]
            warper = partial(function, largest_k=max(values)) if key == "top_k" else function
            rows_N = None if len(rows) == len(states) else copy_to_device(rows, device)
            values_N1 = copy_to_device(values, device, torch.float32).clamp_(min=SMALLEST).unsqueeze(1)
            found.append(RowsWarper(warper, rows_N, values_N1))
    return tuple(found)


def find_rows_below_min_tokens(states: Sequence[SamplingState], rules: SamplingRules) -> tuple[int, ...]:
    """Return the rows that may not end with this token."""
    return tuple(row for row in rules.below_min_tokens if states[row].new_tokens < states[row].sample.min_tokens)


def apply_rules(logits_NV: Tensor, states: Sequence[SamplingState], rules: SamplingRules) -> Tensor:
    """Apply bias, penalties, min_tokens and the warpers; a row is changed by its own rules only."""
    below = find_rows_below_min_tokens(states, rules)
    changed_NV = logits_NV.float()
    in_place = rules.adjusted or below or any(warper.rows_N is not None for warper in rules.warpers)
    if changed_NV is logits_NV and in_place:
        changed_NV = logits_NV.clone()
    apply_bias_and_penalties(changed_NV, states, rules.adjusted)
    ban_end_tokens(changed_NV, states, below, rules.end_positions)
    for apply, rows_N, values_N1 in rules.warpers:
        if rows_N is None:
            changed_NV = apply(changed_NV, values_N1)
        else:
            changed_NV[rows_N] = apply(changed_NV[rows_N], values_N1)
    return changed_NV


def apply_bias_and_penalties(logits_NV: Tensor, states: Sequence[SamplingState], rows: Sequence[int]) -> None:
    """Apply the logit bias, the penalties and the constraints of these rows, in place."""
    for row in rows:
        state = states[row]
        logits_V = logits_NV[row]
        if state.bias:
            ids, values = zip(*state.bias, strict=True)
            logits_V[copy_to_device(ids, logits_V.device)] += copy_to_device(values, logits_V.device, torch.float32)
        if state.seen_V is not None:
            penalty = torch.tensor(state.sample.repetition_penalty, device=logits_V.device)
            logits_V.copy_(apply_repetition_penalty(logits_V, state.seen_V, penalty))
        if state.counts_V is not None:
            logits_V -= (
                state.counts_V * state.sample.frequency_penalty + (state.counts_V > 0) * state.sample.presence_penalty
            )
    constraints = {row: one for row in rows if (one := states[row].constraint) is not None}
    if constraints:
        forbid_tokens(logits_NV, list(constraints), allowed_tokens(list(constraints.values())))


def forbid_tokens(logits_NV: Tensor, rows: list[int], allowed_NB: NDArray[np.uint8]) -> None:
    """Mask the tokens of these rows whose bits are 0, in place."""
    vocab, device = logits_NV.shape[1], logits_NV.device
    if device.type == "cpu":
        bits_NV = torch.from_numpy(np.unpackbits(allowed_NB, axis=1, count=vocab, bitorder="little"))
    else:
        shifts_8 = torch.arange(8, dtype=torch.uint8, device=device)
        bits_NV = (copy_to_device(allowed_NB, device).unsqueeze(2) >> shifts_8 & 1).flatten(1)[:, :vocab]
    if len(rows) == len(logits_NV):
        logits_NV.masked_fill_(bits_NV == 0, FORBIDDEN)
    else:
        rows_N = copy_to_device(rows, device)
        logits_NV[rows_N] = logits_NV[rows_N].masked_fill(bits_NV == 0, FORBIDDEN)


def ban_end_tokens(
    logits_NV: Tensor, states: Sequence[SamplingState], rows: tuple[int, ...], end_positions: EndPositions
) -> None:
    """Mask the end tokens of these rows, in place."""
    if rows and rows not in end_positions:
        positions_N2 = copy_to_device([(row, id_) for row in rows for id_ in states[row].ends], logits_NV.device)
        end_positions[rows] = positions_N2[:, 0], positions_N2[:, 1]
    if rows:
        logits_NV[end_positions[rows]] = MASKED


def sample_ids(logits_NV: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverse CDF: return the token whose interval of the cumulative distribution holds the random number."""
    # In double precision everywhere: single precision would move the borders between tokens from device to device.
    cumulative_NV = logits_NV.double().softmax(1).cumsum(1)
    # A random number is at most 1 - 2**-53, so each point is below the row's sum, as rounded too.
    points_N1 = uniforms.unsqueeze(1) * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, points_N1, right=True).squeeze(1)


def choose_next_ids(
    logits_NV: Tensor, states: Sequence[SamplingState], rules: SamplingRules, captured: CapturedSampling | None = None
) -> Tensor:
    """Return each text's next token, which depends on its logits, seed and number of new tokens only.

    -1 means that the text's logits are not finite. With `captured`, the logits are the result of a CUDA graph.
    """
    if can_run_kernels(logits_NV):
        return _choose_next_ids_fused(logits_NV, states, rules, captured)
    finite_N = logits_NV.amax(1).float() - logits_NV.amin(1).float() < math.inf
    logits_NV = apply_rules(logits_NV, states, rules)
    if rules.settings is None:
        ids_N = find_maxima(logits_NV)
    else:
        ids_N = sample_ids(logits_NV, rules.uniforms.at(states[0].new_tokens))
        if rules.sampled_N is not None:
            ids_N = torch.where(rules.sampled_N, ids_N, find_maxima(logits_NV))
    return torch.where(finite_N, ids_N, -1)


def find_maxima(logits_NV: Tensor) -> Tensor:
    """Return the first token with the largest logit in each row. On a CPU numpy takes a tenth of torch's time."""
    return logits_NV.argmax(1) if logits_NV.device.type != "cpu" else torch.from_numpy(logits_NV.numpy().argmax(1))


def sort_largest(logits_NV: Tensor, count: int) -> Tensor:
    """Return the `count` largest logits of each row, ascending. On a CPU numpy takes a tenth of torch's time."""
    if logits_NV.device.type != "cpu":
        return logits_NV.topk(count, dim=1).values.flip(1)
    largest_NV = logits_NV.numpy()
    if count < logits_NV.shape[1]:
        largest_NV = np.partition(largest_NV, -count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(largest_NV, axis=1))


def _choose_next_ids_fused(
    logits_NV: Tensor, states: Sequence[SamplingState], rules: SamplingRules, captured: CapturedSampling | None
) -> Tensor:
    banned_NK = _find_banned_ids(states, rules, logits_NV.device)
    uniforms_N = None if rules.settings is None else rules.uniforms.at(states[0].new_tokens)
    if rules.adjusted:
        logits_NV = logits_NV.to(torch.float32, copy=True)
        apply_bias_and_penalties(logits_NV, states, rules.adjusted)
    elif captured is not None:
        return captured.choose(logits_NV, banned_NK, rules.settings, uniforms_N)
    return _run_kernels(logits_NV, banned_NK, rules.settings, uniforms_N)


def _run_kernels(
    logits_NV: Tensor, banned_NK: Tensor | None, settings: RowSettings | None, uniforms_N: Tensor | None
) -> Tensor:
    if settings is None or uniforms_N is None:
        return sampling_triton.greedy_ids(logits_NV, banned_NK)
    return sampling_triton.sample_ids(logits_NV, banned_NK, settings, uniforms_N)


class CapturedSampling:
    """The kernels of sampling as one CUDA graph for each size of the batch and set of rules in it.

    `capture()` is `CapturedSlots.capture`, which captures a function. Rows are padded to a power of two, at most to
    `slots`; the rows of padding are greedy.
    """

    def __init__(self, capture: Callable[[], Any], slots: int) -> None:
        self._capture = capture
        self._slots = slots
        self._graphs: dict[Any, tuple[Any, Tensor, list[Tensor | None]]] = {}
        self._copied: dict[Any, tuple[Tensor | None, ...]] = {}
        """The tensors that each graph's inputs were copied from, so that settings are copied once."""

    def choose(
        self, logits_NV: Tensor, banned_NK: Tensor | None, settings: RowSettings | None, uniforms_N: Tensor | None
    ) -> Tensor:
        """What the kernels return. The logits must be at the same address whenever a batch has their size."""
        count = len(logits_NV)
        rows = min(1 << (count - 1).bit_length(), self._slots)
        given = (banned_NK, *(settings or (None,) * 4), uniforms_N)
        sizes = tuple(None if tensor is None else tensor.shape[1:] for tensor in given)
        key = (logits_NV.data_ptr(), rows, sizes)
        if key not in self._graphs:
            padded_NV = logits_NV.as_strided((rows, logits_NV.shape[1]), logits_NV.stride())
            inputs = [None if tensor is None else tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in given]
            ids_N = torch.empty(rows, dtype=torch.long, device=logits_NV.device)  # not in the graphs' shared memory
            banned, *four, uniforms = inputs
            own = None if settings is None else RowSettings(*four)  # type: ignore[arg-type]
            graph, _ = self._capture()(
                lambda: ids_N.copy_(_run_kernels(padded_NV, banned, own, uniforms)), lambda: None
            )
            self._graphs[key] = graph, ids_N, inputs
        graph, ids_N, inputs = self._graphs[key]
        before = self._copied.get(key, (None,) * len(given))
        for target, tensor, last in zip(inputs, given, before, strict=True):
            if target is not None and tensor is not None and tensor is not last:
                target[:count] = tensor
        self._copied[key] = given
        graph.replay()
        return ids_N[:count]


def _find_banned_ids(states: Sequence[SamplingState], rules: SamplingRules, device: torch.device) -> Tensor | None:
    """Return the end tokens of the rows that may not end yet; None if all may."""
    below = find_rows_below_min_tokens(states, rules)
    if below not in rules.banned_ids:
        longest = max((len(states[row].ends) for row in below), default=0)
        banned = [states[row].ends if row in below else () for row in range(len(states))]
        ids = [[*ends, *[-1] * (longest - len(ends))] for ends in banned]
        rules.banned_ids[below] = copy_to_device(ids, device) if below else None
    return rules.banned_ids[below]


def new_row_settings(samples: Sequence[SampleConfig], device: torch.device) -> RowSettings:
    """Collect the settings of all rows for the kernels; a rule that no row uses is None."""
    temperatures = [sample.temperature and max(sample.temperature, SMALLEST) for sample in samples]
    top_k = [sample.top_k for sample in samples]
    top_p = [sample.top_p for sample in samples]
    least = [math.log(sample.min_p) if sample.min_p else MASKED for sample in samples]
    return RowSettings(
        copy_to_device(temperatures, device, torch.float32),
        copy_to_device(top_k, device, torch.int32) if any(top_k) else None,
        copy_to_device(top_p, device, torch.float32) if min(top_p) < 1 else None,
        copy_to_device(least, device, torch.float64),
    )


def apply_repetition_penalty(logits_NV: Tensor, seen_NV: Tensor, penalty_N1: Tensor) -> Tensor:
    """Make seen tokens less likely: divide positive logits by the penalty, multiply negative ones."""
    return torch.where(seen_NV, torch.where(logits_NV < 0, logits_NV * penalty_N1, logits_NV / penalty_N1), logits_NV)


def apply_temperature(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """Divide by the temperature; the largest logit is shifted to 0 first, so that nothing overflows."""
    return (logits_NV - logits_NV.amax(1, keepdim=True)).div_(temperature_N1)


def keep_top_k(logits_NV: Tensor, k_N1: Tensor, largest_k: int) -> Tensor:
    """Keep the k most likely tokens, and those as likely as the last of them."""
    largest_NK = sort_largest(logits_NV, min(largest_k, logits_NV.shape[1]))
    least_N1 = largest_NK.gather(1, (largest_NK.shape[1] - k_N1).clamp_(min=0).long())
    return logits_NV.masked_fill(logits_NV < least_N1, MASKED)


def keep_top_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Nucleus sampling: keep the fewest most likely tokens whose probabilities add up to p, at least one, and those as
    likely as the last of them."""
    sorted_NV = sort_largest(logits_NV, logits_NV.shape[1])
    probabilities_NV = sorted_NV.flip(1).softmax(1)
    more_likely_NV = probabilities_NV.cumsum(1).sub_(probabilities_NV)  # the sum over more likely tokens
    dropped_N1 = more_likely_NV.ge_(p_N1).sum(1, keepdim=True).long()  # in place: as floats, they are summed faster
    return logits_NV.masked_fill(logits_NV < sorted_NV.gather(1, dropped_N1), MASKED)


def keep_min_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one."""
    probabilities_NV = logits_NV.softmax(1)
    return logits_NV.masked_fill(probabilities_NV < p_N1 * probabilities_NV.amax(1, keepdim=True), MASKED)


Warper = Callable[[Tensor, Tensor], Tensor]
"""From the logits of some rows and the setting of each row to the changed logits."""
WARPERS: list[tuple[str, float, Callable[..., Tensor]]] = [
    ("temperature", 1.0, apply_temperature),
    ("top_k", 0, keep_top_k),
    ("top_p", 1.0, keep_top_p),
    ("min_p", 0.0, keep_min_p),
]
"""Setting, its neutral value, and the function; in the order of transformers."""
