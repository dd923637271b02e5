"""The command evaluate: opens a checkpoint, runs the tasks of `evaluate.tasks`, prints and saves their results."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import CorpusConfig, EngineConfig, EvaluateConfig, RunConfig
from textmill.errors import TextmillError, warn
from textmill.evaluation import (
    ITEMS_ENDING,
    belongs_to,
    format_result,
    new_result,
    result_path,
    save_result,
    write_items,
)
from textmill.evaluation.data_files import name_of_texts
from textmill.evaluation.measured_task import MeasuredTask, check_objective
from textmill.evaluation.split_tokens import check_texts
from textmill.evaluation.task import ItemLog, Result, Scorer
from textmill.evaluation.tasks import open_tasks
from textmill.models import Shape, find_run_model, label_head_of, open_family, read_shape
from textmill.processes.ranks import Ranks, run_on_all
from textmill.storage.files import check_file_name, format_path, hash_json, make_folder_for, write_bytes
from textmill.tokens.vocabulary.tokenizer import open_tokenizer


def evaluate(config: RunConfig, step: StepChoice | None = None, as_json: bool = False) -> Result:
    """Run every task, print the numbers and how they were measured, and save them in the run; return all results in
    one. Several processes, as a launcher starts them, divide the work."""
    tasks = open_tasks(config.evaluate.tasks)  # fails before anything is loaded
    if config.evaluate.predictions:
        make_folder_for(Path(config.evaluate.predictions), "evaluate.predictions")
    from textmill.engines.ranks_torch import open_ranks  # torch is loaded only when there is something to measure

    with closing(open_ranks(config.engine.device, config.engine.timeout)) as ranks, ranks.under_watchdog(_end):
        checkpoint = run_on_all(ranks, lambda: find_run_model(config, step))
        if label_head_of(read_shape(checkpoint.folder)):
            return run_on_all(ranks, lambda: _evaluate_labels(checkpoint, config, ranks, as_json))
        scorer = run_on_all(ranks, lambda: _open_scorer(checkpoint, config.engine, config.evaluate.batch, ranks))
        for task in tasks:
            check_objective(task, scorer.objective, scorer.checkpoint.folder)
        results: Result = {}
        items: list[ItemLog] = []
        for task in tasks:
            result, task_items = run_on_all(ranks, lambda task=task: _run_task(task, scorer, config, ranks, as_json))  # type: ignore[misc]
            results |= result
            items += task_items
        if ranks.first and config.evaluate.predictions:
            write_items(Path(config.evaluate.predictions), items)
        if as_json and ranks.first:
            print(json.dumps(results, ensure_ascii=False, allow_nan=False))
    return results


def check_evaluation(settings: EvaluateConfig, corpus: CorpusConfig, shape: Shape, length: int | None) -> None:
    """Refuse settings, tasks, data and texts with which a model of this shape, which need not exist yet, could not be
    evaluated; `length` is that of its training."""
    if label_head := label_head_of(shape):
        _refuse_tasks(settings)
        if settings.text:
            from textmill.evaluation.labelled.measuring import open_examples

            for _ in open_examples(settings, corpus, Path(), label_head[0]):
                pass
    else:
        for task in open_tasks(settings.tasks):
            check_objective(task, open_family(shape.family).OBJECTIVE, f"model.family: {shape.family}")
            task.check(settings, shape.positions, length)
        if settings.text:
            check_texts(settings.text, corpus)
    if settings.predictions:
        check_file_name(Path(settings.predictions), "evaluate.predictions")


def _refuse_tasks(settings: EvaluateConfig) -> None:
    if settings.tasks != EvaluateConfig().tasks:
        raise TextmillError("evaluate.tasks: a model with a finetuned head is measured on its own task; remove it")


def _evaluate_labels(checkpoint: Checkpoint, config: RunConfig, ranks: Ranks, as_json: bool) -> Result:
    """Predict and measure with the finetuned head of a model."""
    from textmill.evaluation.labelled.measuring import measure_labels
    from textmill.evaluation.labelled.predictor_torch import Predictor

    _refuse_tasks(config.evaluate)
    for key in ("sample", "window", "stride"):
        if getattr(config.evaluate, key) is not None:
            warn(f"evaluate.{key}: is ignored: with a finetuned head all examples are measured, as they were trained")
    if ranks.world > 1:
        raise TextmillError("evaluate: a model with a finetuned head is evaluated by one process; start only one")
    run = config.folder_of("train")
    task, _ = label_head_of(read_shape(checkpoint.folder)) or ("", ())
    settings = config.evaluate
    measured_on = name_of_texts(settings.text) if settings.text else settings.split
    protocol = [config.train.length, config.tokens.overlap, config.engine.precision]
    name = f"{task}-{measured_on}-{hash_json(protocol)[:6]}"
    predictions: Path | None = None
    if config.evaluate.predictions:
        predictions = Path(config.evaluate.predictions)
    elif belongs_to(checkpoint, run):
        ending = "json" if task == "question-answering" else "jsonl"
        predictions = result_path(run, checkpoint, name, f".predictions.{ending}")
    predictor = Predictor(
        checkpoint,
        config.engine,
        batch=config.evaluate.batch,
        length=config.train.length,
        overlap=config.tokens.overlap,
    )
    measured = measure_labels(config.evaluate, config.corpus, config.folder_of("corpus"), predictor, predictions)
    result = new_result(checkpoint, measured)
    saved = save_result(config.folder_of("train"), checkpoint, name, result)
    if as_json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
        return result
    print(format_result(result))
    if saved is not None:
        print(f"Saved in {format_path(saved)}")
    return result


def _open_scorer(checkpoint: Checkpoint, engine: EngineConfig, batch: int, ranks: Ranks) -> Scorer:
    from textmill.engines.scoring_torch import ScoringMesh
    from textmill.evaluation.scorer_torch import new_scorer
    from textmill.evaluation.task import Share

    mesh = ScoringMesh(engine, ranks)
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    net = mesh.new_net(read_shape(checkpoint.folder), checkpoint.weights(), str(checkpoint.folder))
    return new_scorer(checkpoint, net, tokenizer, engine.precision, batch, Share(ranks, *mesh.part))


def _run_task(
    task: MeasuredTask, scorer: Scorer, config: RunConfig, ranks: Ranks, as_json: bool
) -> tuple[Result, list[ItemLog]]:
    """Measure a task, print and save its result; return it and what the model answered to each example."""
    found, items = task.measure(scorer, config)
    result = new_result(scorer.checkpoint, found)
    if ranks.first:
        run = config.folder_of("train")
        name = task.result_name(result)
        saved = save_result(run, scorer.checkpoint, name, result)
        if saved is not None and items and not config.evaluate.predictions:
            write_items(result_path(run, scorer.checkpoint, name, ITEMS_ENDING), items)
        if saved is not None and task.entry.code:  # to be read; nothing executes it
            write_bytes(result_path(run, scorer.checkpoint, name, ".py.txt"), [task.entry.code.source])
        if not as_json:
            print(format_result(result))
            if saved is not None:
                print(f"Saved in {format_path(saved)}")
    return result, items


def _end(reason: str) -> None:
    """Nothing to leave behind if a rank dies: a result is written complete or not at all."""
