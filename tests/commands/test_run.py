"""The command run: the order of its stages, and the commands that it proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from textmill.commands import run as command
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.planning.verdict import State


def test_torch_is_imported_beside_the_first_stages_and_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def record(name: str) -> Callable[..., Any]:
        return lambda *given, **named: done.append(name)

    def train(*given: Any, **named: Any) -> None:
        raise TextmillError("stop here")

    def start_imports() -> SimpleNamespace:
        done.append("start imports")
        return SimpleNamespace(join=record("wait for imports"))

    monkeypatch.setattr(command, "import_torch_meanwhile", start_imports)
    monkeypatch.setattr(command, "train", train)
    for name in ("prepare", "fit_tokenizer", "tokenize"):
        monkeypatch.setattr(command, name, record(name))
    with pytest.raises(TextmillError, match="stop here"):
        command.run(RunConfig.model_validate({"folder": str(tmp_path), "corpus": {"sources": ["a.txt"]}}))
    assert done == ["start imports", "prepare", "fit_tokenizer", "tokenize", "wait for imports"]


def test_without_a_valid_loss_more_text_is_proposed_and_no_tuning(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "corpus": {"sources": ["a.txt"]}, "train": {"minutes": 1}}
    config = RunConfig.model_validate(settings)
    states: tuple[State, ...] = ("unknown", "limited by the text")
    unknown, limited = (command._improving_commands(config, state, "here") for state in states)
    assert unknown == ["textmill new larger --text 'more texts/*.txt'"]
    assert "textmill tune here --minutes 60" in limited
