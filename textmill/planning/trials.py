"""Which trials `textmill tune` runs: one setting at a time around the plan, keeping what helps. Pure arithmetic.

The same results give the same trials, so a command that was killed continues with the stored results.

A search that starts from a learning rate of 0.01 tries 0.02; if that is better by more than noise, also 0.04, and the
best of these is kept; if 0.02 is not better, it tries 0.005 and perhaps 0.0025. Then comes the weight decay, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from textmill.config import TrainConfig
from textmill.planning.plan import WIDTHS, heads_of, layers_of
from textmill.training.auto_preset import round_setting

Changes = dict[str, Any]
"""Settings by key that differ from those of the project."""
NOISE = 0.002
"""Bits per byte: a smaller gain is not kept, even if two seeds happen to be nearer; spread of equal runs."""
TRIALS = 12
"""A trial gets this part of the minutes, unless the entire run is shorter."""
FULL_TRIALS = 8
"""Trials have the length of the entire run if this many of them fit in the minutes."""
FULL_FRACTION = 0.5
"""Settings whose best value depends on the length are tried if a trial has at least this fraction of the run's."""
MIN_STEPS = 50
"""A trial of fewer steps shows nothing about a run that is more than twice as long."""


@dataclass(frozen=True)
class Lengths:
    """How long trials may be."""

    trial_minutes: float
    full_steps: int | None = None
    """Steps of the entire run, if its length is not set in minutes."""
    full_minutes: float | None = None
    """Minutes of the entire run, if it is."""


@dataclass(frozen=True)
class Trial:
    """One run: the setting that it tries, all changes, and its length (`train.minutes` or `train.steps`; nothing:
    that of the project)."""

    setting: str
    changes: Changes
    length: Changes


@dataclass(frozen=True)
class Result:
    """What a trial gave."""

    loss: float | None
    """Bits per byte, or nats per token where bytes are not known; None: it failed."""
    steps: int
    seconds: float
    error: str = ""
    step_seconds: float = 0.0
    """Seconds of one step; 0: unknown."""


@dataclass
class Outcome:
    """The best settings so far, and what each changed setting was worth."""

    changes: Changes = field(default_factory=dict)
    loss: float | None = None
    plan_loss: float | None = None
    noise: float = NOISE
    worth: dict[str, float] = field(default_factory=dict)
    """How much lower the loss is with the best value of each setting that was tried; 0: the plan's value is kept."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Values such as `train.batch=64` whose trials would be, or were, too short, and how many steps they have."""
    too_short: bool = False
    """Whether even the trial of the plan was too short, so that nothing is tried."""


def trial_minutes(minutes: float, full_minutes: float | None) -> float:
    """Minutes of one trial, from those of the command and of the entire run."""
    if full_minutes is not None and minutes / full_minutes >= FULL_TRIALS:
        return full_minutes
    return minutes / TRIALS if full_minutes is None else min(full_minutes, minutes / TRIALS)


def needed_minutes(lengths: Lengths, first: Result) -> float:
    """Minutes of the command with which the trial of the plan would have enough steps."""
    step_minutes = (first.step_seconds or first.seconds / max(1, first.steps)) / 60
    needed = TRIALS * (lengths.trial_minutes + (MIN_STEPS - first.steps) * step_minutes)
    return min(needed, FULL_TRIALS * (lengths.full_minutes or math.inf))


def search(
    train: TrainConfig,
    numbers: Mapping[str, Any],
    averages: bool,
    lengths: Lengths,
    outcome: Outcome,
    run: Callable[[Trial], Result],
) -> None:
    """Run trials until every setting was tried; `outcome` is updated after each. `numbers`, `averages`: see
    `candidates`."""
    minutes: Changes = {"train.minutes": lengths.trial_minutes}
    first = run(Trial("", {}, minutes))
    fraction = lengths.trial_minutes / lengths.full_minutes if lengths.full_minutes else 1.0
    if lengths.full_steps is not None and first.loss is not None:
        fraction = first.steps / lengths.full_steps
        if fraction > 1:  # the entire run is shorter than the trial: run it as it is
            minutes = {}
            first = run(Trial("", {}, minutes))
    is_full = fraction >= FULL_FRACTION
    outcome.too_short = not is_full and first.steps < MIN_STEPS
    if first.loss is None or outcome.too_short:
        return
    outcome.loss = outcome.plan_loss = first.loss
    length = _TrialLength(minutes, first.steps, first.steps * train.batch, is_full)
    second = run(Trial("train.seed", {"train.seed": train.seed + 1}, length.of(same_speed=True)))
    if second.loss is not None:
        outcome.noise = max(NOISE, abs(second.loss - first.loss))
    for candidate in candidates(train, numbers, averages):
        if candidate.needs_full_length and not is_full:
            continue
        outcome.worth.setdefault(candidate.setting, 0.0)
        for ladder in candidate.ladders:
            if _climb(ladder, candidate, train.batch, length, outcome, run):
                break  # the other direction would be worse


