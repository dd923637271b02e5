"""Shell completion, in a real bash."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.cli import main
from textmill.commands.completion import build_script, values_of_keys
from textmill.commands.table import COMMANDS
from textmill.config import SIZES
from textmill.config.load import build_config, parse_settings
from textmill.errors import TextmillError

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "textmill.bash"
    path.write_text(build_script(), encoding="utf-8")
    return path


def completed(script: Path, words: list[str], folder: Path) -> list[str]:
    """What bash's completion function offers for the last word."""
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _textmill; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        [str(BASH), "--norc", "-c", code, "bash", str(script), *words], capture_output=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split("\n")[:-1]


@needs_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], ["plan"]),
        (["train", "quick"], ["quickstart"]),
        (["train", "my"], ["my.yaml"]),
        (["train", "quickstart", "tr"], ["train.", "track."]),
        (["train", "quickstart", "train.optim"], ["train.optimizer="]),
        (["train", "quickstart", "train.optimizer", "="], ["adamw", "muon"]),
        (["train", "quickstart", "train.optimizer", "=", "m"], ["muon"]),
        (["train", "quickstart", "train.optimizer=m"], ["train.optimizer=muon"]),
        (["train", "quickstart", "engine.kind", "=", ""], ["torch", "jax", "deepspeed"]),
        (["train", "quickstart", "corpus.so"], [""]),
        (["train", "--ch"], ["--change"]),
        (["evaluate", "quickstart", "--step", ""], ["latest", "best"]),
        (["completion", "z"], ["zsh"]),
        (["prepare", "quickstart", "corpus.sources", "=", "my"], ["my.yaml"]),
    ],
    ids=" ".join,
)
def test_what_is_offered(words: list[str], offered: list[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    assert sorted(completed(script, ["textmill", *words], tmp_path)) == sorted(offered)


@needs_bash
def test_every_command_is_offered(script: Path, tmp_path: Path) -> None:
    assert set(completed(script, ["textmill", ""], tmp_path)) == {*COMMANDS, "--help", "--version"}


@needs_bash
def test_the_tab_key(script: Path, tmp_path: Path) -> None:
    """In an interactive bash, where readline splits words at "="."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "", "HISTFILE": "", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [str(BASH), "--norc", "--noprofile", "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    lines = f'source {script}; textmill() {{ echo "got: $*"; }}\ntextmill tra\tquicks\ttrain.optimiz\tmu\t\nexit\n'
    os.write(master, lines.encode())
    seen = b""
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:
        pass  # the terminal is closed
    os.close(master)
    process.wait(timeout=60)
    assert b"got: train quickstart train.optimizer=muon" in seen


def test_offered_values_are_allowed() -> None:
    """Each is accepted, or refused because of another setting, never as unknown."""
    refused = [
        f"{key}={value}" for key, values in values_of_keys().items() for value in values if _is_unknown(key, value)
    ]
    assert refused == []


def _is_unknown(key: str, value: str) -> bool:
    try:
        build_config(parse_settings([f"{key}={value}", *_context(key, value)]))
    except TextmillError as error:
        return re.search(r"one of|unknown|no size|no family|expected", str(error)) is not None
    return False


def _context(key: str, value: str) -> list[str]:
    if key == "model.size":
        return [f"model.family={family}" for family, sizes in SIZES.items() if value in sizes][:1]
    if key == "engine.device":
        return ["engine.kind=jax"]
    kinds = {"engine.zero": "deepspeed", "engine.offload_optimizer": "deepspeed", "engine.offload_weights": "deepspeed"}
    if key in kinds:
        return [f"engine.kind={kinds[key]}", "engine.nvme_folder=x", *(["engine.zero=3"] if "offload" in key else [])]
    return ["runner.kind=beam"] if key.startswith("runner.") and key != "runner.kind" else []


def test_zsh_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef textmill\nautoload -U +X bashcompinit")
    assert main(["completion", "fish"]) == 2
    assert "the shells are bash, zsh" in capsys.readouterr().err


def test_the_script_needs_no_torch() -> None:
    code = "import sys; from textmill.cli import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
