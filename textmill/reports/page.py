"""A report as one HTML file that works offline: data, style and script are inside it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from textmill.reports.curves import Point, reduce_points
from textmill.reports.run_files import RunFiles, flatten
from textmill.reports.texts import describe_evaluation
from textmill.track.console import format_time

MAX_POINTS = 4000
"""Points of a curve; more are averaged, and the file stays small."""
MAX_NOTES, MAX_SAMPLES = 400, 200
DIGITS = 6
FINGERPRINTS = ("tokens", "tokenizer")
"""Inputs that the run recorded by checksum."""
HERE = Path(__file__).parent


def build_page(runs: list[RunFiles]) -> str:
    """The HTML of a report on one run, or on several side by side."""
    names = unique_names(runs)
    data = {
        "runs": [{"name": name, **_describe(run)} for name, run in zip(names, runs, strict=True)],
        "differences": list_differences(runs) if len(runs) > 1 else [],
    }
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    made = f"textmill report, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    # "<" is escaped, so that no text of a run can end the script element.
    texts = {
        "title": html.escape(title),
        "made": html.escape(made),
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "js": (HERE / "page.js").read_text(encoding="utf-8"),
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    page, rest = "", (HERE / "page.html").read_text(encoding="utf-8")
    while "{{" in rest:  # in one pass: a text that is put in is not searched for names
        before, _, rest = rest.partition("{{")
        name, _, rest = rest.partition("}}")
        page += before + texts[name]
    return page + rest


def unique_names(runs: list[RunFiles]) -> list[str]:
    """A name for each run: the short one, or its folder where two are the same."""
    short = [run.name for run in runs]
    return [name if short.count(name) == 1 else str(run.folder) for name, run in zip(short, runs, strict=True)]


def list_differences(runs: list[RunFiles]) -> list[list[str]]:
    """The settings in which runs differ: key, then the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(_text(run.settings.get(key, "not set")) for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1 and not row[0].endswith("folder")]


def _describe(run: RunFiles) -> dict[str, Any]:
    metrics = dict.fromkeys(key for line in run.metrics for key in line if key not in ("step", "change"))
    series = {metric: _rounded(reduce_points(run.points(metric), MAX_POINTS)) for metric in metrics}
    steps = [step for step, _ in run.points("loss")] or [0]
    tokens: list[Point] = [(step, float(run.tokens_after(step))) for step in steps]
    return {
        "folder": str(run.folder),
        "summary": list(_summary(run)),
        "series": {metric: rows for metric, rows in series.items() if rows},
        "tokens": _axis(tokens),
        "seconds": _axis(run.seconds),
        "changes": run.changes,
        "parts": _parts(run),
    }


def _axis(points: Sequence[Point]) -> list[list[float]]:
    return [[*row[:1], float(f"{value:.9g}")] for row in reduce_points(points, 1000) for value in row[3:]]


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    """Step, mean, lowest and highest value; a single point is written once."""
    return [
        [int(x), *(float(f"{value:.{DIGITS}g}") for value in ((mean,) if low == high else (mean, low, high)))]
        for x, mean, low, high in rows
    ]


def _summary(run: RunFiles) -> list[list[str]]:
    found: list[list[str]] = []
    if run.parameters:
        found.append(["parameters", f"{run.parameters:,}"])
    found.append(["steps", f"{run.last_step:,}" + (f" of {run.planned_steps:,}" if run.planned_steps else "")])
    if tokens := run.tokens_after(run.last_step):
        found.append(["tokens", f"{tokens:,}"])
    if run.seconds:
        found.append(["training time", format_time(run.seconds[-1][1])])
        found.append(["tokens per second, last", f"{run.points('tokens_per_second')[-1][1]:,.0f}"])
    if run.best_step is not None:
        best = run.best_values[run.best_step]
        found.append([f"best {run.best_rule.name}, step {run.best_step:,}", f"{best:.4f}"])
    if run.bits_per_byte:
        found.append(["bits per byte, last evaluation", f"{run.bits_per_byte:.4f}"])
    if run.stopped:
        found.append(["stopped", str(run.stopped.get("why", "yes"))])
    return found


def _parts(run: RunFiles) -> list[dict[str, Any]]:
    """The folded parts below the curves; empty ones are left out."""
    notes = [[note["time"], note["text"]] for note in run.notes if "text" in note]
    environments = [note for note in run.notes if "environment" in note]
    parts: list[dict[str, Any]] = [
        {
            "title": "Evaluations",
            "open": True,
            "rows": [row for one in run.evaluations for row in _evaluation_rows(one)],
            "head": ["what", "value"],
        },
        {
            "title": "Samples of fixed prompts",
            "open": True,
            "texts": [
                f"step {one['step']:,}: {one.get('prompt', '')}▸{one.get('text', '')}"
                for one in run.samples[-MAX_SAMPLES:]
            ],
        },
        {
            "title": "Checkpoints",
            "rows": [[step, run.valid_losses.get(step)] for step in run.checkpoints],
            "head": ["step", "valid loss"],
        },
        {
            "title": "Changes in mid-run",
            "rows": [list(change) for change in run.changes],
            "head": ["after step", "what"],
        },
        {"title": "Data", "rows": [[key, _text(value)] for key, value in flatten(run.account).items()]},
        {"title": "Fingerprints", "rows": [[key, run.progress.get("made_from", {}).get(key)] for key in FINGERPRINTS]},
        {"title": "Settings", "rows": [[key, _text(value)] for key, value in run.settings.items()]},
        {"title": "What happened", "rows": notes[-MAX_NOTES:], "head": ["time", "note"]},
        {
            "title": "Environment",
            "rows": [[one["time"], key, value] for one in environments for key, value in one["environment"].items()],
        },
    ]
    return [part for part in parts if part.get("rows") or part.get("texts")]


def _evaluation_rows(one: dict[str, Any]) -> list[list[Any]]:
    flat = flatten({key: value for key, value in one.items() if key != "checkpoint"})
    return [[describe_evaluation(one), ""], *([f"  {key}", _text(value)] for key, value in flat.items())]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