@dataclass
class _TrialLength:
    """How long the trials after the first are."""

    minutes: Changes
    """`train.minutes` of each; empty: each is an entire run."""
    steps: int
    """Steps of the best trial so far."""
    samples: int
    """Samples of the first trial; with a larger batch they are fewer steps."""
    is_full: bool
    """Whether a trial is long enough, compared with the run, to be compared however few steps it has."""

    def of(self, same_speed: bool) -> Changes:
        """As many steps as the best trial if they take as long, else as many minutes."""
        return {"train.steps": self.steps} if self.minutes and same_speed else self.minutes


def _climb(
    ladder: Ladder,
    candidate: Candidate,
    batch: int,
    length: _TrialLength,
    outcome: Outcome,
    run: Callable[[Trial], Result],
) -> bool:
    """Try values one after the other, as long as each is better than the best so far; return whether one was."""
    is_better = False
    for values in ladder:
        changes = {**outcome.changes, **values}
        value = name_value(changes, candidate.setting)
        expected_steps = length.samples // changes.get("train.batch", batch)
        if not length.is_full and expected_steps < MIN_STEPS:
            outcome.skipped[value] = expected_steps
            break
        result = run(Trial(candidate.setting, changes, length.of(candidate.same_speed)))
        if not length.is_full and result.loss is not None and result.steps < MIN_STEPS:  # slower than expected
            outcome.skipped[value] = result.steps
            break
        assert outcome.loss is not None
        if result.loss is None or result.loss > outcome.loss - outcome.noise:
            break
        outcome.worth[candidate.setting] += outcome.loss - result.loss
        outcome.changes = changes
        outcome.loss = result.loss
        length.steps = result.steps
        is_better = True
    return is_better


Ladder = list[Changes]
"""Values to try one after the other, as long as each is better than the one before."""


class Candidate(NamedTuple):
    """A setting to try."""

    ladders: list[Ladder]
    """The values in each direction."""
    needs_full_length: bool
    """Whether its best value depends on the length of the run, so that short trials would mislead."""
    same_speed: bool
    """Whether a step takes the same time with all its values."""

    @property
    def setting(self) -> str:
        """Its key; of a net's size, that of the width."""
        return next(iter(self.ladders[0][0]))


def candidates(train: TrainConfig, numbers: Mapping[str, Any], averages: bool) -> Iterator[Candidate]:
    """The settings to try; what is usually worth most comes first. `numbers` are those of the net, without a width if
    its shape is fixed; `averages`: whether the engine can average weights."""
    rates = _factors("train.learning_rate", train.learning_rate)
    yield Candidate(rates, needs_full_length=False, same_speed=True)
    decays: list[Ladder] = [[{"train.weight_decay": 0.1}]]
    if train.weight_decay:
        decays = _factors("train.weight_decay", train.weight_decay)
    yield Candidate(decays, needs_full_length=True, same_speed=True)
    if "width" in numbers and (widths := _widths(numbers["width"])):
        yield Candidate(widths, needs_full_length=True, same_speed=False)
    yield Candidate(_batches(train.batch), needs_full_length=False, same_speed=False)
    dropout = 0.0 if numbers["dropout"] else 0.1
    yield Candidate([[{"model.shape.dropout": dropout}]], needs_full_length=True, same_speed=False)
    if averages:
        window = None if train.ema_window else 0.15
        yield Candidate([[{"train.ema_window": window}]], needs_full_length=True, same_speed=True)
    if train.optimizer == "muon":
        factors = _factors("train.muon.adamw_rate_factor", train.muon.adamw_rate_factor)
        yield Candidate(factors, needs_full_length=False, same_speed=True)


def _factors(key: str, value: float) -> list[Ladder]:
    """Twice and four times the value, then a half and a quarter of it."""
    larger = [{key: round_setting(value * factor)} for factor in (2, 4)]
    smaller = [{key: round_setting(value * factor)} for factor in (0.5, 0.25)]
    return [larger, smaller]


def _batches(batch: int) -> list[Ladder]:
    smaller = [{"train.batch": size} for size in (batch // 2, batch // 4) if size >= 1]
    larger = [{"train.batch": size} for size in (2 * batch, 4 * batch)]
    return [smaller, larger] if smaller else [larger]


def _widths(width: int) -> list[Ladder]:
    """The next two larger and the next two smaller nets."""
    larger = [_size(other) for other in WIDTHS if other > width][:2]
    smaller = [_size(other) for other in reversed(WIDTHS) if other < width][:2]
    return [ladder for ladder in (larger, smaller) if ladder]


def _size(width: int) -> Changes:
    return {"model.shape.width": width, "model.shape.layers": layers_of(width), "model.shape.heads": heads_of(width)}


def name_value(changes: Mapping[str, Any], setting: str) -> str:
    """A setting with the value that a trial tried, such as `train.batch=64`."""
    return f"{setting}={describe_value(changes, setting)}"


def describe_value(changes: Mapping[str, Any], setting: str) -> str:
    """The value of a setting that a trial tried, for a table."""
    if setting not in changes:
        return ""
    if setting == "model.shape.width":
        return f"{changes['model.shape.layers']} x {changes[setting]}"
    return "none" if changes[setting] is None else f"{changes[setting]:g}"
