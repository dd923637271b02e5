"""The interfaces of evaluation: a task measures something, the Scorer gives it the model's log-likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from textmill.config.own_files import OwnFile
from textmill.processes.ranks import SINGLE_PROCESS, Ranks, gather_results

Result = dict[str, Any]
"""What a task returns: plain values, written as JSON."""
ItemLog = dict[str, Any]
"""One example as the model answered it: its `id`, and its metrics by name."""
Pair = tuple[Sequence[int], Sequence[int]]
"""The token ids of a context and of its continuation."""


@dataclass(frozen=True)
class Score:
    """How likely the model finds one continuation after its context."""

    log_likelihood: float
    """The sum of the natural-log probabilities of the continuation's tokens."""
    tokens: int
    """How many tokens the continuation has."""
    greedy: bool
    """Whether every token of the continuation is the model's most likely next token."""
    last_log_likelihood: float = 0.0
    """The natural-log probability of the continuation's last token alone."""
    last_greedy: bool = False
    """Whether the last token is the model's most likely one."""


class LossPart(NamedTuple):
    """The summed loss of consecutive tokens of one document."""

    document: int
    """The document's number."""
    loss: float
    tokens: int


@dataclass(frozen=True)
class StoreLoss:
    """The summed loss of a token store."""

    loss: float
    """In nats."""
    tokens: int
    correct: int = 0
    """Tokens that are the model's most likely ones; counted for answers only."""
    windows: int = 0
    """How many windows were read."""
    parts: Sequence[LossPart] = ()
    """The loss by document and window, in the order of the text, for a confidence interval."""


if TYPE_CHECKING:
    from textmill.evaluation.scorer_torch import TextScorer, TorchScorer  # imports torch, which is slow

Scorer: TypeAlias = "TextScorer"
"""One checkpoint, ready to score text."""
NextTokenScorer: TypeAlias = "TorchScorer"
"""One whose model predicts the next token: it has a perplexity, and writes texts."""


@dataclass(frozen=True)
class TaskEntry:
    """One entry of `evaluate.tasks`."""

    name: str
    """The task's file in evaluation/tasks, or the name of the user's own."""
    label: str
    """The key of its result: the task's name, unless several entries have the same."""
    file: Path | None = None
    """The file, folder or pattern after NAME: or in the user's YAML file."""
    sha256: str | None = None
    """What the file's checksum must be, if the user gave one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the user's YAML file."""
    code: OwnFile | None = None
    """The Python file of the user's own that measures it."""
    open_tokens: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)
    """Opens the SplitTokens of `evaluate.text` or `evaluate.split`, for a task without a file."""


@dataclass(frozen=True)
class Measured:
    """What a task found. The command adds the model, tokenizer, precision and seconds to the card."""

    metrics: dict[str, float | None]
    """Plain numbers by name."""
    card: dict[str, Any]
    """How the numbers were measured: what a reader must know to compare them."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95% confidence intervals of metrics."""
    token_loss: float | None = None
    """The mean loss of all scored tokens in nats, to notice untrained weights."""
    items: Sequence[ItemLog] = ()
    """What the model answered to each example, for the log next to the result."""


def tasks_of(result: Result) -> dict[str, Result]:
    """What each task of a result found, by its label."""
    return {label: found for label, found in result.items() if isinstance(found, dict) and "card" in found}


def list_metrics(result: Result) -> dict[str, float]:
    """The numbers of a task's result by name, such as lambada/accuracy."""
    return {
        f"{label}/{name}": float(value)
        for label, values in tasks_of(result).items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }


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
