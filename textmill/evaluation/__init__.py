"""Evaluation: tasks measure a model with a scorer; their results are printed and saved with how they were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import warn
from textmill.evaluation.measured_task import format_card, format_metrics
from textmill.evaluation.task import ItemLog, Result, tasks_of
from textmill.storage.files import atomic_writer, format_path, write_json


def new_result(checkpoint: Checkpoint, found: dict[str, Result]) -> Result:
    """A result: the checkpoint that was measured, and what its tasks found by their labels."""
    return {"checkpoint": str(checkpoint.folder), "step": checkpoint.step, **found}


def format_result(result: Result) -> str:
    """The metrics of the tasks of a result, the checkpoint that was measured, and how."""
    cards = "\n\n".join(format_card(found["card"]) for found in tasks_of(result).values())
    return f"{format_tables(result)}\n\n{format_path(Path(result['checkpoint']))}, step {result['step']:,}\n{cards}"


def format_tables(result: Result) -> str:
    """The metrics of the tasks of a result."""
    return "\n\n".join(format_metrics(label, found) for label, found in tasks_of(result).items())


def save_result(run: Path, checkpoint: Checkpoint, name: str, result: Result) -> Path | None:
    """Write a result into the checkpoint's run; a model without a run keeps its folder unchanged."""
    if not belongs_to(checkpoint, run):
        return None
    path = result_path(run, checkpoint, name)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        warn(f"{format_path(path)}: the result is not saved ({error.strerror})")
        return None
    return path


def belongs_to(checkpoint: Checkpoint, run: Path) -> bool:
    """Whether a checkpoint is one of a run's own."""
    return bool(checkpoint.progress) and checkpoint.folder.parent.resolve() == run.resolve()


def result_path(run: Path, checkpoint: Checkpoint, name: str, ending: str = ".json") -> Path:
    """The file of a result in its run."""
    return run / "evaluation" / f"step-{checkpoint.step:07d}-{name}{ending}"


ITEMS_ENDING = ".items.jsonl"


def write_items(path: Path, items: Iterable[ItemLog]) -> None:
    """Write a per-item log: JSON lines."""
    with atomic_writer(path) as stream:
        for item in items:
            stream.write(
                json.dumps(item, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"
            )
