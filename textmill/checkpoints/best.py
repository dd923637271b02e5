"""BestRule: which of a run's checkpoints is the best one, by the metric that `train.best` names; and BestStep, which
stops a run early when there was no better one for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from textmill.config.training import BestConfig
from textmill.errors import TextmillError
from textmill.storage.files import read_json

VALID_LOSS = "valid_loss"


@dataclass(frozen=True)
class BestRule:
    """A metric, and whether its highest or its lowest value is the best."""

    metric: str = VALID_LOSS
    highest: bool = False

    def best_of(self, values: Mapping[int, float]) -> int | None:
        """The step with the best value; of equal ones the first."""
        return next(iter(self.sorted_steps(values)), None)

    def sorted_steps(self, values: Mapping[int, float]) -> list[int]:
        """The steps, that with the best value first."""
        return sorted(values, key=lambda step: (self._rank(values[step]), step))

    def is_better(self, value: float, than: float) -> bool:
        """Whether a value is better than another."""
        return self._rank(value) < self._rank(than)

    def _rank(self, value: float) -> float:
        return -value if self.highest else value

    @property
    def name(self) -> str:
        """The metric in words; one of a task as it is logged."""
        return self.metric if "/" in self.metric else self.metric.replace("_", " ")

    def describe(self, value: float) -> str:
        """The metric with a value: valid loss 2.2500."""
        return f"{self.name} {value:.4f}"


def read_rule(folders: Iterable[Path]) -> BestRule:
    """The rule of a run: what its newest readable checkpoint recorded."""
    for folder in reversed(list(folders)):
        recorded = _read_progress(folder).get("best")
        if isinstance(recorded, dict) and isinstance(recorded.get("metric"), str):
            return BestRule(recorded["metric"], bool(recorded.get("highest")))
    return BestRule()


def read_metric(folders: Mapping[int, Path], metric: str) -> dict[int, float]:
    """The finite values of a metric in checkpoints, by step, where it was measured."""
    values = {step: metric_of(_read_progress(folder), metric) for step, folder in folders.items()}
    return {step: value for step, value in values.items() if value is not None and math.isfinite(value)}


def metric_of(progress: Mapping[str, Any], metric: str) -> float | None:
    """The value of a metric in a checkpoint's progress.json, which stores exact numbers in hex; None if it has none."""
    stored = progress.get(VALID_LOSS) if metric == VALID_LOSS else (progress.get("metrics") or {}).get(metric)
    try:
        return None if stored is None else float.fromhex(stored)
    except (TypeError, ValueError):
        return None


def _read_progress(folder: Path) -> dict[str, Any]:
    try:
        progress = read_json(folder / "progress.json")
    except TextmillError:
        return {}
    return progress if isinstance(progress, dict) else {}


@dataclass(frozen=True)
class BestStep:
    """What a checkpoint stores of it, so that a resumed run stops at the same step."""

    rule: BestRule
    value: float | None = None
    step: int = 0
    waited: int = 0
    """Measurements since the best one."""

    def add(self, step: int, metrics: dict[str, float]) -> BestStep:
        """With the metrics that were measured after `step` steps."""
        value = metrics.get(self.rule.metric)
        if value is None:
            return self
        if math.isfinite(value) and (self.value is None or self.rule.is_better(value, self.value)):
            return replace(self, value=value, step=step, waited=0)
        return replace(self, waited=self.waited + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether the run ends early."""
        return patience is not None and self.waited >= patience

    def describe(self) -> str:
        """Why the run ends early."""
        best = "it was never finite" if self.value is None else f"the best, {self.value:.4f}, was at step {self.step:,}"
        times = "measurement" if self.waited == 1 else f"{self.waited} measurements"
        return f"no better {self.rule.name} in the last {times} (train.best.patience); {best}"

    def save_state(self) -> dict[str, Any]:
        """The state as JSON; numbers are exact in hex."""
        value = None if self.value is None else self.value.hex()
        return {
            "metric": self.rule.metric,
            "highest": self.rule.highest,
            "value": value,
            "step": self.step,
            "waited": self.waited,
        }


def open_best_step(config: BestConfig, saved: dict[str, Any]) -> BestStep:
    """The state that a checkpoint stores; a new one if the run starts, or `train.best` names another metric now."""
    rule = BestRule(config.metric, config.highest)
    if not saved or BestRule(saved["metric"], saved["highest"]) != rule:
        return BestStep(rule)
    value = None if saved["value"] is None else float.fromhex(saved["value"])
    return BestStep(rule, value, saved["step"], saved["waited"])
