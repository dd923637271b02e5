"""Multiple choice: ties, damaged weights, groups, folders, per-item logs, names of results, and examples in prompts."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_models import single_process_snapshot
from textmill.checkpoints.folders import Checkpoint
from textmill.checkpoints.writing import write_checkpoint
from textmill.cli import main
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import credit
from textmill.reports.texts import describe_evaluation

ON_CPU = ["engine.device=cpu", "engine.precision=fp32"]
PAIRS = [{"sentence_good": f"the mill {word}", "sentence_bad": f"mill the {word}"} for word in ("turns", "stands")]


def write_lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def changed_model(checkpoint: Checkpoint, folder: Path, value: float, part: str) -> None:
    """The model with one weight filled with a value, as a run with a checkpoint."""
    weights = [(name, np.full_like(values, value) if part in name else values) for name, values in checkpoint.weights()]
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    files = {name: (checkpoint.folder / name).read_bytes() for name in names}
    write_checkpoint(folder, single_process_snapshot(1, weights, [], {"step": 1}, files))


def run(config: RunConfig, *tasks: str, **settings: Any) -> dict[str, Any]:
    return evaluate(config.model_copy(update={"evaluate": EvaluateConfig(tasks=list(tasks), **settings)}))


@pytest.mark.parametrize(
    ("task", "value", "message"),
    [
        ("pairs", math.nan, "its weight 'transformer.ln_f.weight' has values that are not finite"),
        ("lambada", 3e38, "its loss is nan, not a finite number"),  # logits are infinite
        ("perplexity", 3e38, "its loss is nan, not a finite number"),
    ],
)
def test_numbers_that_are_not_finite_are_an_error(
    task: str, value: float, message: str, checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_model(checkpoint, tmp_path / "run", value, "ln_f")
    (tmp_path / "damaged.yaml").write_text(RunConfig(folder=str(tmp_path)).to_yaml())
    file = write_lines(tmp_path / "data.jsonl", *({**pair, "text": "the mill turns"} for pair in PAIRS))
    words = [f"evaluate.text=[{file}]", f"evaluate.tasks={task}"]
    if task != "perplexity":
        words = [f"evaluate.tasks={task}:{file}"]
    assert main(["evaluate", str(tmp_path / "damaged.yaml"), *words, "--json", *ON_CPU]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "NaN" not in printed.out
    assert not (tmp_path / "run" / "evaluation").exists()


def test_a_model_that_cannot_choose_is_right_by_half(checkpoint: Checkpoint, config: RunConfig, tmp_path: Path) -> None:
    """All tokens are equally likely, and both sentences have the same words."""
    changed_model(checkpoint, tmp_path / "run", 0.0, "ln_f")
    file = write_lines(tmp_path / "pairs.jsonl", {"sentence_good": "a mill a", "sentence_bad": "mill a a"})
    train = config.train.model_copy(update={"folder": str(tmp_path / "run")})
    found = run(config.model_copy(update={"train": train}), f"pairs:{file}")["pairs"]
    assert (found["acc"], found["acc_norm"]) == (0.5, 0.5)
    assert found["card"]["ties"].startswith("1; of k equal candidates each counts 1/k")


def test_equal_candidates_share_the_point() -> None:
    assert credit(np.array([1.0, 2.0, 2.0]), 2) == 0.5
    assert credit(np.array([1.0, 2.0, 2.0]), 0) == 0.0
    assert credit(np.array([3.0, 2.0, 2.0]), 0) == 1.0


def test_results_of_other_files_samples_and_protocols_do_not_replace_each_other(
    config: RunConfig, life: Path, tmp_path: Path
) -> None:
    files = [write_lines(tmp_path / name, *PAIRS * count) for name, count in (("a.jsonl", 2), ("b.jsonl", 3))]
    folder = life / "run" / "evaluation"
    before = set(folder.glob("*"))
    for file in files:
        run(config, f"pairs:{file}")
    run(config, f"pairs:{files[0]}", sample=3)
    run(config, f"choices:{write_lines(tmp_path / 'c.jsonl', *quiz(6))}", shots=2)
    run(config, f"choices:{tmp_path / 'c.jsonl'}", shots=1)
    run(config, "perplexity", stride=7)
    run(config, "perplexity", stride=8)
    new = sorted(path for path in folder.glob("*.json") if path not in before)
    assert len(new) == 7
    run(config, f"pairs:{files[0]}")  # the same again
    assert sorted(path for path in folder.glob("*.json") if path not in before) == new
    [sampled] = [path for path in new if "-sample3-" in path.name]
    saved = json.loads(sampled.read_text())["pairs"]
    assert saved["card"]["examples"] == 3
    assert saved["card"]["sha256"][:8] in sampled.name
    assert "items" not in saved
    described = [describe_evaluation(json.loads(path.read_text())) for path in new]
    assert sum("pairs (a.jsonl): acc" in line for line in described) == 1
    assert sum("pairs (a.jsonl, 3 of 4 examples): acc" in line for line in described) == 1
    assert sum("pairs (b.jsonl): acc" in line for line in described) == 1


def quiz(count: int) -> list[dict[str, Any]]:
    words = ["turns", "stands", "river", "wheel", "and", "its"]
    return [{"context": f"the {words[n]}", "choices": ["by", words[n - 1]], "answer": n % 2} for n in range(count)]


def test_each_item_is_logged(config: RunConfig, life: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "logged.jsonl", *quiz(5))
    found = run(config, f"choices:{file}")["choices"]
    [log] = (life / "run" / "evaluation").glob(f"step-0000123-choices-{found['card']['sha256'][:8]}-*.items.jsonl")
    items = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [item["id"] for item in items] == [f"logged.jsonl:{number}" for number in range(1, 6)]
    assert np.mean([item["acc"] for item in items]) == pytest.approx(found["acc"])
    for item in items:
        assert item["prediction"] == int(np.argmax(item["scores"]))
    run(
        config,
        f"choices:{file}",
        f"pairs:{write_lines(tmp_path / 'p.jsonl', *PAIRS)}",
        predictions=str(tmp_path / "all"),
    )
    rows = [json.loads(line) for line in (tmp_path / "all").read_text(encoding="utf-8").splitlines()]
    assert [row["task"] for row in rows] == ["choices"] * 5 + ["pairs"] * 2
    assert rows[0] == items[0]


def test_folders_patterns_and_compressed_files(config: RunConfig, tmp_path: Path) -> None:
    good = {"sentence_good": "the mill turns", "sentence_bad": "mill the turns"}
    data = tmp_path / "data"
    for name, term in (("one", "agreement"), ("two", "agreement"), ("three", "islands")):
        write_lines(data / f"{name}.jsonl", *[{**good, "linguistics_term": term}] * 3)
    (data / "README.md").write_text("not data")
    packed = data / "two.jsonl"
    (data / "two.jsonl.xz").write_bytes(lzma.compress(packed.read_bytes()))
    packed.unlink()
    found = run(config, f"blimp:{data}")["blimp"]
    assert (found["card"]["files"], found["card"]["examples"]) == (3, 9)
    assert {name for name in found if name.startswith("acc/")} == {"acc/agreement", "acc/islands"}
    by_file = run(config, f"pairs:{data / 't*.jsonl*'}")["pairs"]
    assert {name for name in by_file if name.startswith("acc/")} == {"acc/three", "acc/two"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(TextmillError, match="has no file of evaluation data"):
        run(config, f"pairs:{tmp_path / 'empty'}")
    (data / "cut.jsonl.xz").write_bytes((data / "two.jsonl.xz").read_bytes()[:40])
    with pytest.raises(TextmillError, match=r"cut\.jsonl\.xz: the stream is damaged"):
        run(config, f"pairs:{data / 'cut.jsonl.xz'}")


def test_tasks_without_examples_say_that_they_ignore_them(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config, f"lambada:{write_lines(tmp_path / 'l.jsonl', {'text': 'the mill turns'})}", shots=2)
    assert "evaluate.shots: lambada has no examples in its prompts" in capsys.readouterr().err


def test_too_few_examples_are_an_error(config: RunConfig, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "quiz.jsonl", *quiz(3))
    with pytest.raises(TextmillError, match=r"has 3 examples; evaluate\.shots=3 needs at least 4"):
        run(config, f"choices:{file}", shots=3)


def test_the_tasks_are_listed_with_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--list"]) == 0
    listed = capsys.readouterr().out
    for words in ("hellaswag: ", "files: hellaswag_val.jsonl", "github.com/rowanz/hellaswag", "core: ", "choices: "):
        assert words in listed


def test_help_lists_only_what_the_command_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help", "--all"]) == 0
    listed = capsys.readouterr().out
    assert "  train.length=" in listed
    assert "train.learning_rate" not in listed
    assert "engine.zero" not in listed
