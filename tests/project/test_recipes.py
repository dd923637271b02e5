"""Every recipe runs with two steps, and so does quickstart.sh."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_recipes import SMALLER, SYSTEMS, write_inputs
from textmill.checkpoints.folders import open_checkpoint
from textmill.cli import main
from textmill.generation import sample_prompts
from textmill.where import open_where, recipe_names, recipes_folder

QUICK = [
    "train.steps=2",
    "train.warmup=0",
    "train.batch=2",
    "train.length=32",
    "train.evaluate_batches=1",
    "sample.max_tokens=5",
]
ALONE = [name for name in recipe_names() if name not in SYSTEMS]


@pytest.mark.long_with(*[name for name in ALONE if name != "quickstart"])
@pytest.mark.parametrize("name", ALONE)
def test_recipe(
    name: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_texts.parent
    shutil.copy(recipes_folder() / f"{name}.yaml", folder)
    monkeypatch.chdir(folder)
    write_inputs(folder)
    assert main(["run", f"{name}.yaml", *QUICK, *SMALLER.get(name, [])]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"All stages are done. The model is runs/{name}/run/step-0000002" in out
    following = {"chat-ko": "chat", "bert-base": "fill", "bert-ko": "fill", "bert-classify": "evaluate"}.get(
        name, "generate"
    )
    assert f"  textmill {following} runs/{name}" in out.partition("Next:")[2]
    if name == "chat-ko":
        _check_chat_template_is_used(folder / "runs" / name / "run")
    if name == "evaluated":
        assert "best checkpoint is step 2, choices/bits_per_byte" in out
        assert "checked for this file: 0 documents dropped" in out
    if name == "quickstart":
        _check_run_has_no_settings_of_one_call(folder, capsys)


@pytest.mark.parametrize("name", ["megatron-gpt2", "megatron-bert"])
def test_recipes_keep_the_pages_of_wikiextractor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)
    pages = []
    for number in range(30):
        words = [f"{dice.choice('bcdfgklmnprst')}{dice.choice('aeiou')}{dice.randrange(500)}rn" for _ in range(150)]
        pages.append((number, f"https://en.wikipedia.org/wiki?curid={number}", " ".join(words)))
    blocks = [f'<doc id="{number}" url="{url}" title="T">\n{text}\n</doc>\n' for number, url, text in pages[:15]]
    lines = [json.dumps({"id": number, "url": url, "text": text}) + "\n" for number, url, text in pages[15:]]
    for path, rows in {"AA/wiki_00": blocks, "AB/wiki_07": lines[:8], "wiki.jsonl": lines[8:]}.items():
        (tmp_path / "texts" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / path).write_text("".join(rows))
    shutil.copy(recipes_folder() / f"{name}.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", f"{name}.yaml", "corpus.languages=[]", "corpus.max_digits=1"]) == 0
    account = json.loads((tmp_path / "runs" / name / "corpus" / "account.json").read_text())
    assert (account["records"], account["kept"]) == (30, 30)


def _check_run_has_no_settings_of_one_call(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check commands of docs/generate.md in the quickstart's run, whose recipe has a prompt."""
    (folder / "prompts.txt").write_text("Once\nTwice\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["generate", "runs/quickstart", "sample.prompts_file=prompts.txt", "sample.max_tokens=3"]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["Once", "Twice"]
    assert main(["generate", "quickstart", "sample.prompts_file=prompts.txt", "sample.max_tokens=50"]) == 0
    for where in ("runs/quickstart", "runs/quickstart/run", "runs/quickstart/run/step-0000002"):
        assert open_where(where, ["sample.max_tokens=3"]).config.sample.prompt is None, "generate asks for a text"


def _check_chat_template_is_used(run: Path) -> None:
    """Check texts of `run` without and with a prompt, and samples during training."""
    conversations = json.loads((run / "summary.json").read_text(encoding="utf-8"))["texts"]
    assert len(conversations) == 3
    assert all(
        re.match(r"<\|user\|>\d+시에 뭐 해\?<\|endoftext\|><\|assistant\|>", conversation)
        for conversation in conversations
    )
    assert main(["run", "chat-ko.yaml", *QUICK, "sample.prompt=5시에 뭐 해?"]) == 0
    (conversation,) = json.loads((run / "summary.json").read_text(encoding="utf-8"))["texts"]
    config = open_where("chat-ko.yaml", [*QUICK, "train.sample_prompts=5시에 뭐 해?"]).config
    (line,) = sample_prompts(
        open_checkpoint(run / "step-0000002"), config.train.sample_prompts, config.sample, config.engine
    )
    assert conversation == f"<|user|>5시에 뭐 해?<|endoftext|><|assistant|>{line['text']}"


@pytest.mark.long
def test_quickstart_sh(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "textmill"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from textmill.cli import main; sys.exit(main())' \"$@\"\n"
    )
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(recipes_folder().parent)}
    done = subprocess.run(
        ["sh", str(recipes_folder() / "quickstart.sh"), *QUICK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for wanted in (
        "intact",
        "bits_per_byte",
        "KING RICHARD:",
        "runs/quickstart/run/step-0000002",
        "Next:",
        "All stages are done",
    ):
        assert wanted in done.stdout


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
