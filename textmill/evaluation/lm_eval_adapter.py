"""Tasks of lm-evaluation-harness on a checkpoint, in this process and with textmill's scorer."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.greedy_torch import write_greedily
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.statistics import Z
from textmill.evaluation.task import Measured, Pair, TaskEntry
from textmill.evaluation.tasks.wikitext import rolling_pairs
from textmill.models import find_run_model
from textmill.where import open_where

MAX_NEW_TOKENS = 256
"""lm-eval's own limit for tasks that set none."""
FORKS_NOTHING = "DISABLE_MULTIPROC"
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
        tokenizer, window = self.scorer.tokenizer, self.scorer.positions
        pairs: list[Pair] = []
        texts: list[int] = []
        for number, ids in enumerate(tokenizer.encode_many([request.args[0] for request in requests])):
            own = list(rolling_pairs(ids.tolist(), tokenizer.end, window, window))
            pairs += own
            texts += [number] * len(own)
        sums = [0.0] * len(requests)
        for number, score in zip(texts, self.scorer.score_tokens(pairs), strict=True):
            sums[number] += score.log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Write the likeliest text after each prompt; sampling is refused."""
        return [self._write(prompt, dict(settings)) for prompt, settings in (request.args for request in requests)]

    def _write(self, prompt: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise TextmillError("lm-eval: this task samples with a temperature; textmill runs greedy tasks only")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        limit = settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS
        return write_greedily(self.scorer, prompt, stops, int(limit))


def open_lm(where: str, settings: Sequence[str] = ()) -> ScorerLM:
    """A run, checkpoint or model folder as a model for lm-eval; settings are `section.key=value`."""
    opened = open_where(where, list(settings))
    checkpoint = find_run_model(opened.config, opened.step)
    return ScorerLM(open_scorer(checkpoint, opened.config.engine, opened.config.evaluate.batch))


@contextmanager
def _one_process() -> Iterator[None]:
    """Keep lm-eval from forking workers for its resamplings: a fork of a process with torch's threads can hang."""
    before = os.environ.get(FORKS_NOTHING)
    os.environ[FORKS_NOTHING] = "1"
    try:
        yield
    finally:
        del os.environ[FORKS_NOTHING]
        if before is not None:
            os.environ[FORKS_NOTHING] = before


def measure(scorer: TorchScorer, config: RunConfig, entry: TaskEntry) -> Measured:
    """Run a task, a group or a tag of lm-eval, or FOLDER/NAME of a task file of the user's own."""
    if entry.file is None or not entry.file.name:
        raise TextmillError("evaluate.tasks: lm-eval needs a task; write lm-eval:NAME")
    manager, tasks = _load(entry.file)
    with _one_process():
        found = lm_eval.simple_evaluate(
            model=ScorerLM(scorer),
            tasks=tasks,
            task_manager=manager,
            limit=config.evaluate.sample,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    metrics: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float]] = {}
    several = len(found["results"]) > 1
    for task, values in found["results"].items():
        for key, value in values.items():
            name, _, rule = key.partition(",")
            if not isinstance(value, int | float) or "_stderr" in name or not rule:
                continue
            label = f"{task}/{name}" if several else name
            metrics[label + ("" if rule == "none" else f",{rule}")] = float(value)
            if isinstance(error := values.get(f"{name}_stderr,{rule}"), int | float):
                intervals[label] = (value - Z * error, value + Z * error)
    card = {
        "protocol": f"lm-eval {lm_eval.__version__}, task {', '.join(found['configs'])}",
        "versions": str(found["versions"]), "examples_in_prompt": str(found["n-shot"]),
        "data": ", ".join(sorted({_data_of(one) for one in found["configs"].values()})),
        "examples": sum(one["effective"] for one in found["n-samples"].values()),
        "of": sum(one["original"] for one in found["n-samples"].values()),
        "interval": "95%, normal, from lm-eval's standard error",
    }  # fmt: skip
    return Measured(metrics, card, intervals)


def _data_of(task: dict[str, Any]) -> str:
    return " ".join(str(task[key]) for key in ("dataset_path", "dataset_name") if task.get(key))


def _load(file: Path) -> tuple[Any, list[Any]]:
    """The tasks of a name and where they were found; loading reads their data."""
    name = file.name
    own = str(file.parent) if file.parent != Path() else None
    manager = TaskManager(include_path=own, include_defaults=own is None)
    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, n=1)
        advice = f"did you mean '{near[0]}'?" if near else "lm-eval ls tasks lists all"
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
