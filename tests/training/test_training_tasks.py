"""Tasks during training: the figures of `evaluate`, the best checkpoint by any metric, and early stopping."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kill_train import train_arguments
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.checkpoints.best import BestRule, BestStep, open_best_step
from textmill.checkpoints.folders import find_checkpoint, list_checkpoints
from textmill.commands.evaluate import evaluate
from textmill.commands.report import watch
from textmill.config import EvaluateConfig
from textmill.config.training import BestConfig
from textmill.errors import TextmillError
from textmill.training.loop import train

KEEP = ["train.save_every=2", "train.checkpoints.keep=20", "train.log_every=100", "train.warmup=0"]
STOPS = [*KEEP, "train.evaluate_every=2", "train.best.patience=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    folder = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("tasks") / "root"))
    kings = ["the king", "my lord", "a crown", "sweet love"]
    questions = [
        {"context": f"Who is {number}? It is", "choices": [kings[number % 4], kings[number % 3]], "answer": number % 2}
        for number in range(40)
        if number % 4 != number % 3
    ]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    return folder


def logged(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of tasks, by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if any("/" in name for name in line)}


def tasks_of(root: Path) -> list[str]:
    return [f"train.tasks=[choices:{root / 'quiz.jsonl'},perplexity]", "train.tasks_every=4", "train.tasks_sample=7"]


def test_logged_figures_are_those_of_evaluate(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = root / "tasks"
    config = config_for(root, run, 8, *KEEP, *tasks_of(root), "train.best.metric=choices/acc", "train.evaluate_every=8")
    train(config)
    found = logged(run)
    assert list(found) == [4, 8], "also at steps without a valid loss"
    assert "choices: acc" in capsys.readouterr().out
    for step in (4, 8):
        settings = EvaluateConfig(tasks=config.train.tasks, sample=7, baselines=False)
        result = evaluate(config.model_copy(update={"evaluate": settings}), step)
        wanted = {f"choices/{name}": value for name, value in result["choices"].items() if isinstance(value, float)}
        wanted |= {
            f"perplexity/{name}": value for name, value in result["perplexity"].items() if isinstance(value, float)
        }
        seconds = {name: found[step].pop(name) for name in ("choices/seconds", "perplexity/seconds")}
        assert all(0 < value < 60 for value in seconds.values())
        assert found[step] == {"step": step, **wanted}
    accuracies = {step: line["choices/acc"] for step, line in found.items()}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    checkpoint = find_checkpoint(run, None)
    assert checkpoint is not None
    assert checkpoint.step == best
    assert (run / "best").resolve().name == f"step-{best:07d}"
    capsys.readouterr()
    watch(str(run))
    assert f"best choices/acc {accuracies[best]:.4f} at step {best}" in capsys.readouterr().out


def test_tasks_do_not_change_training(root: Path) -> None:
    with_tasks, without = root / "with", root / "without"
    train(config_for(root, with_tasks, 4, *KEEP, f"train.tasks=choices:{root / 'quiz.jsonl'}", "train.tasks_every=1"))
    train(config_for(root, without, 4, *KEEP))
    weights = [run / "step-0000004" / "model.safetensors" for run in (with_tasks, without)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_early_stopping_ends_a_run_and_resumes_with_its_count(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BestConfig, "highest", True)  # a valid loss that falls is never better than the first one
    run = root / "early"
    train(config_for(root, run, 4, *STOPS, "train.schedule=constant"))
    assert max(list_checkpoints(run)) == 4, "one measurement without a better one is not enough"
    train(config_for(root, run, 40, *STOPS, "train.schedule=constant"))
    assert max(list_checkpoints(run)) == 6
    output = capsys.readouterr().out
    assert "step 6: early stopping: no better valid loss in the last 2 measurements (train.best.patience)" in output
    assert "the best checkpoint is step 2, valid loss" in output
    train(config_for(root, run, 40, *STOPS, "train.schedule=constant"))
    assert "done already" in capsys.readouterr().out
    assert max(list_checkpoints(run)) == 6
    train(config_for(root, run, 40, *STOPS, "train.schedule=constant", "train.best.patience=3"))
    assert max(list_checkpoints(run)) == 8, "more patience goes on"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.best.metric=loss"], r"train\.best\.metric: found 'loss'; give valid_loss, valid_accuracy"),
        (["train.tasks=lambada:nowhere.jsonl"], r"nowhere\.jsonl: no such file"),
        (["train.best.metric=choices/accurracy"], r"'choices/accurracy' is not measured; set train\.tasks"),
        (["QUIZ", "train.best.metric=choices/f1"], r"'choices/f1' is not measured; train\.tasks measures choices/acc"),
    ],
)
def test_mistakes_end_a_run_before_its_first_step(root: Path, settings: list[str], message: str) -> None:
    quiz = f"train.tasks=choices:{root / 'quiz.jsonl'}"
    with pytest.raises(TextmillError, match=message):
        train(config_for(root, root / "mistake", 4, *KEEP, *[quiz if one == "QUIZ" else one for one in settings]))
    assert not (root / "mistake" / "metrics.jsonl").exists()


def test_best_step_counts_measurements_since_the_best() -> None:
    best = open_best_step(BestConfig(metric="quiz/acc", patience=2), {})
    assert best.rule == BestRule("quiz/acc", highest=True)
    for step, value in ((1, 0.5), (2, math.nan), (3, 0.75), (4, 0.75)):
        best = best.add(step, {"quiz/acc": value, "valid_loss": 9.0 - step})
    assert (best.value, best.step, best.waited) == (0.75, 3, 1)
    assert best.add(5, {"valid_loss": 1.0}) == best, "not measured"
    assert not best.is_over(2)
    assert best.add(5, {"quiz/acc": 0.1}).is_over(2)
    assert not best.add(5, {"quiz/acc": 0.1}).is_over(None)
    saved = json.loads(json.dumps(best.save_state()))
    assert open_best_step(BestConfig(metric="quiz/acc"), saved) == best
    assert open_best_step(BestConfig(), saved) == BestStep(BestRule()), "another metric counts from the start"


@pytest.mark.long
def test_adapters_and_two_processes_give_the_same_figures(root: Path) -> None:
    base, quiz = root / "base", f"train.tasks=choices:{root / 'quiz.jsonl'}"
    train(config_for(root, base, 2, *KEEP))
    lora = [*KEEP, quiz, f"model.init_from={base / 'step-0000002'}", "model.lora.rank=2", "train.tasks_every=2"]
    config = config_for(root, root / "lora", 2, *lora)
    train(config)
    wanted = evaluate(config.model_copy(update={"evaluate": EvaluateConfig(tasks=config.train.tasks)}))["choices"]
    assert logged(root / "lora")[2]["choices/bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)
    train(config_for(root, root / "one", 4, *KEEP, *tasks_of(root)))
    words = [*train_arguments(root, root / "two", 4), *KEEP, *tasks_of(root)]
    assert run_together([sys.executable, "-m", "textmill", *words], 2) == "ok"
    one, two = (logged(root / name)[4] for name in ("one", "two"))
    for line in (one, two):
        del line["choices/seconds"], line["perplexity/seconds"]
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "engine"),
    [
        (2, ["engine.mesh.shard=2"]),
        (2, ["engine.mesh.tensor=2"]),
        (2, ["engine.mesh.pipeline=2"]),
        (2, ["engine.kind=deepspeed", "engine.zero=3"]),
        (1, ["engine.kind=jax"]),
    ],
)
def test_other_engines_and_meshes_give_the_same_figures(root: Path, count: int, engine: list[str]) -> None:
    train(config_for(root, root / "plain", 2, *KEEP, *tasks_of(root), "train.tasks_every=2"))
    run = root / "-".join(engine)
    words = [*train_arguments(root, run, 2), *KEEP, *tasks_of(root), "train.tasks_every=2", *engine]
    assert run_together([sys.executable, "-m", "textmill", *words], count) == "ok"
    found, wanted = (
        {name: value for name, value in logged(one)[2].items() if not name.endswith("/seconds")}
        for one in (run, root / "plain")
    )
    assert found == pytest.approx(wanted, rel=1e-4)
