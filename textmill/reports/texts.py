"""A run as text for the terminal: its state, curves, checkpoints and results."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.reports.comparison import COLUMNS, Comparison, list_results, unique_names
from textmill.reports.curves import Curves, build_svg, draw_curve
from textmill.reports.run_files import RunFiles
from textmill.storage.files import format_path
from textmill.track.console import format_time

CURVES = {"loss": "train loss", "valid_loss": "valid loss"}
BITS = {"bits_per_byte": "train", "valid_bits_per_byte": "valid"}
HEIGHT = 8


def describe_run(run: RunFiles) -> Iterator[str]:
    """Lines that describe a run: state, curves, checkpoints, results."""
    size = f", {run.parameters:,} parameters" if run.parameters else ""
    yield f"{format_path(run.folder)}{size}: {describe_progress(run)}"
    for metric in CURVES:
        yield from describe_curve(run, metric)
    for name in run.task_metrics:
        if points := run.points(name):
            (first_step, first_value), (last_step, last_value) = points[0], points[-1]
            yield f"{name}: {last_value:.4f} at step {last_step:,}, {first_value:.4f} at step {first_step:,}"
    for step, text in run.changes:
        yield f"changed after step {step:,}: {text}"
    if run.checkpoints:
        best = run.best_step
        steps = ", ".join(f"{step:,}{' (best)' if step == best else ''}" for step in run.checkpoints)
        yield f"\ncheckpoints: {steps}"
    for result in run.evaluations:
        yield f"evaluated: {describe_evaluation(result)}"
    for sample in run.samples[-3:]:
        yield f"sample of step {sample['step']:,}: {sample.get('prompt', '')}|{str(sample.get('text', ''))[:200]!r}"


def describe_curve(run: RunFiles, metric: str, name: str = "", height: int = HEIGHT) -> Iterator[str]:
    """A curve with its title; nothing if the metric was not logged."""
    width = shutil.get_terminal_size((100, 24)).columns - 1
    title = name + CURVES[metric]
    points = [point for point in run.points(metric) if math.isfinite(point[1])]
    if len(points) == 1:
        yield f"\n{title}: {points[0][1]:.4f} at step {points[0][0]:,}"
    elif points:
        yield f"\n{title}, steps {points[0][0]:,} to {points[-1][0]:,}, last {points[-1][1]:.4f}"
        yield from draw_curve(points, width=width, height=height)


def describe_curves(runs: list[RunFiles]) -> Iterator[str]:
    """A small curve of each run: of the valid loss if it was measured more than once."""
    for name, run in zip(unique_names(runs), runs, strict=True):
        yield from describe_curve(run, "valid_loss" if len(run.points("valid_loss")) > 1 else "loss", f"{name}: ", 4)


def draw_losses(runs: list[RunFiles]) -> Curves:
    """The loss curves: of one run of both splits, of several the valid loss if there is one."""
    metrics = {"loss": "train", "valid_loss": "valid"} if len(runs) == 1 else {"valid_loss": "valid"}
    if not any(run.points("valid_loss") for run in runs):
        metrics = {"loss": "train"}
    curves = {
        f"{name}, {text}" if len(runs) > 1 else f"{text} loss": run.points(metric)
        for name, run in zip(unique_names(runs), runs, strict=True)
        for metric, text in metrics.items()
    }
    if not any(curves.values()):
        raise TextmillError(f"{format_path(runs[0].folder)}: no loss is logged yet; train first, or wait")
    return Curves(build_svg(curves, "step", "loss"), "\n".join(describe_curves(runs)).strip())


def describe_comparison(found: Comparison) -> Iterator[str]:
    """The table of several runs; settings that do not fit beside the results are below."""
    yield from _align([row[: 1 + len(COLUMNS)] for row in (found.head, *found.rows)])
    yield ""
    names = [row[0] for row in found.rows]
    settings = list(zip(*(row[1 + len(COLUMNS) :] for row in (found.head, *found.rows)), strict=True))
    yield from _align([["setting", *names], *map(list, settings)]) if settings else ["no setting differs"]


def _align(rows: list[list[str]]) -> Iterator[str]:
    """Rows as lines: the first column at the left, the others at the right."""
    name_width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(name_width), *map(str.rjust, cells, widths)])


def describe_progress(run: RunFiles) -> str:
    """Steps, tokens, epoch, bits per byte, time and throughput in one line."""
    planned = f" of {run.planned_steps:,}" if run.planned_steps else ""
    parts = [f"step {run.last_step:,}{planned}"]
    if tokens := run.tokens_after(run.last_step):
        parts.append(f"{tokens:,} tokens")
    if epochs := run.points("epoch"):
        parts.append(f"epoch {epochs[-1][1]:.2f}")
    for metric, title in BITS.items():
        if points := run.points(metric):
            parts.append(f"{points[-1][1]:.3f} bits/byte ({title})")
    if run.seconds:
        parts.append(f"{format_time(run.seconds[-1][1])} of training")
        parts.append(f"{run.points('tokens_per_second')[-1][1]:,.0f} tokens/s")
    if run.seconds_left and not run.stopped:
        parts.append(f"left {format_time(run.seconds_left)}")
    if run.best_step is not None:
        parts.append(f"best {run.best_rule.describe(run.best_values[run.best_step])} at step {run.best_step:,}")
    if run.stopped:
        parts.append(f"stopped: {run.stopped.get('why', 'no reason recorded')}")
    return ", ".join(parts)


def describe_runs(runs: list[RunFiles], below: Path) -> Iterator[str]:
    """A table of runs and what they reached."""
    rows = [["run", *COLUMNS]]
    for run in runs:
        folder = run.folder.relative_to(below) if run.folder.is_relative_to(below) else run.folder
        steps, *results = list_results(run)
        planned = f"/{run.planned_steps:,}" if run.planned_steps else ""
        rows.append([str(folder), steps + planned, *results])
    yield from _align(rows)


def describe_evaluation(result: dict[str, Any]) -> str:
    """One result of `evaluate` in a line: step 500, lambada: accuracy 0.3256."""
    step = f"step {result.get('step', 0):,}"
    tasks = {name: value for name, value in result.items() if isinstance(value, dict) and "card" in value}
    return f"{step}, {'; '.join(_describe_task(name, task) for name, task in tasks.items())}"


def _describe_task(name: str, task: dict[str, Any]) -> str:
    """The metrics of a task without those of its groups, and what they were measured on."""
    card = task["card"]
    data = [Path(card["file"]).name] if "file" in card else []
    data += [describe_origin(card)] if "split" in card or "text" in card else []
    data += [f"{card['examples']:,} of {card['of']:,} examples"] if "of" in card else []
    origin = f" ({', '.join(data)})" if data else ""
    return f"{name}{origin}: {_format_metrics({key: value for key, value in task.items() if '/' not in key})}"


def _format_metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))


def describe_origin(card: dict[str, Any]) -> str:
    """What `evaluate` measured on: a split, or texts."""
    return ", ".join(card["text"]) if "text" in card else f"{card['split']} split"
