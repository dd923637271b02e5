"""Deliberate changes in mid-run (`train --change`): which settings may change, and the settings of each step range.

A run of 1,000 steps whose batch was doubled from step 400 on has two step ranges, and progress.json stores both:

    [{"step": 0, "settings": {"train.batch": 8, ...}}, {"step": 400, "settings": {"train.batch": 16, ...}}]

From them `data_ranges` computes which samples each step sees, so that a resumed run goes on with the right ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.tokens.batches.blend import DataRange
from textmill.tokens.splits import Splits

CHANGEABLE = (
    "train.learning_rate",
    "train.min_learning_rate",
    "train.warmup",
    "train.warmup_shape",
    "train.schedule",
    "train.batch",
    "train.batch_rampup",
    "train.weight_decay",
    "train.layer_decay",
    "train.embedding_rate_factor",
    "train.betas",
    "train.epsilon",
    "train.clip",
    "train.muon.momentum",
    "train.muon.adamw_rate_factor",
    "train.label_smoothing",
)
"""Settings that decide the result and that `--change` may change."""
DROPOUT = re.compile(r"model\.(\w*dropout)")
"""The dropout rates of a model: `--change` may change them too."""
TOKENS = "tokens"
"""The token stores and their weights in the blend: `--change` may change them too."""
USER_NAMES = {TOKENS: "tokens.use (the blend)"}
"""What messages call a setting whose recorded name the user does not know."""

Ranges = list[dict[str, Any]]
"""The step ranges of a run, as progress.json has them: the first step of each, and its settings."""


def check_changes(lines: Sequence[str]) -> None:
    """Refuse changes that cannot be made in mid-run; a line begins with the name of its setting."""
    refused = [line for line in lines if not can_change(line)]
    if refused:
        allowed = ", ".join([*CHANGEABLE, "model.shape.dropout", *USER_NAMES.values()])
        raise TextmillError(
            f"--change: cannot change in mid-run: {'; '.join(refused[:4])}; set them back, or choose another "
            f"train.folder; these can change: {allowed}"
        )


def can_change(line: str) -> bool:
    """Whether the setting that a line begins with can change in mid-run."""
    name = line.partition(" ")[0]
    return name in (*CHANGEABLE, TOKENS) or DROPOUT.fullmatch(name) is not None


def change_dropout(shape: Shape, made_from: dict[str, Any]) -> Shape:
    """The shape with the dropout rates among the recorded settings: "model.dropout" -> shape.dropout."""
    rates = {}
    for name, value in made_from.items():
        if match := DROPOUT.fullmatch(name):
            rates[match[1]] = value
    return replace(shape, **rates)


def add_range(checkpoint: Checkpoint, before: dict[str, Any], after: dict[str, Any], data: Splits) -> Ranges:
    """The step ranges of a run whose settings change from `before` to `after` at the step of a checkpoint."""
    ranges: Ranges = list(checkpoint.progress["ranges"])
    if not ranges:
        ranges = [{"step": 0, "settings": _settings_of(before, checkpoint.progress["sources"])}]
    earlier = [step_range for step_range in ranges if step_range["step"] < checkpoint.step]
    return [*earlier, {"step": checkpoint.step, "settings": _settings_of(after, data.sources)}]


def _settings_of(values: dict[str, Any], sources: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """The settings of a step range; `sources` are the token stores and their weights."""
    return {**{name: values[name] for name in values if can_change(name)}, TOKENS: [list(source) for source in sources]}


def data_ranges(ranges: Ranges) -> list[DataRange]:
    """What decides the samples of each step range."""
    data = []
    for step_range in ranges:
        settings = step_range["settings"]
        sources = [(fingerprint, weight) for fingerprint, weight in settings[TOKENS]]
        data.append(DataRange(step_range["step"], settings["train.batch"], settings["train.batch_rampup"], sources))
    return data


def describe_changes(ranges: Ranges) -> dict[int, list[str]]:
    """What changed at the first step of each step range but the first: lines such as "train.batch was 8, is 16"."""
    changes: dict[int, list[str]] = {}
    for before, after in itertools.pairwise(ranges):
        old = before["settings"]
        new = after["settings"]
        changes[after["step"]] = [
            f"{USER_NAMES.get(name, name)} was {_format(name, old.get(name))}, is {_format(name, new[name])}"
            for name in new
            if old.get(name) != new[name]
        ]
    return changes


def _format(name: str, value: Any) -> str:
    if name != TOKENS:
        return str(value)
    return " + ".join(f"{weight:g} x {fingerprint[:8]}" for fingerprint, weight in value)
