"""`textmill generate`: output to a pipe, to a terminal and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig, SampleConfig, TorchEngine, TrainConfig
from textmill.errors import TextmillError
from textmill.generation import BOLD, SEPARATOR, generate, sample_prompts
from textmill.generation.generator import Generator
from textmill.generation.prompts import find_prompts

SAMPLE = SampleConfig(prompt="The mill", max_tokens=12, count=3, seed=21)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def config_of(run: Path, engine: TorchEngine, sample: SampleConfig) -> RunConfig:
    return RunConfig(train=TrainConfig(folder=str(run)), engine=engine, sample=sample)


@pytest.fixture
def config(checkpoint: Checkpoint, run_folder: Path, engine: TorchEngine) -> RunConfig:
    return config_of(run_folder, engine, SAMPLE)


def test_samples_are_plain_text_in_a_pipe(
    config: RunConfig, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = generate(config)
    assert texts == generator.texts(["The mill"] * 3, SAMPLE)
    assert capsys.readouterr().out == f"{SEPARATOR}\n".join(
        f"The mill{text}" + ("" if text.endswith("\n") else "\n") for text in texts
    )


def test_json_has_one_line_per_sample(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    texts = generate(config, 7, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts == generate(config)
    assert [line["seed"] for line in lines] == [21, 22, 23]
    assert all(set(line) == {"prompt", "text", "seed", "tokens", "finish_reason"} for line in lines)
    assert all(line["prompt"] == "The mill" and line["tokens"] <= 12 for line in lines)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompt_file_gives_one_line_per_sample(
    config: RunConfig, generator: Generator, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The mill", "물레방아", "", "Değirmen"] * 3
    lines = [json.dumps({"prompt": prompt, "id": 1}) if name.endswith("jsonl") else prompt for prompt in prompts]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sample = SampleConfig(prompts_file=str(tmp_path / name), max_tokens=6, count=2, seed=5, batch=4)
    texts = generate(config.model_copy(update={"sample": sample}))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in printed] == [prompt for prompt in prompts for _ in range(2)]
    assert [line["seed"] for line in printed] == list(range(5, 5 + 24))
    alone = [generator.sample(line["prompt"], SampleConfig(max_tokens=6, seed=line["seed"])).text for line in printed]
    assert [line["text"] for line in printed] == texts == alone


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", ""], ids=["text", "json", "pipe"])
def test_only_a_newline_ends_a_prompt(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as an editor on Windows writes it, whose prompts have other characters that split lines in Unicode."""
    prompts = ["The mill\u2028stands", "a\x0cform\x85feed", "물레방아"]
    is_json = name.endswith("jsonl")
    lines = [json.dumps({"prompt": one}, ensure_ascii=False) if is_json else one for one in prompts]
    file = tmp_path / (name or "piped")
    file.write_bytes("".join(f"{line}\r\n" for line in lines).encode("utf-8-sig"))
    with file.open(encoding="utf-8") as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        found = find_prompts(SampleConfig(prompts_file=str(file) if name else None))
    assert [prompt for prompt, _ in found] == prompts
    assert [place.rpartition(":")[2] for _, place in found] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "content", "more", "match"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', {}, "a.jsonl:2: is not a prompt"),
        ("a.jsonl", b"[1\n", {}, "a.jsonl:1: is not a prompt"),
        ("a.txt", b"\xff\xfe", {}, "cannot be read"),
        ("a.txt", b"", {}, "is empty"),
        ("a.txt", b"x\n" + b"mill " * 200 + b"\n", {}, r"a.txt:2: [0-9,]+ tokens; the model's context is 96"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\\ud800"}\n', {}, "a.jsonl:2: has a lone surrogate"),
        ("a.txt", b"x", {"prompt": "y"}, "set one of them"),
        ("a.txt", None, {}, "a.txt: no such file"),
    ],
)
def test_file_without_prompts_is_refused(
    config: RunConfig, tmp_path: Path, name: str, content: bytes | None, more: dict[str, str], match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextmillError, match=match):
        generate(config.model_copy(update={"sample": SampleConfig(prompts_file=str(tmp_path / name), **more)}))


def test_empty_text_of_a_chat_model_points_to_chat(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("textmill.generation.open_template", lambda _: object())
    for text in ("a text", ""):
        monkeypatch.setattr(Generator, "stream", lambda *_, text=text: iter([text]))
        assert generate(config) == [text] * 3
        assert ("use textmill chat" in capsys.readouterr().err) == (not text)


def test_json_says_why_a_text_ended(
    config: RunConfig, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    full = generator.sample("The mill", SAMPLE).text
    for stop, reason in (([], "length"), ([full[4:6]], "stop")):
        sample = SAMPLE.model_copy(update={"stop": stop, "count": 1})
        generate(config.model_copy(update={"sample": sample}), as_json=True)
        assert json.loads(capsys.readouterr().out)["finish_reason"] == reason


@pytest.mark.parametrize("stdin", [None, "/dev/null", ""], ids=["closed", "device", "empty"])
def test_without_prompt_or_terminal_text_starts_from_nothing(
    config: RunConfig, generator: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdin: str | None
) -> None:
    (tmp_path / "empty").touch()
    bare = config.model_copy(update={"sample": SampleConfig(max_tokens=8)})
    with open(stdin or tmp_path / "empty", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", None if stdin is None else file)
        assert generate(bare) == generator.texts([""], SampleConfig(max_tokens=8))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_piped_lines_are_prompts(
    config: RunConfig,
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    read, write = os.pipe()
    os.write(write, "The mill\n물레방아\n".encode())
    os.close(write)
    sample = SampleConfig(max_tokens=8, seed=5, count=2)
    with open(read, encoding="utf-8") as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        texts = generate(config.model_copy(update={"sample": sample}), as_json=as_json)
    prompts = ["The mill", "The mill", "물레방아", "물레방아"]
    assert texts == generator.texts(prompts, sample)
    captured = capsys.readouterr()
    assert "reading prompts from standard input" in captured.err
    if as_json:
        assert [json.loads(line)["prompt"] for line in captured.out.splitlines()] == prompts
    else:
        assert captured.out.count(SEPARATOR) == 3
        assert f"{SEPARATOR}\n물레방아{texts[2]}" in captured.out


def test_piped_bytes_that_are_no_text_are_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"\xff\xfe\n")
    os.close(write)
    with open(read, encoding="utf-8") as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        with pytest.raises(TextmillError, match="standard input:1: is not UTF-8 text"):
            generate(config.model_copy(update={"sample": SampleConfig()}))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_beams_give_different_texts(
    config: RunConfig, generator: Generator, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    sample = SampleConfig(prompt="The mill", beams=4, count=2, max_tokens=12)
    texts = generate(config.model_copy(update={"sample": sample}), as_json=as_json)
    assert len(set(texts)) == 2
    assert texts[0] == generator.sample("The mill", sample).text


def test_prompts_are_read_from_a_terminal_line_by_line(
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


def test_run_without_a_checkpoint_gives_a_hint(tmp_path: Path, engine: TorchEngine) -> None:
    with pytest.raises(TextmillError, match="textmill train"):
        generate(config_of(tmp_path, engine, SAMPLE))


def test_importing_generation_and_evaluation_loads_no_framework() -> None:
    code = "import sys, textmill.evaluation, textmill.generation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
