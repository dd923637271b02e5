"""Several runs next to each other: a table of what they reached and in which settings they differ, and tests of whether
the differences are more than chance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from textmill.checkpoints.best import BestRule
from textmill.evaluation import ITEMS_ENDING
from textmill.evaluation.data_files import read_items
from textmill.evaluation.measured_task import NOT_PROTOCOL
from textmill.evaluation.paired import compare_groups, compare_items
from textmill.reports.run_files import EVALUATIONS, RunFiles
from textmill.storage.files import hash_json, read_json
from textmill.track.console import format_time

DIGITS = 6
SEED = "train.seed"
OF_THE_MODEL = (
    *("tokenizer", "vocabulary", "positions", "precision", "first_context", "begin_token"),
    *("tokens", "counted", "interval"),
)
"""What a protocol card says about the model: two models may differ in it and still be compared."""


@dataclass
class Comparison:
    """Runs next to each other."""

    head: list[str]
    rows: list[list[str]]
    """One for each run."""
    findings: list[str] = field(default_factory=list)
    """What the tests say, a line each."""


def compare_runs(runs: list[RunFiles]) -> Comparison:
    """The table of the runs, and the tests."""
    names = unique_names(runs)
    differences = list_differences(runs)
    table = Comparison(["run", *COLUMNS, *(row[0] for row in differences)], [])
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        table.rows.append([name, *list_results(run), *(row[1 + number] for row in differences)])
    if len({run.progress.get("made_from", {}).get("tokens") for run in runs}) > 1:
        table.findings.append("the runs have different tokens: their losses are of different texts or tokenizers")
    table.findings += _test_seeds(runs, names, differences)
    others = list(zip(runs, names, strict=True))[1:]
    tests = [line for run, name in others for line in _test_items(runs[0], run, names[0], name)]
    table.findings += tests or ["no evaluation in common: run textmill evaluate on each, to compare them by documents"]
    if len(tests) > 1:
        table.findings.append(f"each p is that of one test: among {len(tests)}, a small one is more often chance")
    return table


COLUMNS = ("steps", "parameters", "tokens", "training time", "best valid loss", "at step", "bits/byte")


def list_results(run: RunFiles) -> list[str]:
    """What a run reached, in the order of COLUMNS."""
    best = BestRule().best_of(run.valid_losses)
    bits = run.bits_per_byte_at(best)
    return [
        f"{run.last_step:,}",
        f"{run.parameters:,}" if run.parameters else "",
        f"{run.tokens_after(run.last_step):,}",
        format_time(run.seconds[-1][1]) if run.seconds else "",
        "" if best is None else f"{run.valid_losses[best]:.4f}",
        "" if best is None else f"{best:,}",
        f"{bits:.4f}" if bits else "",
    ]


def unique_names(runs: list[RunFiles]) -> list[str]:
    """A name for each run: the short one, or its folder where two are the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]


def list_differences(runs: list[RunFiles]) -> list[list[str]]:
    """The settings in which runs differ: key, then the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(format_value(run.settings.get(key, "not set")) for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1 and not row[0].endswith("folder")]


def format_value(value: Any) -> str:
    """A setting or figure as text."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _test_seeds(runs: list[RunFiles], names: list[str], differences: list[list[str]]) -> Iterator[str]:
    """Runs that differ in nothing but their seed are a group; the first one is compared with the others."""
    settings = [row[1:] for row in differences if row[0] != SEED]
    seeds = next((row[1:] for row in differences if row[0] == SEED), [""] * len(runs))
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for number, seed in enumerate(seeds):  # two runs with the same seed are one sample
        groups.setdefault(tuple(row[number] for row in settings), {}).setdefault(seed, number)
    losses: dict[str, list[float]] = {}
    for members in groups.values():
        best = [BestRule().best_of(runs[number].valid_losses) for number in members.values()]
        found = [runs[n].valid_losses[step] for n, step in zip(members.values(), best, strict=True) if step is not None]
        if len(found) > 1:
            losses[f"{names[next(iter(members.values()))]} and {len(found) - 1} more"] = found
    for name, found in losses.items():
        spread = math.sqrt(sum((value - mean(found)) ** 2 for value in found) / (len(found) - 1))
        yield f"{name}, {len(found)} seeds: best valid loss {mean(found):.4f}, standard deviation {spread:.4f}"
    first, *others = losses or [""]
    for other in others:
        test = compare_groups(losses[first], losses[other])
        yield f"best valid loss, {_describe(other, first, test.difference, test.interval, test.p_value)} (Welch's t)"
    if len(groups) > 1 and len(losses) < 2:
        yield (
            "one seed for a setting: whether a setting is better, or a run was lucky, is shown by two or more runs of "
            "each, with other train.seed"
        )


def _test_items(first: RunFiles, second: RunFiles, name: str, other: str) -> Iterator[str]:
    """The evaluations that two runs have in common, paired by documents or examples."""
    logs = [_find_logs(run) for run in (first, second)]
    for key in logs[0]:
        if key not in logs[1]:
            continue
        label, _ = key
        path, result = logs[0][key]
        for metric in _metrics_of(path, result):
            test = compare_items(path, logs[1][key][0], metric, label)
            unit, scale = metric, 1.0
            card = result[label]["card"]
            if label == "perplexity" and card.get("bytes"):
                unit, scale = "bits/byte", card["tokens"] / card["bytes"] / math.log(2)
            interval = (test.interval[0] * scale, test.interval[1] * scale)
            steps = f"steps {result['step']:,} and {logs[1][key][1]['step']:,}"
            measured = f"{label}, {test.items:,} items in common, {steps}: {unit}"
            yield f"{measured}, {_describe(other, name, test.difference * scale, interval, test.p_value)}"


def _describe(other: str, first: str, difference: float, interval: tuple[float, float], p_value: float) -> str:
    low, high = interval
    p = "p < 0.0002" if p_value < 0.0002 else f"p = {p_value:.2g}"
    return f"{other} minus {first}: {difference:+.4f} (95%: {low:+.4f} to {high:+.4f}), {p}"


def _find_logs(run: RunFiles) -> dict[tuple[str, str], tuple[Path, dict[str, Any]]]:
    """The newest per-item log of each task and protocol, with its result."""
    found = {}
    for path in sorted((run.folder / EVALUATIONS).glob(f"*{ITEMS_ENDING}")):
        result = read_json(path.with_name(path.name.removesuffix(ITEMS_ENDING) + ".json"))
        for label, card in _protocols(result):
            found[label, hash_json(card)] = (path, result)
    return found


def _protocols(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks of a result, each with what must be equal in a result that it is compared with."""
    for label, values in result.items():
        if isinstance(values, dict) and "card" in values:
            yield label, {k: v for k, v in values["card"].items() if k not in (*NOT_PROTOCOL, *OF_THE_MODEL)}


def _metrics_of(path: Path, result: dict[str, Any]) -> list[str]:
    """The metrics that a log has for each item and the result in all."""
    _, item = next(iter(read_items(path)), ("", {}))
    values = result[item["task"]]
    return [name for name in item if isinstance(values.get(name), float)]
