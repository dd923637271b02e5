"""Mistakes on the command line: one line says what is wrong, the exit code is 2, and no file is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from textmill.cli import main
from textmill.config import RunConfig, TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import fit

GOOD = {"context": "the mill stands by a river", "choices": ["and turns", "its wheel"], "answer": 0}


@pytest.fixture
def project(life: Path, tmp_path: Path) -> Path:
    """A copy of the run, with its config."""
    shutil.copytree(life, tmp_path / "life")
    (tmp_path / "run.yaml").write_text(RunConfig(folder=str(tmp_path / "life")).to_yaml(), encoding="utf-8")
    return tmp_path


def evaluate(project: Path, where: Path, *words: str) -> int:
    task = f"evaluate.tasks=choices:{project / 'quiz.jsonl'}"
    return main(["evaluate", str(where), task, "engine.device=cpu", "engine.precision=fp32", *words])


def write_quiz(project: Path, *items: dict[str, Any]) -> Path:
    path = project / "quiz.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def empty_a_choice(project: Path) -> None:
    write_quiz(project, GOOD, {**GOOD, "choices": ["and turns", " "]})


def lengthen_a_choice(project: Path) -> None:
    write_quiz(project, GOOD, {**GOOD, "choices": ["turns", "turns " * 100]})


def enlarge_the_tokenizer(project: Path) -> None:
    write_quiz(project, GOOD)
    model = project / "model"
    shutil.copytree(project / "life" / "run" / "step-0000123", model)
    (model / "manifest.json").unlink()
    (model / "progress.json").unlink()
    fit(iter([[f"{number} words of another text" for number in range(900)]]), TokenizerConfig(vocab=700)).save(model)


def use_a_bert(project: Path) -> None:
    write_quiz(project, GOOD)
    tokenizer = fit(iter([["another text"]]), TokenizerConfig(vocab=260))
    small = BertConfig(
        vocab_size=tokenizer.vocab,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    BertForMaskedLM(small).save_pretrained(project / "model")
    tokenizer.save(project / "model")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty_a_choice, "quiz.jsonl:2: choice 2 of 2 is empty; give every choice a text"),
        (lengthen_a_choice, "quiz.jsonl:2: a continuation has 1"),
        (use_a_bert, "its tokenizer has no mask token such as [MASK], or no [CLS]; use another"),
        (enlarge_the_tokenizer, "rows; use the tokenizer that the model was trained with"),
    ],
)
def test_one_line_and_no_file(project: Path, make: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make(project)
    capsys.readouterr()
    before = sorted(project.rglob("*"))
    where = project / "model" if (project / "model").exists() else project / "run.yaml"
    assert evaluate(project, where) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("textmill: using ")]
    assert len(lines) == 1, printed.err
    assert message in lines[0]
    assert not printed.out
    assert sorted(project.rglob("*")) == before


def test_a_context_longer_than_the_model_is_reported_and_measured(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_quiz(project, GOOD, {**GOOD, "context": "the mill stands by a river " * 20})
    assert evaluate(project, project / "run.yaml", "--json") == 0
    printed = capsys.readouterr()
    assert "2 of 4 contexts are longer than the model's 24 positions: their first tokens are left out" in printed.err
    assert json.loads(printed.out)["choices"]["card"]["truncated_contexts"] == 2


def test_a_tokenizer_with_another_end_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer fits into the embedding, but is not the one that the model was trained with."""
    write_quiz(project, GOOD)
    model = project / "model"
    shutil.copytree(project / "life" / "run" / "step-0000123", model)
    for name in ("manifest.json", "progress.json"):
        (model / name).unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert evaluate(project, model, "--json") == 0
    assert "check that the tokenizer belongs to the model" in capsys.readouterr().err
