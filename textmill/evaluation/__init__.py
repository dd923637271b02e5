"""Evaluation: tasks measure a model with a scorer; their results are printed and saved with how they were measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig
from textmill.errors import warn
from textmill.evaluation.measured_task import ITEMS, MeasuredTask
from textmill.evaluation.task import ItemLog, Result, Scorer
from textmill.evaluation.tasks import open_tasks
from textmill.storage.files import atomic_writer, format_path, write_json


def measure(task: MeasuredTask, scorer: Scorer, config: RunConfig) -> Result:
    """Run one task; its result also says which checkpoint was measured, in which precision and where."""
    made_with = {"precision": scorer.precision, "device": scorer.device}
    values = task.measure(scorer, config)
    return {"checkpoint": str(scorer.checkpoint.folder), "step": scorer.checkpoint.step, **values, **made_with}


def format_result(task: MeasuredTask, result: Result) -> str:
    """The numbers of a task as text, and how they were measured."""
    checkpoint = format_path(Path(result["checkpoint"]))
    model = f"{checkpoint}, step {result['step']:,}, in {result['precision']} on {result['device']}."
    return f"{task.format_table(result)}\n\n{model}\n{task.describe_method(result)}"


def format_tables(tasks: list[str], result: Result) -> str:
    """The tables of tasks, from a result that holds the values of all of them."""
    return "\n\n".join(task.format_table(result) for task in open_tasks(tasks))


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


def take_items(result: Result) -> list[ItemLog]:
    """Remove the per-item logs from a result and return them."""
    tasks = [values for values in result.values() if isinstance(values, dict)]
    return [item for values in tasks for item in values.pop(ITEMS, [])]


def write_items(path: Path, items: Sequence[ItemLog]) -> None:
    """Write a per-item log: JSON lines."""
    with atomic_writer(path) as stream:
        for item in items:
            stream.write(
                json.dumps(item, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"
            )
