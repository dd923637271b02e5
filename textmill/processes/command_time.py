"""When a command started and what it does after training: what `train.minutes` counts from and until."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CommandTime:
    """The start of a command, and whether it evaluates and generates after training."""

    started: float = field(default_factory=lambda: time.perf_counter())
    """As `time.perf_counter` counts; default: now."""
    evaluates: bool = False
