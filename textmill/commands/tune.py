"""The command tune: short trials around a project's settings, and a YAML file with the best of them."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from textmill.commands.prepare import prepare
from textmill.config import RunConfig
from textmill.config.own_files import is_own_file
from textmill.config.yaml_text import format_yaml
from textmill.errors import TextmillError
from textmill.planning.project_file import path_in_project
from textmill.planning.trials import MIN_STEPS, Outcome, Result, Trial, describe_value, name_value
from textmill.planning.tuning import FOLDER, Tuning, change_settings, refuse_several_processes
from textmill.storage.files import create_folder, file_lock, format_path, remove_folder, write_text
from textmill.storage.stages import Force
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.start import check_start


def tune(config: RunConfig, minutes: float = 60.0, as_json: bool = False, force: Force = "no") -> dict[str, Any]:
    """Try learning rate, weight decay, width, batch and more, one at a time, and write FOLDER/tuned.yaml.

    A trial is a run with a complete schedule of its own. Finished trials are kept: the same command continues after a
    kill, and more `minutes` add trials.
    """
    started = time.monotonic()
    if minutes <= 0:
        raise TextmillError(f"--minutes: found {minutes:g}; give a number above 0")
    refuse_several_processes()
    check_start(config)
    folder = Path(config.folder) / FOLDER
    create_folder(folder, "folder")
    with (
        file_lock(folder / ".lock", f"{folder}: another process is tuning in this folder; wait for it"),
        redirect_stdout(sys.stderr if as_json else sys.stdout),
    ):
        if force != "no":
            for path in folder.glob("trial*"):
                remove_folder(path) if path.is_dir() else path.unlink()
        if not config.tokens.use:
            for stage in (prepare, fit_tokenizer, tokenize):  # as far as they are not done
                stage(config, "no")
        data = open_splits(config)
        if not data.stores("valid"):
            raise TextmillError("tune: the valid split is empty; use more text, or give it more of corpus.split")
        tuning = Tuning(fill_auto_preset(config), data, minutes, started)
        print(table_head(tuning.unit), flush=True)
        complete = tuning.run(lambda *row: print(table_row(*row), flush=True))
        print("\n".join(describe_outcome(tuning)))
        if not complete:
            print(f"the {minutes:g} minutes are used up; more --minutes add trials")
        written = format_path(write_tuned(tuning))
        best = written if tuning.outcome.changes else format_path(folder.parent)
        print(f"wrote {written}; next: textmill run {shlex.quote(best)}")
    summary = tuning.summary()
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    return summary


TUNED = "tuned.yaml"
RUN_FOLDER = "run-tuned"


def table_head(unit: str) -> str:
    """The titles of the columns."""
    return f"{'trial':>5}  {'setting':<30}  {'value':>9}  {'steps':>8}  {'seconds':>7}  {unit}"


def table_row(number: int, trial: Trial, result: Result, outcome: Outcome) -> str:
    """A finished trial."""
    value = describe_value(trial.changes, trial.setting)
    start = f"{number:>5}  {trial.setting or 'as planned':<30}  {value:>9}  {result.steps:>8,}  {result.seconds:>7.0f}"
    if result.loss is None:
        return f"{start}  failed: {result.error}"
    if name_value(trial.changes, trial.setting) in outcome.skipped:
        return f"{start}  {result.loss:.4f}  not compared: too few steps"
    kept = bool(trial.setting) and outcome.loss == result.loss
    return f"{start}  {result.loss:.4f}{'  kept' if kept else ''}"


def describe_outcome(tuning: Tuning) -> list[str]:
    """What the trials showed, in a few lines."""
    outcome = tuning.outcome
    count = len(tuning.trials)
    if outcome.loss is None or outcome.plan_loss is None:
        return ["tune: no trial was finished"]
    skipped = [
        f"not compared: {value}, because a trial of it has only {steps} steps; at least {MIN_STEPS} are needed: "
        f"--minutes {math.ceil(tuning.minutes * MIN_STEPS / max(1, steps))} --force"
        for value, steps in outcome.skipped.items()
    ]
    limit = f"a gain below {outcome.noise:.4f} is noise: the difference between two seeds, at least 0.002"
    if not outcome.changes:
        return [
            f"tune: after {count} trials the planned settings are the best, {outcome.loss:.4f} {tuning.unit}",
            limit,
            *skipped,
        ]
    gain = outcome.plan_loss - outcome.loss
    lines = [f"tune: {count} trials: {outcome.plan_loss:.4f} -> {outcome.loss:.4f} {tuning.unit} ({gain:.4f} better)"]
    for setting, worth in sorted(outcome.worth.items(), key=lambda one: -one[1]):
        value = describe_value(outcome.changes, setting)
        lines.append(f"  {setting}: " + (f"{value}, worth {worth:.4f}" if worth else "as planned"))
    return [*lines, limit, *skipped]


def write_tuned(tuning: Tuning) -> Path:
    """Write the project's settings with the best changes; the run gets a folder of its own."""
    config = tuning.config
    path = Path(tuning.config.folder) / TUNED
    best = change_settings(config, tuning.outcome.changes)
    notes = "\n".join(f"# {line}".rstrip() for line in [*describe_outcome(tuning), "", *_rows(tuning)])
    head = f"# Settings that `textmill tune` found; start them with: textmill run {shlex.quote(format_path(path))}\n"
    write_text(path, f"{head}#\n{notes}\n{format_yaml(_tree(best))}")
    return path


def _rows(tuning: Tuning) -> list[str]:
    seen = Outcome(loss=None)
    return [
        table_head(tuning.unit),
        *(table_row(number, trial, result, seen) for number, (trial, result) in enumerate(tuning.trials, 1)),
    ]


def _tree(config: RunConfig) -> dict[str, Any]:
    """The settings that the user or a trial set; paths in and near the project are relative to it."""
    root = Path(config.folder)
    tree: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    tree = {"folder": ".", **{name: section for name, section in tree.items() if name != "folder"}}
    for section in ("corpus", "tokenizer", "tokens"):
        if getattr(config, section).folder:
            tree[section]["folder"] = os.path.relpath(getattr(config, section).folder, root)
    if sources := tree.get("corpus", {}).get("sources"):
        tree["corpus"]["sources"] = [path_in_project(one, root) if os.path.isabs(one) else one for one in sources]
    for section in ("corpus", "model", "train"):
        for key, value in tree.get(section, {}).items():
            if isinstance(value, str) and is_own_file(value):
                tree[section][key] = path_in_project(value, root)
    tree["train"] = {**tree.get("train", {}), "folder": RUN_FOLDER}
    return tree
