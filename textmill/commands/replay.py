"""The command replay: repeat a run from its record, and say whether it is the same bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import OPTIMIZER_MANIFEST, list_checkpoints
from textmill.config import EngineConfig, TrackConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.processes.launch import read_launch
from textmill.reports.run_files import RunFiles, find_run, flatten, read_run
from textmill.storage.files import format_path, read_json
from textmill.storage.stages import MANIFEST, list_changes
from textmill.track.jsonl import environment
from textmill.training.loop import Training, open_training
from textmill.where import Settings, open_where

TIMED = ("tokens_per_second", "seconds", "slowest_rank", "slowest_rank_ratio")
"""Metrics of the clock, by the end of their names."""
SHOWN = 4


def replay(where: str, settings: Settings = (), out: str | None = None) -> Path:
    """Train again with the recorded settings, data and seed, in a new folder, and compare the two runs.

    Raises an error with the first difference. `settings` may name files of the user's own, which are not run from a
    record, and choose another device or mesh.
    """
    folder = find_run(where).resolve()
    recorded = read_run(folder)
    config = open_where(str(folder), settings).config
    _check_repeatable(config.train, recorded)
    copy = Path(out or folder.with_name(f"{folder.name}-replay"))
    train = config.train.model_copy(update={"folder": str(copy.resolve())})
    print(f"replay: {format_path(folder)} again in {format_path(copy)}", flush=True)
    with open_training(config.model_copy(update={"train": train, "track": TrackConfig()})) as run:
        if isinstance(run, Training):
            _check_inputs(recorded, run)
        for step in run:
            if step.number > recorded.last_step:
                break
            step.run()
    launch = read_launch(os.environ)
    if launch is None or launch.rank == 0:
        print(f"replay: {_compare(recorded, read_run(copy), config.engine)}")
    return copy


def _check_repeatable(train: TrainConfig, recorded: RunFiles) -> None:
    if train.minutes is not None:
        raise TextmillError(
            "replay: the length of the run is train.minutes, which depends on how fast the machine was; only runs "
            "whose length is set in steps, epochs, samples or tokens can be repeated"
        )
    if recorded.progress.get("ranges"):
        raise TextmillError(
            "replay: settings of the run were changed in mid-run with --change; only runs with the same settings from "
            "the first step on can be repeated"
        )
    if not recorded.last_step:
        raise TextmillError(f"replay: {format_path(recorded.folder)} has no step yet; there is nothing to compare with")


def _check_inputs(recorded: RunFiles, run: Training) -> None:
    """Refuse to train on other data or settings than those of the record, as far as a checkpoint has them."""
    before = recorded.progress.get("made_from", {})
    if before and (changes := list_changes(before, run.start.made_from)):
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        raise TextmillError(
            f"replay: {format_path(recorded.folder)} was made from other settings or inputs: "
            f"{'; '.join(changes[:SHOWN])}{more}; put them back, or name them, such as tokens.folder=FOLDER or "
            "train.loss=./my_loss.py"
        )


def _compare(recorded: RunFiles, repeated: RunFiles, engine: EngineConfig) -> str:
    """What is the same; an error with the first difference."""
    lines = [_exact(run) for run in (recorded, repeated)]
    steps = sorted(lines[0].keys() | lines[1].keys())
    checkpoints = [list_checkpoints(run.folder) for run in (recorded, repeated)]
    common = sorted(checkpoints[0].keys() & checkpoints[1].keys())
    for step in sorted({*steps, *common}):
        old, new = (one.get(step, {}) for one in lines)
        differences = [_describe(name, old.get(name), new.get(name)) for name in {**old, **new}]
        if step in common:
            differences += _compare_files(checkpoints[0][step], checkpoints[1][step])
        if found := list(filter(None, differences)):
            differing = "; ".join(found[:SHOWN]) + _causes(recorded, engine)
            raise TextmillError(f"replay: the first difference is at step {step:,}: {differing}")
    weights = f"; weights and optimizer state of {len(common)} checkpoints (SHA-256)" if common else ""
    return f"the same, bit by bit: the metrics of {len(steps)} logged steps{weights}"


def _exact(run: RunFiles) -> dict[int, dict[str, Any]]:
    """The metrics of each step, without those of the clock."""
    steps: dict[int, dict[str, Any]] = {}
    for line in run.metrics:
        values = {name: value for name, value in line.items() if name != "step" and not name.endswith(TIMED)}
        steps.setdefault(line["step"], {}).update(values)
    return steps


def _describe(name: str, old: Any, new: Any) -> str | None:
    if old == new:
        return None
    first, second = (f"{value.hex()} ({value:.6g})" if isinstance(value, float) else str(value) for value in (old, new))
    return f"{name} was {first}, is {second}"


def _compare_files(old: Path, new: Path) -> Iterator[str | None]:
    """The tensors of two checkpoints by their recorded checksums, and the exact losses."""
    progress = [read_json(folder / "progress.json") for folder in (old, new)]
    for name in ("loss", "valid_loss"):
        if progress[0][name] != progress[1][name]:
            yield f"{name} in progress.json was {progress[0][name]}, is {progress[1][name]}"
    for manifest in (MANIFEST, OPTIMIZER_MANIFEST):
        files = [read_json(folder / manifest)["files"] for folder in (old, new)]
        for name in sorted({name for one in files for name in one if name.endswith(".safetensors")}):
            sums = [str(one.get(name, {}).get("sha256"))[:12] for one in files]
            if sums[0] != sums[1]:
                yield f"SHA-256 of {name} was {sums[0]}, is {sums[1]}"


def _causes(recorded: RunFiles, engine: EngineConfig) -> str:
    """What may explain a difference: versions, the machine, other settings of the engine, a GPU."""
    then: dict[str, str] = next((note["environment"] for note in recorded.notes if "environment" in note), {})
    changes = [f"{name} {value}, now {new}" for name, new in environment().items() if (value := then.get(name)) != new]
    found = f"; the environment differs: {', '.join(changes)}" if changes and then else ""
    now = flatten({"engine": engine.model_dump(mode="json")})
    for name in now.keys() & recorded.settings.keys():
        if recorded.settings[name] != now[name]:
            found += f"; {name} was {recorded.settings[name]}, is {now[name]}"
    for change in recorded.progress.get("changes", [])[:SHOWN]:
        found += f"; the run went on from step {change['step']:,} with {change['change']}"
    if engine.device != "cpu" and not getattr(engine, "deterministic", False):
        found += "; on a GPU a run is the same only with engine.deterministic=true"
    return found
