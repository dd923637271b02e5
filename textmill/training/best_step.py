"""BestStep: the best value of `train.best.metric` so far, and early stopping when there was no better one for long."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from textmill.checkpoints.best import BestRule
from textmill.config.training import BestConfig


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
