"""How good a finished run is, in plain words: against simple models, overfitting or undertrained, what to try next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from textmill.track.jsonl import METRICS_FILE, read_metrics
from textmill.training.auto_preset import target_epochs
from textmill.training.loop import OVERFITTING_RATIO

State = Literal["overfitting", "limited by the text", "undertrained", "finished", "unknown"]
MANY_EPOCHS = 8
"""From here on more text is worth more than more time."""
BY_HEART = 0.85
"""A training loss below this fraction of the valid loss: the net has learnt much of its text by heart."""
LAST_PART = 0.05
"""The part of the run, at its end, over which the training loss is averaged."""
ENOUGH = 0.7
"""A run with this fraction of its net's `target_epochs` is not called undertrained."""

NO_BETTER = "It is no better than counting pairs of tokens: it has learnt almost nothing yet."


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, as far as it is judged here."""

    parameters: int
    """Of blocks and head: the size of a net in the rules of a plan."""
    unique_tokens: int
    tokens: int
    """Tokens seen in training, without padding."""
    valid_losses: dict[int, float]
    """By step."""
    from_scratch: bool = True
    """Whether the weights were random at the start; a model that was trained before needs fewer epochs."""
    all_parameters: int | None = None
    """With the embeddings: the size that the user reads; None: as `parameters`."""
    train_loss: float | None = None
    """At the end of the run; None: not known, or of another kind than the valid loss."""

    @property
    def epochs(self) -> float:
        """How often the text was seen."""
        return self.tokens / max(1, self.unique_tokens)

    @property
    def last(self) -> float:
        """The last valid loss."""
        return self.valid_losses[max(self.valid_losses)]

    @property
    def knows_by_heart(self) -> bool:
        """Whether much of what it learns at the end is of no use for other text; in its first epoch all text is new."""
        return self.epochs > 1 and self.train_loss is not None and self.train_loss < BY_HEART * self.last

    @property
    def best_step(self) -> int:
        """The step with the lowest valid loss."""
        return min(self.valid_losses, key=self.valid_losses.__getitem__)


class Curves(NamedTuple):
    """What the metrics of a run say of it."""

    valid_losses: dict[int, float]
    """By step."""
    train_loss: float | None
    """The mean of the last steps; None: not logged."""
    epochs: float | None
    """How often it has seen its text, without the padding of short samples; None: not logged."""


def read_curves(run: Path) -> Curves:
    """Read the metrics of a run; nothing is known of a run without them."""
    rows = read_metrics(run / METRICS_FILE)
    losses, valid_losses = (_finite_by_step(rows, name) for name in ("loss", "valid_loss"))
    last = [loss for step, loss in losses.items() if step >= (1 - LAST_PART) * max(losses)]
    epochs = next((row["epoch"] for row in reversed(rows) if "epoch" in row), None)
    return Curves(valid_losses, sum(last) / len(last) if last else None, epochs)


def _finite_by_step(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])}


def state_of(run: FinishedRun) -> State:
    """What limits the model."""
    if not run.valid_losses:
        return "unknown"
    if run.last > OVERFITTING_RATIO * run.valid_losses[run.best_step]:
        return "overfitting"
    too_few = run.epochs < ENOUGH * target_epochs(run.parameters, run.unique_tokens)
    if run.from_scratch and too_few and not run.knows_by_heart:
        return "undertrained"
    limited = run.epochs >= MANY_EPOCHS or run.knows_by_heart
    return "limited by the text" if run.from_scratch and limited else "finished"


def describe_quality(measured: dict[str, Any] | None) -> list[str]:
    """The model's bits per byte next to those of models that count tokens and pairs of tokens."""
    found = (measured or {}).get("perplexity", {})
    bits = found.get("bits_per_byte")
    if bits is None:
        counted = found.get("loss/bigram")
        return [NO_BETTER] if counted and found["loss"] >= counted else []
    origin = f"{found['card']['split']} split" if "split" in found["card"] else "text"
    text = f"The model needs {bits:.3f} bits per byte of the {origin}"
    lines = [f"{text}: it would compress this text to {bits / 8:.0%} of its size."]
    counting = {"bigram": "pairs of tokens", "unigram": "single tokens"}
    others = {name: other for name in counting if (other := found.get(f"bits_per_byte/{name}"))}
    if others:
        comparisons = (f"{other:.3f} if only {counting[name]} are counted" for name, other in others.items())
        lines.append(f"For comparison: {', '.join(comparisons)}.")
    if bits >= others.get("bigram", math.inf):
        lines.append(NO_BETTER)
    return lines


def describe_state(run: FinishedRun) -> str:
    """What limits the model, with the numbers that show it."""
    seen = f"{run.epochs:.2g} epochs of {run.unique_tokens:,} tokens"
    state = state_of(run)
    if state == "overfitting":
        best = run.valid_losses[run.best_step]
        return (
            f"Overfitting: after {seen}, valid loss rose from {best:.4f} to {run.last:.4f} since step "
            f"{run.best_step:,}; the best checkpoint is used. More text, fewer epochs or more weight decay help."
        )
    if state == "undertrained":
        useful_epochs = target_epochs(run.parameters, run.unique_tokens)
        millions = (run.all_parameters or run.parameters) / 1e6
        return (
            f"Undertrained: {seen}, while a net of {millions:.1f}M parameters gains from about "
            f"{useful_epochs:.2g} epochs. More time or a smaller net help."
        )
    if state == "limited by the text":
        text = f"Limited by the text: it saw {seen} without overfitting"
        if run.knows_by_heart:
            text += f", but its loss is {run.train_loss:.2f} on that text and {run.last:.2f} on text that is new to it"
        return f"{text}. More text helps more than more time."
    if state == "finished":
        if run.from_scratch:
            return f"Neither overfitting nor undertrained: it saw {seen}."
        lowest_last = run.best_step == max(run.valid_losses)
        more = "; the last valid loss is the lowest, so more steps may help" if lowest_last else ""
        return f"No overfitting: it saw {seen}{more}."
    return "Whether it overfits is not known: there is no valid loss."
