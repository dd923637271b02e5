"""Tasks of lm-evaluation-harness on a checkpoint, in this process and with textmill's scorer."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.examples import SHOTS_SEED
from textmill.evaluation.metrics import Z
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.task import Measured, Pair, TaskEntry
from textmill.evaluation.tasks.wikitext import rolling_pairs
from textmill.models import find_run_model
from textmill.where import open_where

MAX_NEW_TOKENS = 256
"""lm-eval's own limit for tasks that set none."""
DISABLE_MULTIPROCESSING = "DISABLE_MULTIPROC"
"""The variable with which lm-eval computes in this process only."""
BOOTSTRAPS = 100
"""Resamplings for the error of metrics that are no means."""


class ScorerLM(LM):  # type: ignore[misc]
    """A model as lm-eval calls it: `lm_eval.simple_evaluate(model=ScorerLM(scorer), tasks=[...])`."""

    def __init__(self, scorer: TorchScorer) -> None:
        super().__init__()
        self.scorer = scorer

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, for lm-eval's caches."""
        return self.scorer.tokenizer.fingerprint

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score (context, continuation) texts."""
        scores = self.scorer.score_texts([request.args for request in requests])
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score texts of any length, in windows of the model's positions."""
        tokenizer = self.scorer.tokenizer
        window = self.scorer.positions
        pairs: list[Pair] = []
        text_of_pair: list[int] = []
        for number, ids in enumerate(tokenizer.encode_many([request.args[0] for request in requests])):
            text_pairs = list(rolling_pairs(ids.tolist(), tokenizer.first_id, window, window))
            pairs += text_pairs
            text_of_pair += [number] * len(text_pairs)
        sums = [0.0] * len(requests)
        for number, score in zip(text_of_pair, self.scorer.score_tokens(pairs), strict=True):
            sums[number] += score.log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Write the likeliest text after each prompt; sampling is refused."""
        return [self._write(prompt, dict(settings)) for prompt, settings in (request.args for request in requests)]

    def _write(self, prompt: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise TextmillError("lm-eval: this task samples with a temperature; textmill runs greedy tasks only")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        limit = settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS
        return self.scorer.write_texts([prompt], stops, int(limit))[0]


def open_lm(where: str, settings: Sequence[str] = ()) -> ScorerLM:
    """A run, checkpoint or model folder as a model for lm-eval; settings are `section.key=value`."""
    opened = open_where(where, list(settings))
    checkpoint = find_run_model(opened.config, opened.step)
    return ScorerLM(open_scorer(checkpoint, opened.config.engine, opened.config.evaluate.batch))


@contextmanager
def _one_process() -> Iterator[None]:
    """Keep lm-eval from forking workers for its resamplings: a fork of a process with torch's threads can hang."""
    previous = os.environ.get(DISABLE_MULTIPROCESSING)
    os.environ[DISABLE_MULTIPROCESSING] = "1"
    try:
        yield
    finally:
        del os.environ[DISABLE_MULTIPROCESSING]
        if previous is not None:
            os.environ[DISABLE_MULTIPROCESSING] = previous


def measure(scorer: TorchScorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Run a task, a group or a tag of lm-eval, or FOLDER/NAME of a task file of the user's own."""
    manager, tasks = load_tasks(entry)
    with _one_process():
        output = lm_eval.simple_evaluate(
            model=ScorerLM(scorer),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=settings.shots,
            fewshot_random_seed=SHOTS_SEED,
            limit=settings.sample,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    metrics, intervals = _read_results(output["results"])
    datasets = {_dataset_name(task_config) for task_config in output["configs"].values()}
    sample_counts = output["n-samples"].values()
    card = {
        "protocol": f"lm-eval {lm_eval.__version__}, task {', '.join(output['configs'])}",
        "versions": str(output["versions"]),
        "examples_in_prompt": str(output["n-shot"]),
        "data": ", ".join(sorted(datasets)),
        "examples": sum(counts["effective"] for counts in sample_counts),
        "of": sum(counts["original"] for counts in sample_counts),
        "interval": "95%, normal, from lm-eval's standard error",
    }
    return Measured(metrics, card, intervals)


def _read_results(results: dict[str, dict[str, Any]]) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """Metrics and intervals from lm-eval's keys, which are METRIC,FILTER and METRIC_stderr,FILTER.

    {"lambada": {"acc,none": 0.4, "acc_stderr,none": 0.01}} -> {"acc": 0.4} and {"acc": (0.38, 0.42)}; the task's name
    is put in front if there are several tasks.
    """
    metrics: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for task, values in results.items():
        for key, value in values.items():
            name, _, filter_name = key.partition(",")
            if not isinstance(value, int | float) or "_stderr" in name or not filter_name:
                continue
            label = f"{task}/{name}" if len(results) > 1 else name
            number = float(value) if math.isfinite(value) else None  # such as a perplexity beyond all numbers
            metrics[label if filter_name == "none" else f"{label},{filter_name}"] = number
            error = values.get(f"{name}_stderr,{filter_name}")
            if number is not None and isinstance(error, int | float) and math.isfinite(error):
                intervals[label] = (value - Z * error, value + Z * error)
    return metrics, intervals


def _dataset_name(task_config: dict[str, Any]) -> str:
    return " ".join(str(task_config[key]) for key in ("dataset_path", "dataset_name") if task_config.get(key))


def load_tasks(entry: TaskEntry) -> tuple[Any, list[Any]]:
    """The tasks of a name and where they were found; loading reads their data."""
    if entry.file is None or not entry.file.name:
        raise TextmillError("evaluate.tasks: lm-eval needs a task; write lm-eval:NAME")
    name = entry.file.name
    user_folder = str(entry.file.parent) if entry.file.parent != Path() else None
    manager = TaskManager(include_path=user_folder, include_defaults=user_folder is None)
    if name not in manager.all_tasks:
        similar = difflib.get_close_matches(name, manager.all_tasks, n=1)
        advice = f"did you mean '{similar[0]}'?" if similar else "lm-eval ls tasks lists all"
        raise TextmillError(f"evaluate.tasks: lm-eval has no task '{name}'; {advice}")
    try:
        loaded = manager.load([name])
    except Exception as error:  # whatever the packages below raise: the network, a missing dataset, a script
        reason = (str(error).splitlines() or [""])[0]
        raise TextmillError(
            f"evaluate.tasks: the data of lm-eval:{name} cannot be loaded ({type(error).__name__}: {reason[:300]}); "
            "without a network, run it once on a machine that has one and copy the hub's cache, or use a task that "
            "reads a file"
        ) from None
    group = loaded["groups"].get(name)
    return manager, [group] if group is not None else list(loaded["tasks"].values())
