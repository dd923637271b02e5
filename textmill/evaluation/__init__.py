"""The command evaluate: opens a checkpoint, runs the tasks of `evaluate.tasks`, prints and saves their results."""

from __future__ import annotations

import json
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import RunConfig
from textmill.errors import warn
from textmill.evaluation.task import Result, Scorer, Task
from textmill.evaluation.tasks import open_tasks
from textmill.models import find_run_model
from textmill.storage.files import format_path, write_json


def evaluate(config: RunConfig, step: StepChoice | None = None, as_json: bool = False) -> Result:
    """Run every task, print the numbers and how they were measured, and save them in the run; return all results in
    one."""
    tasks = open_tasks(config.evaluate.tasks)  # fails before anything is loaded
    from textmill.evaluation.scorer_torch import open_scorer  # torch is loaded only when there is something to measure

    checkpoint = find_run_model(config, step)
    scorer = open_scorer(checkpoint, config.engine, config.evaluate.batch)
    results: Result = {}
    for task in tasks:
        result = _measure(task, scorer, config)
        saved = _save(config, checkpoint, task.result_name(config), result)
        if not as_json:
            print(f"{task.format_table(result)}\n\n{_describe(task, result)}")
            if saved is not None:
                print(f"Saved in {format_path(saved)}")
        results |= result
    if as_json:
        print(json.dumps(results, ensure_ascii=False))
    return results


def format_tables(tasks: list[str], result: Result) -> str:
    """The tables of tasks, from a result that holds the values of all of them."""
    return "\n\n".join(task.format_table(result) for task in open_tasks(tasks))


def _measure(task: Task, scorer: Scorer, config: RunConfig) -> Result:
    # A task that reports precision and device itself decides where they are in the result.
    made_with = {"precision": scorer.precision, "device": scorer.device}
    values = task.measure(scorer, config)
    return {"checkpoint": str(scorer.checkpoint.folder), "step": scorer.checkpoint.step, **values, **made_with}


def _describe(task: Task, result: Result) -> str:
    checkpoint = format_path(Path(result["checkpoint"]))
    model = f"{checkpoint}, step {result['step']:,}, in {result['precision']} on {result['device']}."
    return f"{model}\n{task.describe_method(result)}"


def _save(config: RunConfig, checkpoint: Checkpoint, name: str, result: Result) -> Path | None:
    """Write a result into the checkpoint's run; a model without a run keeps its folder unchanged."""
    run = config.folder_of("train")
    if not checkpoint.progress or checkpoint.folder.parent.resolve() != run.resolve():
        return None
    path = run / "evaluation" / f"step-{checkpoint.step:07d}-{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    except OSError as error:
        warn(f"{format_path(path)}: the result is not saved ({error.strerror})")
        return None
    return path
