"""Prints the learning curve of a run as text, with the steps at which settings were changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from textmill.commands.show.bars import BAR_WIDTH
from textmill.config import RunConfig
from textmill.storage.files import format_path
from textmill.track.jsonl import METRICS_FILE, read_metrics

CURVE_ROWS = 24
"""About how many lines the curve has."""


def show_run(config: RunConfig) -> None:
    """Print the loss, valid loss and learning rate over the steps, and the changes in between."""
    run = config.folder_of("train")
    lines = read_metrics(run / METRICS_FILE)
    rows = merge_by_step(lines)
    changes = [(line["step"], line["change"]) for line in lines if "change" in line]
    losses = [row["loss"] for row in rows.values() if row.get("loss") is not None]
    print(f"{format_path(run)}: {max(rows, default=0):,} steps")
    if not losses:
        return
    highest, before = max(losses), 0
    width = len(f"{max(rows):,}")
    for step in choose_rows(rows, [step for step, _ in changes]):
        for changed, text in changes:
            if before <= changed < step:
                print(f"  {'changed':>{width + 5}} after step {changed:,}: {text}")
        before, row = step, rows[step]
        loss = row.get("loss")
        texts = [f"loss {loss:.4f}" if loss is not None else " " * 11]
        texts.append(f"lr {row['learning_rate']:.1e}" if row.get("learning_rate") is not None else " " * 10)
        texts.append(f"valid {row['valid_loss']:.4f}" if row.get("valid_loss") is not None else " " * 12)
        bar = "█" * round(BAR_WIDTH * loss / highest) if loss is not None and highest > 0 else ""
        print(f"  step {step:>{width},}  {'  '.join(texts)}  {bar}".rstrip())


def merge_by_step(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The metrics of each step in one row; changes have no row."""
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "change" not in line:
            rows.setdefault(line["step"], {}).update(line)
    return dict(sorted(rows.items()))


def choose_rows(rows: dict[int, dict[str, Any]], changed: list[int]) -> list[int]:
    """Steps to print: evenly spaced ones, the first and the last, and those on both sides of a change."""
    steps = list(rows)
    every = max(1, -(-len(steps) // CURVE_ROWS))
    chosen = set(steps[::every]) | {steps[-1]}
    for step, after in pairwise(steps):
        if any(step <= change < after for change in changed):
            chosen |= {step, after}
    return sorted(chosen)
