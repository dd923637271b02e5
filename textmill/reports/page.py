"""A report as one HTML file that works offline: data, style and script are inside it.

The page is page.html with its placeholders filled: {{css}} is page.css, {{js}} page.js, {{data}} the runs as JSON, from
which the script draws curves and tables.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from textmill.corpus.accounts import format_count
from textmill.evaluation.metrics import format_number
from textmill.reports.comparison import compare_runs, format_value, unique_names
from textmill.reports.curves import Point, reduce_points
from textmill.reports.run_files import RunFiles, flatten, perplexity_card
from textmill.reports.texts import describe_evaluation, describe_origin
from textmill.track.console import format_time

MAX_POINTS = 4000
"""Points of a curve; more are averaged, and the file stays small."""
MAX_NOTES = 400
MAX_SAMPLES = 200
FINGERPRINTS = ("tokens", "tokenizer")
"""Inputs that the run recorded by checksum."""
SOURCE_COUNTS = ("documents", "tokens", "bytes")
HERE = Path(__file__).parent
PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


def build_page(runs: list[RunFiles]) -> str:
    """The HTML of a report on one run, or on several side by side."""
    names = unique_names(runs)
    data = {
        "runs": [{"name": name, **_describe(run)} for name, run in zip(names, runs, strict=True)],
        "comparison": asdict(compare_runs(runs)) if len(runs) > 1 else None,
    }
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    made = f"textmill report, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    values = {
        "title": html.escape(title),
        "made": html.escape(made),
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "js": (HERE / "page.js").read_text(encoding="utf-8"),
        # "<" is escaped, so that no text of a run can end the script element.
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass, so that a value is not searched for placeholders.
    return PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _describe(run: RunFiles) -> dict[str, Any]:
    """A run as the script of the page reads it."""
    metrics = dict.fromkeys(key for line in run.metrics for key in line if key not in ("step", "change"))
    series = {metric: _series_rows(run.points(metric)) for metric in metrics}
    steps = [step for step, _ in run.points("loss")] or [0]
    tokens: list[Point] = [(step, float(run.tokens_after(step))) for step in steps]
    return {
        "folder": str(run.folder),
        "summary": _summary(run),
        "series": {metric: rows for metric, rows in series.items() if rows},
        "tokens": _axis_rows(tokens),
        "seconds": _axis_rows(run.seconds),
        "changes": run.changes,
        "baselines": baselines_of(run),
        "parts": _sections(run),
    }


def _axis_rows(points: Sequence[Point]) -> list[list[float]]:
    """[step, value] of some points: how the script turns steps into tokens or seconds, which only grow."""
    return [[step, _round(highest, 9)] for step, _, _, highest in reduce_points(points, 1000)]


def _series_rows(points: Sequence[Point]) -> list[list[float]]:
    """[step, mean, lowest, highest value] of a metric; where all are equal, [step, value]."""
    rows = []
    for step, mean, lowest, highest in reduce_points(points, MAX_POINTS):
        values = [mean] if lowest == highest else [mean, lowest, highest]
        rows.append([int(step), *(_round(value, 6) for value in values)])
    return rows


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _summary(run: RunFiles) -> list[list[str]]:
    """The table at the top: [name, value]."""
    rows: list[list[str]] = []
    if run.parameters:
        rows.append(["parameters", f"{run.parameters:,}"])
    rows.append(["steps", f"{run.last_step:,}" + (f" of {run.planned_steps:,}" if run.planned_steps else "")])
    if tokens := run.tokens_after(run.last_step):
        rows.append(["tokens", f"{tokens:,}"])
    if run.seconds:
        rows.append(["training time", format_time(run.seconds[-1][1])])
        rows.append(["tokens per second, last", f"{run.points('tokens_per_second')[-1][1]:,.0f}"])
    if run.best_step is not None:
        best = run.best_values[run.best_step]
        rows.append([f"best {run.best_rule.name}, step {run.best_step:,}", f"{best:.4f}"])
    if bits := run.bits_per_byte_at(run.best_step):
        rows.append([f"bits per byte of the valid split, step {run.best_step:,}", f"{bits:.4f}"])
    if run.stopped:
        rows.append(["stopped", str(run.stopped.get("why", "yes"))])
    return rows


def _sections(run: RunFiles) -> list[dict[str, Any]]:
    """The sections below the curves, most of them folded; empty ones are left out."""
    evaluations = [row for result in run.evaluations for row in _evaluation_rows(result)]
    samples = [
        f"step {sample['step']:,}: {sample.get('prompt', '')}▸{sample.get('text', '')}"
        for sample in run.samples[-MAX_SAMPLES:]
    ]
    checkpoints = [[step, run.valid_losses.get(step)] for step in run.checkpoints]
    changes = [list(change) for change in run.changes]
    sources = [
        [f"{name}, {split}", *(f"{counts[key]:,}" for key in SOURCE_COUNTS)]
        for name, splits in run.tokens_by_source.items()
        for split, counts in splits.items()
    ]
    data = [[key, format_value(value)] for key, value in flatten(shorten_account(run.account)).items()]
    fingerprints = [[key, run.progress.get("made_from", {}).get(key)] for key in FINGERPRINTS]
    settings = [[key, format_value(value)] for key, value in run.settings.items()]
    notes = [[note["time"], note["text"]] for note in run.notes if "text" in note]
    environments = [
        [note["time"], key, value] for note in run.notes for key, value in note.get("environment", {}).items()
    ]
    sections: list[dict[str, Any]] = [
        *result_sections(run),
        {"title": "Evaluations with their protocol", "rows": evaluations, "head": ["what", "value"]},
        {"title": "Samples of fixed prompts", "open": True, "texts": samples},
        {"title": "Checkpoints", "rows": checkpoints, "head": ["step", "valid loss"]},
        {"title": "Changes in mid-run", "rows": changes, "head": ["after step", "what"]},
        {"title": "Tokens by source", "rows": sources, "head": ["source", *SOURCE_COUNTS]},
        {"title": "Data", "rows": data},
        {"title": "Fingerprints", "rows": fingerprints},
        {"title": "Settings", "rows": settings},
        {"title": "What happened", "rows": notes[-MAX_NOTES:], "head": ["time", "note"]},
        {"title": "Environment", "rows": environments},
    ]
    return [section for section in sections if section.get("rows") or section.get("texts")]


def _evaluation_rows(result: dict[str, Any]) -> list[list[Any]]:
    values = flatten({key: value for key, value in result.items() if key != "checkpoint"})
    return [[describe_evaluation(result), ""], *([f"  {key}", format_value(value)] for key, value in values.items())]


COUNTING = {"bigram": "counting pairs of tokens (bigram)", "unigram": "counting tokens (unigram)"}
UNITS = ("document", "token", "byte", "conversation", "assistant token")
"""What a protocol card counts."""
SHOWN_SOURCES = 20
"""Files of the corpus that a page names."""


def result_sections(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The sections that come first: verdict, tables of figures, texts."""
    step = str(run.summary.get("inputs", {}).get("step", "")).removeprefix("step-").lstrip("0")
    yield {"title": f"Verdict at step {step}", "open": True, "texts": run.summary.get("verdict", [])}
    for result in run.evaluations:
        if values := result.get("perplexity"):
            rows = [[name, format_number(name, value)] for name, value in values.items() if isinstance(value, float)]
            yield {"title": _evaluation_title(result), "open": True, "rows": rows, "head": ["metric", "value"]}
    texts = run.summary.get("texts", [])
    yield {"title": f"Texts of the model at step {step}, not selected", "open": True, "texts": texts}


