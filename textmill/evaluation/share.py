"""Share: which batches of requests each process computes, and how their results come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textmill.processes.ranks import SINGLE_PROCESS, Ranks, gather_results

Numbered = list[tuple[int, Any]]
"""Results as JSON values, each with the number of its batch or request."""


@dataclass(frozen=True)
class Share:
    """The part of the batches that this process computes. All processes divide the same batches, so the results are
    those of one process."""

    ranks: Ranks = SINGLE_PROCESS
    part: int = 0
    parts: int = 1
    """The ranks of a tensor-parallel group compute the same part together."""

    def is_mine(self, number: int) -> bool:
        """Whether this process computes the batch with this number."""
        self.ranks.report_progress()
        return number % self.parts == self.part

    def gather(self, work: Callable[[], Numbered]) -> Numbered:
        """Run `work` on every rank and return the results of all, in the order of their numbers."""
        return sorted({number: result for own in gather_results(self.ranks, work) for number, result in own}.items())


ALL_BATCHES = Share()
"""The share of a single process."""
