"""The command: what it prints to a pipe, a terminal and as JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig, SampleConfig, TorchEngine, TrainConfig
from textmill.errors import TextmillError
from textmill.generation import BOLD, SEPARATOR, generate, sample_prompts
from textmill.generation.generator import Generator

SAMPLE = SampleConfig(prompt="The mill", max_tokens=12, count=3, seed=21)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def config_of(run: Path, engine: TorchEngine, sample: SampleConfig) -> RunConfig:
    return RunConfig(train=TrainConfig(folder=str(run)), engine=engine, sample=sample)


@pytest.fixture
def config(checkpoint: Checkpoint, run_folder: Path, engine: TorchEngine) -> RunConfig:
    return config_of(run_folder, engine, SAMPLE)


def test_samples_go_plain_to_a_pipe(
    config: RunConfig, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = generate(config)
    assert texts == generator.texts(["The mill"] * 3, SAMPLE)
    assert capsys.readouterr().out == f"{SEPARATOR}\n".join(
        f"The mill{text}" + ("" if text.endswith("\n") else "\n") for text in texts
    )


def test_json_has_a_line_a_sample(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    texts = generate(config, 7, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts == generate(config)
    assert [line["seed"] for line in lines] == [21, 22, 23]
    assert all(set(line) == {"prompt", "text", "seed", "tokens"} for line in lines)
    assert all(line["prompt"] == "The mill" and line["tokens"] <= 12 for line in lines)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_of_prompts_gives_a_line_a_sample(
    config: RunConfig, generator: Generator, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The mill", "물레방아", "", "Değirmen"] * 12
    lines = [json.dumps({"prompt": prompt, "id": 1}) if name.endswith("jsonl") else prompt for prompt in prompts]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sample = SampleConfig(prompts_file=str(tmp_path / name), max_tokens=6, count=2, seed=5, batch=4)
    texts = generate(config.model_copy(update={"sample": sample}))
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in told] == [prompt for prompt in prompts for _ in range(2)]
    assert [line["seed"] for line in told] == list(range(5, 5 + 96))
    alone = [generator.sample(line["prompt"], SampleConfig(max_tokens=6, seed=line["seed"])).text for line in told]
    assert [line["text"] for line in told] == texts == alone


@pytest.mark.parametrize(
    ("name", "content", "more", "match"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', {}, "a.jsonl:2: is not a prompt"),
        ("a.jsonl", b"[1\n", {}, "a.jsonl:1: is not a prompt"),
        ("a.txt", b"\xff\xfe", {}, "cannot be read"),
        ("a.txt", b"", {}, "is empty"),
        ("a.txt", b"x", {"prompt": "y"}, "set one of them"),
        ("a.txt", None, {}, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(
    config: RunConfig, tmp_path: Path, name: str, content: bytes | None, more: dict[str, str], match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextmillError, match=match):
        generate(config.model_copy(update={"sample": SampleConfig(prompts_file=str(tmp_path / name), **more)}))


def test_no_prompt_and_no_terminal_starts_from_nothing(
    config: RunConfig, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("not read"))
    bare = config.model_copy(update={"sample": SampleConfig(max_tokens=8)})
    assert generate(bare) == generator.texts([""], SampleConfig(max_tokens=8))


def test_a_terminal_without_prompt_is_asked_line_by_line(
    config: RunConfig, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, sample = Terminal(), SampleConfig(max_tokens=8, seed=5)
    lines = iter(["The mill", "", "x y z " * 100, "The mill"])

    def typed(_: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr("builtins.input", typed)
    texts = generate(config.model_copy(update={"sample": sample}))
    turns = [("The mill", 5), ("", 6), ("The mill", 8)]
    assert texts == [generator.sample(prompt, sample.model_copy(update={"seed": seed})).text for prompt, seed in turns]
    assert f"{BOLD}The mill" in shown.getvalue()


def test_fixed_prompts_of_a_checkpoint(checkpoint: Checkpoint, engine: TorchEngine, generator: Generator) -> None:
    lines = sample_prompts(checkpoint, ["The mill", "물"], SAMPLE, engine)
    assert [line["text"] for line in lines] == generator.texts(["The mill", "물"], SAMPLE)
    assert [(line["prompt"], line["seed"]) for line in lines] == [("The mill", 21), ("물", 22)]


def test_a_run_without_a_checkpoint_says_what_to_do(tmp_path: Path, engine: TorchEngine) -> None:
    with pytest.raises(TextmillError, match="textmill train"):
        generate(config_of(tmp_path, engine, SAMPLE))


def test_the_room_is_light_to_enter() -> None:
    code = "import sys, textmill.generation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