def baselines_of(run: RunFiles) -> dict[str, float]:
    """Bits per byte of models that count, on the valid split, by name."""
    valid = [one["perplexity"] for one in run.evaluations if perplexity_card(one).get("split") == "valid"]
    found = {title: valid[-1].get(f"bits_per_byte/{name}") for name, title in COUNTING.items()} if valid else {}
    return {name: bits for name, bits in found.items() if bits}


def shorten_account(account: dict[str, Any]) -> dict[str, Any]:
    """The account of a corpus with the files that most records came from; of thousands nobody reads all."""
    sources = account.get("by_source")
    if not isinstance(sources, dict) or len(sources) <= SHOWN_SOURCES:
        return account
    largest = sorted(sources, key=lambda name: -sources[name].get("records", 0))[:SHOWN_SOURCES]
    others = f"{len(sources) - SHOWN_SOURCES:,}, in corpus/account.json"
    return {**account, "by_source": {name: sources[name] for name in largest}, "other_sources": others}


def _evaluation_title(result: dict[str, Any]) -> str:
    """On what an evaluation was done: "Measured at step 500 on the valid split: 12 documents, 3,456 tokens"."""
    card = perplexity_card(result)
    counts = [format_count(card[key], unit) for unit in UNITS if (key := f"{unit}s".replace(" ", "_")) in card]
    return f"Measured at step {result.get('step') or 0:,} on the {describe_origin(card)}: {', '.join(counts)}"
