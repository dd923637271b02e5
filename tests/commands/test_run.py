"""The command run: the order of its stages, and the commands that it proposes."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from textmill.cli import main
from textmill.commands import run
from textmill.commands import run as command
from textmill.commands.prepare import prepare
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.models import open_family
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
    unknown, limited = (run.improving_commands(config, state, "here") for state in states)
    assert unknown == ["textmill new larger --text 'more texts/*.txt'"]
    assert "textmill tune here --minutes 60" in limited


@pytest.mark.parametrize("count", [5, 30])
def test_a_longer_run_has_all_of_the_text(count: int, tmp_path: Path) -> None:
    sources = [f"text {number}.txt" for number in range(count)]
    settings = {"folder": str(tmp_path), "corpus": {"sources": sources}, "train": {"minutes": 2}}
    state: State = "undertrained"
    longer, _ = run.improving_commands(RunConfig.model_validate(settings), state, "here")
    words = shlex.split(longer)
    named = [word for before, word in pairwise(words) if before == "--text"]
    assert named == sources or words == ["textmill", "train", "here", "train.minutes=8"]
    assert not named or "--family gpt2" in longer, "by itself, new may choose another family"
    assert len(named) == (5 if count == 5 else 0)


QUICK = [
    "train.steps=2",
    "train.warmup=0",
    "train.batch=2",
    "train.length=32",
    "model.shape.layers=1",
    "model.shape.width=32",
    "model.shape.heads=2",
    "train.evaluate_batches=1",
    "tokenizer.vocab=400",
    "engine.device=cpu",
    "runner.workers=1",
    "sample.max_tokens=3",
]


UNUSABLE = {
    "engine.mesh={tensor: 3}": "engine.mesh: .* needs 3 processes, found 1",
    "engine.device=cuda:99": "engine.device: 'cuda:99' is not available",
    "engine.precision=fp8 engine.device=cpu": "engine.precision: fp8 needs a GPU",
    "engine.kind=jax engine.mesh.tensor=3 engine.device=cpu": "engine.mesh: .* needs 3 devices",
    "engine.kind=deepspeed train.optimizer=adamw train.learning_rate=1e-3 engine.deepspeed_config=none.json": (
        "none.json is not readable"
    ),
    "train.distil.teachers=[./none]": "none: no such folder",
    "tokenizer.use=./none": "tokenizer.use: .*none",
    "train.folder=texts/english.txt": "cannot be created",
    "tokens.folder=texts/english.txt/tokens": "is a file\\); set another tokens.folder",
    "train.batch=100000000000": "train.batch: .* GB; lower it",
    "train.layout=chat": "set tokenizer.chat=default",
    "train.layout=features": "set tokens.kind=features",
    "tokens.level=sentence": "set it, or tokens.level=document",
    "model.family=bert model.size=tiny train.layout=masked tokenizer.kind=wordpiece": "pairs=next needs; set corpus",
    "train.tasks=[pairs:none.jsonl]": "none.jsonl: no such file",
    "train.best.metric=lambada/accuracy": "train.best.metric: .* set train.tasks",
    "model.family=bert model.size=tiny train.layout=masked train.masked.pairs=none tokenizer.kind=wordpiece "
    "train.masked.counts=none.json": "none.json: file not found",
    "evaluate.tasks=[lambada:none.jsonl]": "none.jsonl: no such file",
    "evaluate.tasks=[lambada]": "lambada needs a file",
    "evaluate.tasks=[pseudo_perplexity]": "predicts the next token",
    "evaluate.text=[none.txt]": "evaluate.text: no file",
    "evaluate.text=[empty.txt]": "empty.txt: has no text",
    "evaluate.text=[broken.jsonl]": r"broken.jsonl:1: no field .text.; .*repair the file",
    "corpus.labels=sequence-classification corpus.split_by=document model.family=bert model.size=tiny "
    "train.layout=labelled tokenizer.kind=wordpiece evaluate.text=[empty.csv]": "empty.csv has no examples",
    "evaluate.tasks=[wikitext:texts/english.txt] evaluate.window=33": "evaluate.window: 33 is more than the model's 32",
    "evaluate.tasks=[wikitext:texts/english.txt] evaluate.stride=33": "evaluate.stride: 33 is more than the window",
    "train.tasks=[wikitext:texts/english.txt] evaluate.window=33": "evaluate.window: 33 is more than the model's 32",
    "evaluate.window=33": "evaluate.window: 33 is more than the model's 32 positions",
    "evaluate.stride=33": "evaluate.stride: 33 is more than the window of 32",
    "evaluate.predictions=texts/english.txt/p.jsonl": "evaluate.predictions: .* is not a folder",
    "evaluate.tasks=[choices:broken.jsonl]": r"broken.jsonl:2: choice 2 of 2 is empty",
    "evaluate.tasks=[choices:quiz.jsonl] evaluate.shots=2": "quiz.jsonl: has 1 examples; evaluate.shots=2 needs",
    "train.tasks=[choices:broken.jsonl]": r"broken.jsonl:2: choice 2 of 2 is empty",
    "sample.prompts_file=none.txt": "none.txt: no such file",
}
"""Settings of one later stage each that cannot work, and the error."""


def test_what_a_later_stage_cannot_use_is_refused_before_anything_is_written(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    settings = [one for one in QUICK if one != "engine.device=cpu"]
    quiz = {"context": "the mill", "choices": ["turns", "stands"], "answer": 0}
    for name, choices in (("quiz", ()), ("broken", (["turns", ""],))):
        lines = [quiz, *({**quiz, "choices": one} for one in choices)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("empty.txt", "empty.csv"):
        Path(name).touch()
    before = sorted(Path().rglob("*"))
    for wrong, error in UNUSABLE.items():
        given = [wrong] if "{" in wrong else wrong.split()
        where = ["run", "quickstart", "corpus.sources=texts", "folder=mill", *settings, *given]
        assert main(where) == 2, wrong
        streams = capsys.readouterr()
        assert re.search(error, streams.err), f"{wrong}: {streams.err}"
        assert "[1/6]" not in streams.out, wrong
        assert sorted(Path().rglob("*")) == before, wrong


def printed_commands(out: str) -> list[list[str]]:
    lines = out.partition("Next:")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("  textmill ")]


@pytest.mark.parametrize("where", ["project", "file"])
def test_printed_commands_work_wherever_the_folders_are(
    where: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's folder is not below the root folder, and both have spaces and quotes in their names."""
    monkeypatch.chdir(tiny_texts.parent)
    file = Path("a mill/textmill.yaml" if where == "project" else "a mill.yaml")
    file.parent.mkdir(exist_ok=True)
    sources = os.path.relpath("texts", file.parent)
    file.write_text(f"corpus: {{sources: ['{sources}'], documents: block, split: [80, 10, 10]}}\n")
    assert main(["run", str(file), *QUICK, "train.folder=it's elsewhere/a run"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    generate, *others = printed_commands(out)
    assert generate[0] == "generate"
    assert main([*generate, "sample.max_tokens=3", "engine.device=cpu"]) == 0, capsys.readouterr().err
    (longer,) = (words for words in others if words[0] == "train")
    assert main(longer) == 0, capsys.readouterr().err
    assert Path("it's elsewhere/a run/step-0000004").is_dir()


def test_the_root_folder_is_named_if_it_opens_the_run(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    Path("mine").mkdir()
    settings = ["corpus.sources=texts", "corpus.split=60,20,20", "folder=a mill"]
    assert main(["run", "quickstart", *QUICK, *settings]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    generate, _, new, *_ = printed_commands(out)
    verdict = json.loads(Path("a mill/run/summary.json").read_text(encoding="utf-8"))["verdict"]
    assert "\n".join(verdict) in out
    assert generate[:2] == ["generate", "a mill"]
    assert new[:2] == ["new", "mine-2"], "the folder mine exists"


def test_an_untied_head_does_not_make_a_planned_run_undertrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan counts blocks and head: the embeddings of an untied head are not multiplied."""
    (tmp_path / "progress.json").write_text('{"tokens": 9}', encoding="utf-8")
    monkeypatch.setattr(command, "list_checkpoints", lambda folder: {9: tmp_path})
    monkeypatch.setattr(command, "open_splits", lambda config: SimpleNamespace(stores=lambda split: []))
    sizes = {}
    for untied in (False, True):
        settings = {"family": "llama", "size": "nano", "shape": {"untied": untied}}
        config = RunConfig.model_validate({"folder": str(tmp_path), "model": settings})
        shape = open_family("llama").shape_of(config.model, vocab=512, eos_id=0)
        monkeypatch.setattr(command, "read_shape", lambda folder, shape=shape: shape)
        facts = command._describe_run(config, tmp_path, tmp_path)
        sizes[untied] = facts.parameters
        assert facts.all_parameters == facts.parameters + untied * 512 * shape.width, "what the user reads"
    assert sizes[True] == sizes[False]


def test_padding_does_not_count_as_text_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of short conversations hold more padding than text: 90 tokens were computed, 30 of them text."""
    (tmp_path / "progress.json").write_text('{"tokens": 90}', encoding="utf-8")
    store = SimpleNamespace(tokens=60)
    shape = open_family("gpt2").shape_of(
        RunConfig.model_validate({"model": {"size": "nano"}}).model, vocab=512, eos_id=0
    )
    monkeypatch.setattr(command, "list_checkpoints", lambda folder: {9: tmp_path})
    monkeypatch.setattr(command, "open_splits", lambda config: SimpleNamespace(stores=lambda split: [store]))
    monkeypatch.setattr(command, "read_shape", lambda folder: shape)
    assert command._describe_run(RunConfig(), tmp_path, tmp_path).epochs == 1.5, "runs without logged epochs"
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "epoch": 0.5}\n', encoding="utf-8")
    assert command._describe_run(RunConfig(), tmp_path, tmp_path).epochs == 0.5


def test_results_of_an_earlier_call_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "step-0000002"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text('{"files": {"model.safetensors": {"sha256": "12ab"}}}', encoding="utf-8")
    config = RunConfig.model_validate({"folder": str(tmp_path)})
    used: list[RunConfig] = []

    def use_model(config: RunConfig, shape: Any) -> tuple[None, list[str]]:
        used.append(config)
        return None, ["the mill turns"]

    monkeypatch.setattr(command, "_use_model", use_model)
    monkeypatch.setattr(command, "read_shape", lambda folder: None)
    first = command._summarize(config, tmp_path, checkpoint)
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert set(written) == {"inputs", "measured", "texts"}
    assert command._summarize(config, tmp_path, checkpoint)["texts"] == first["texts"]
    assert len(used) == 1
    other = config.model_copy(update={"sample": config.sample.model_copy(update={"seed": 7})})
    command._summarize(other, tmp_path, checkpoint)
    assert len(used) == 2


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("<b>3</b> Değirmen döner.", "Değirmen döner"),
        ("1. 물레방아가 강가에서 돌아간다.", "물레방아가 강가에서"),
        ("水车在河边慢慢地转动着，", "水车在河边慢慢地"),
        ("12 34\n", "Once more"),
    ],
)
def test_the_proposed_prompt_is_of_the_language_of_the_text(text: str, prompt: str, tmp_path: Path) -> None:
    rows = [{"text": f"{text} {number}"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = {"sources": [str(tmp_path / "a.jsonl")], "split": [50, 50, 0]}
    config = RunConfig.model_validate({"folder": str(tmp_path), "corpus": corpus, "runner": {"workers": 1}})
    prepare(config)
    assert run._prompt_of(config.folder_of("corpus")) == prompt
