"""The command evaluate: opens a checkpoint, runs the tasks of `evaluate.tasks`, prints and saves their results."""

from __future__ import annotations

import json
from contextlib import closing

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import RunConfig
from textmill.evaluation import format_result, measure, save_result
from textmill.evaluation.task import Result, Scorer, Task
from textmill.evaluation.tasks import open_tasks
from textmill.models import find_run_model, read_shape
from textmill.processes.ranks import Ranks, run_on_all
from textmill.storage.files import format_path
from textmill.tokens.vocabulary.tokenizer import open_tokenizer


def evaluate(config: RunConfig, step: StepChoice | None = None, as_json: bool = False) -> Result:
    """Run every task, print the numbers and how they were measured, and save them in the run; return all results in
    one. Several processes, as a launcher starts them, divide the work."""
    tasks = open_tasks(config.evaluate.tasks)  # fails before anything is loaded
    from textmill.engines.ranks_torch import open_ranks  # torch is loaded only when there is something to measure

    with closing(open_ranks(config.engine.device, config.engine.timeout)) as ranks, ranks.under_watchdog(_end):
        checkpoint = run_on_all(ranks, lambda: find_run_model(config, step))
        scorer = run_on_all(ranks, lambda: _open_scorer(checkpoint, config, ranks))
        results: Result = {}
        for task in tasks:
            results |= run_on_all(ranks, lambda task=task: _run_task(task, scorer, config, ranks, as_json))  # type: ignore[misc]
        if as_json and ranks.first:
            print(json.dumps(results, ensure_ascii=False))
    return results


def _open_scorer(checkpoint: Checkpoint, config: RunConfig, ranks: Ranks) -> Scorer:
    from textmill.engines.scoring.mesh_torch import ScoringMesh
    from textmill.evaluation.scorer_torch import new_scorer
    from textmill.evaluation.share import Share

    mesh, tokenizer = ScoringMesh(config.engine, ranks), open_tokenizer(checkpoint.tokenizer)
    net = mesh.new_net(read_shape(checkpoint.folder), checkpoint.weights(), str(checkpoint.folder))
    return new_scorer(checkpoint, net, tokenizer, config, Share(ranks, *mesh.part))


def _run_task(task: Task, scorer: Scorer, config: RunConfig, ranks: Ranks, as_json: bool) -> Result:
    result = measure(task, scorer, config)
    if ranks.first:
        saved = save_result(config, scorer.checkpoint, task.result_name(config), result)
        if not as_json:
            print(format_result(task, result))
            if saved is not None:
                print(f"Saved in {format_path(saved)}")
    return result


def _end(reason: str) -> None:
    """Nothing to leave behind if a rank dies: a result is written complete or not at all."""
