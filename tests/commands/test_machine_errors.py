"""Read-only and full disks, absurd sizes and files that shrink are reported in one line, not with a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.kill_train import train_arguments
from tests.support.small_runs import config_for
from textmill import cli, evaluation
from textmill.checkpoints.folders import list_checkpoints
from textmill.commands.evaluate import evaluate
from textmill.errors import TextmillError
from textmill.storage import files
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.loader import Batches
from textmill.training.loop import train

SMALL = ("train.evaluate_batches=1", "train.warmup=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("machine") / "root"))


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """A run of two steps."""
    return train(config_for(root, root / "trained", 2, *SMALL))


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.EROFS, 2, "set another folder"),
        (errno.EACCES, 2, "set another folder"),
        (errno.ENOSPC, 75, "free some disk space"),
    ],
)
def test_a_disk_that_cannot_be_written_is_reported_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, advice: str
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    assert cli.main([*train_arguments(root, root / "refused", 4), *SMALL]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"refused/.lock: cannot be {'written' if code == 75 else 'used'} ({os.strerror(number)}); " in error
    assert advice in error


def test_evaluate_prints_what_it_cannot_save(
    root: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(evaluation, "write_json", refuse)
    result = evaluate(config_for(root, trained, 2, "evaluate.split=valid", *SMALL), as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert re.search(
        r"step-0000002-perplexity-valid-\w+\.json: the result is not saved \(Read-only file system\)", printed.err
    )


def test_a_batch_beyond_the_memory_is_refused(root: Path) -> None:
    with pytest.raises(
        TextmillError, match=r"train\.batch: 1,000,000,000,000 samples of 32 tokens need .* GB; lower it"
    ):
        train(config_for(root, root / "huge", 4, "train.batch=1000000000000", *SMALL))


@pytest.mark.parametrize("changes", [{"n_layer": 10**9}, {"vocab_size": 10**12}, {"n_positions": 10**9}])
def test_an_absurd_model_is_refused_as_a_start(
    root: Path, trained: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(list_checkpoints(trained)[2] / name, folder)
    config = json.loads((list_checkpoints(trained)[2] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(TextmillError, match=r"config\.json and the weights disagree"):
        train(config_for(root, tmp_path / "run", 4, f"model.init_from={folder}", *SMALL))


def test_a_store_that_is_truncated_during_the_run_ends_it_with_a_message(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))

    read = Batches.batch_at

    def read_and_truncate(self: Batches, step: int, part: slice) -> Batch:
        batch = read(self, step, part)
        if step == 2:
            os.truncate(copy / "tokens" / "train.bin", 64)
        return batch

    monkeypatch.setattr(Batches, "batch_at", read_and_truncate)
    with pytest.raises(TextmillError, match=r"train\.bin.*(was truncated from .* to 64 bytes|has 64 bytes)"):
        train(config_for(copy, copy / "run", 400, *SMALL))


def test_in_a_log_of_both_streams_the_error_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        print("import: done")
        raise TextmillError("tokenizer.use: is not set")

    log = io.BytesIO()
    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(log, write_through=True))
    assert cli.main(["train"]) == 2
    assert log.getvalue().splitlines() == [b"import: done", b"textmill: tokenizer.use: is not set"]
