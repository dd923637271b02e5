"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from textmill import __version__
from textmill.cli import _interrupt, main
from textmill.commands.table import COMMANDS
from textmill.errors import TextmillError

QUICK = [
    "train.steps=2",
    "train.warmup=0",
    "train.batch=2",
    "train.length=32",
    "sample.max_tokens=5",
    "sample.min_tokens=0",
    "train.evaluate_batches=1",
]


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        code, out, _ = run_cli(capsys, *argv)
        assert code == 0
        assert all(f"  {command} " in out for command in COMMANDS)
    assert run_cli(capsys, "--version") == (0, f"textmill {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, command, "--help")
    assert code == 0
    assert out.startswith(" ".join(["textmill", command, *COMMANDS[command].arguments]))
    for flag in COMMANDS[command].flags:
        assert f"  {flag.name} " in out
    code, out, _ = run_cli(capsys, command, "--help", "--all")
    assert code == 0
    for section in COMMANDS[command].sections:
        assert f"\n{section}: " in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian", "x"], "'trian': unknown command; did you mean 'train'?"),
        (["train"], "train: needs WHERE, found none; write: textmill train WHERE"),
        (["train", "a", "b"], "found 2: a, b"),
        (["train", "a", "b", "c", "d", "e"], "found 5: a, b, c and 2 more; write: textmill train WHERE"),
        (["new", "x", "--text", "/", "/", "/"], "a pattern after --text needs quotes: --text 'texts/*.txt'"),
        (["new", "x", "--text", "/no/such.txt"], "check the path; the bundled corpora"),
        (["generate", "quickstart", "Once", "upon"], "a prompt is written sample.prompt='Once upon'"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file or folder"),
        (["train", "quikstart"], "did you mean 'quickstart'?"),
        (["train", "quickstart", "--lr", "3"], "--lr: unknown flag; write train.learning_rate=VALUE"),
        (["train", "quickstart", "--batch-size=3"], "--batch-size: unknown flag; textmill calls it 'train.batch'"),
        (["train", "quickstart", "--json"], "--json: 'train' does not take it; it takes --force, --step"),
        (["train", "quickstart", "--step", "soon"], "--step: found 'soon'; give a number, latest or best"),
        (["train", "quickstart", "--step"], "--step: needs a value"),
        (["train", "quickstart", "--forse"], "--forse: unknown flag; did you mean '--force'?"),
        (["train", "quickstart", "train.steps="], "train.steps: found nothing after '='; give a whole number"),
        (["train", "quickstart", "train.batch=-1"], "textmill: train.batch: found -1; give a value at least 1"),
        (
            ["train", "quickstart", "train.steps=3", "train.warmup=9"],
            "textmill: train.warmup: 9 is above train.steps=3",
        ),
        (["train", "quickstart", "train.stepz=3"], "train.stepz: no such key; did you mean 'train.steps'?"),
        (["train", "quickstart", "train.steps"], "train.steps: a setting needs a value"),
        (["train", "quickstart", "train.steps", "9"], "write train.steps=VALUE"),
        (["train", "quickstart", "train=5"], "train: found 5; give keys such as"),
        (["train", "quickstart", "model=nano"], "model: found 'nano'; give keys such as"),
        (["generate", "quickstart", "sample.top_p=2"], "sample.top_p: found 2; give a value at most 1"),
        (["new", "x"], "new: needs --text; write: textmill new DIR --text 'texts/*.txt'"),
        (["new", "x", "--text", "nothing/*.txt"], "nothing matches 'nothing/*.txt'"),
        (["train", "quickstart", "--force=no"], "--force: takes no value"),
        (
            ["train", "quickstart", "--force", "--step", "3"],
            "--force: cannot be used together with --step; use one of them",
        ),
        (["new", "x", "--text", "quickstart", "train.steps=3"], "new: takes no settings, found 'train.steps=3'"),
        (["serve", "quickstart", "engine.kind=deepspeed"], "engine.kind=deepspeed: 'serve' runs the model with torch"),
        (["merge"], "merge: needs OUT A B ..., found none; write: textmill merge OUT A B ..."),
        (["recipes", "x"], "recipes: needs no argument, found 1: x; write: textmill recipes"),
        (["show", "quickstart", "--step", "best"], "--step: found 'best'; give the number of a step"),
        (["check", "."], "nothing to check there"),
        (["evaluate", "."], "not written by textmill and not a model"),
        (["run", "."], "to train on texts there: textmill new DIR --text "),
        (["new", "x", "--text", "tinyshakespeare", "--family", "gpt3"], "choose one of auto, gpt2, bert, llama"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(capsys, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_files_for_another_tool_are_imported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mill.gguf").write_bytes(b"GGUF")
    for where in (tmp_path, tmp_path / "mill.gguf"):
        code, _, err = run_cli(capsys, "serve", str(where))
        assert code == 2
        assert f"to use the model here: textmill import {where} OUT, then name OUT" in err


def test_a_missing_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, missing in (("fit-tokenizer", "prepare"), ("tokenize", "prepare"), ("train", "tokenize")):
        code, _, err = run_cli(capsys, command, "quickstart")
        assert code == 2
        assert f"run textmill {missing} first" in err


def test_an_error_is_printed_even_if_a_signal_arrives_while_it_is_handled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends all processes when one has failed; the others may still be releasing resources."""

    @contextmanager
    def resource() -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGTERM)

    def fail(*_: object) -> int:
        signal.signal(signal.SIGTERM, _interrupt)
        with resource():
            raise TextmillError("train.batch: 9 samples are too odd")

    monkeypatch.setattr("textmill.cli._run", fail)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_cli(capsys, "train", "x") == (2, "", "textmill: train.batch: 9 samples are too odd\n")
        signal.raise_signal(signal.SIGTERM)  # ignored now
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.cli._run", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_from_three_files_to_text(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three files in three languages: new and run give a model that generates text."""
    monkeypatch.chdir(tiny_texts.parent)
    code, out, err = run_cli(capsys, "new", "mine", "--text", "texts/*.txt")
    assert code == 0, err
    assert "next: textmill run mine" in out
    written = (tiny_texts.parent / "mine" / "textmill.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(written)["corpus"]["sources"] == ["../texts/*.txt"]
    commented = [line for line in written.splitlines() if line and not line.startswith("#") and not line.endswith(":")]
    assert sum("#" in line for line in commented) >= len(commented) * 0.7, "most lines have a comment"
    code, out, err = run_cli(capsys, "run", "mine", *QUICK)
    assert code == 0, err
    assert "All stages are done. The model is mine/run/step-0000002" in out
    assert "bits_per_byte" in out
    assert "bits per byte of the valid split" in out
    assert "Undertrained: " in out  # after two steps
    # Any of its folders, from any current folder, names the same model.
    monkeypatch.chdir(tiny_texts)
    texts = []
    for where in ("../mine", "../mine/run", "../mine/run/step-0000002", "../mine/tokens"):
        code, out, err = run_cli(capsys, "generate", where, "sample.prompt=The mill", "sample.max_tokens=4", "--json")
        assert code == 0, err
        texts.append(json.loads(out)["text"])
    assert len(set(texts)) == 1
    # A project that was moved still works.
    (tiny_texts.parent / "mine").rename(tiny_texts.parent / "moved")
    code, out, err = run_cli(capsys, "generate", "../moved", "sample.prompt=The mill", "sample.max_tokens=4", "--json")
    assert code == 0, err
    assert json.loads(out)["text"] == texts[0]
    code, out, err = run_cli(capsys, "run", "../moved", *QUICK)
    assert code == 0, err
    assert out.count("done already") >= 5


def test_force_never_replaces_a_folder_that_textmill_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    for words in ([], ["--force"]):
        code, _, err = run_cli(capsys, "prepare", "quickstart", "corpus.folder=precious", *words)
        assert code == 2
        assert "was not made by 'textmill prepare'" in err
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_models_without_a_run(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Hugging Face folder, a copied checkpoint, a folder with '=' in its name: generate reads them, train does not
    write into them."""
    import shutil

    monkeypatch.chdir(tiny_texts.parent)
    run_cli(capsys, "new", "mine", "--text", "texts")
    assert run_cli(capsys, "run", "mine", *QUICK)[0] == 0
    shutil.copytree("mine/run/step-0000002", "final")
    shutil.copytree(
        "final", "hf=1", ignore=lambda *_: ["run.yaml", "progress.json", "manifest.json", "optimizer.safetensors"]
    )
    for where in ("final", "hf=1"):
        before = sorted(Path(where).iterdir())
        code, out, err = run_cli(capsys, "generate", where, "sample.prompt=The mill", "sample.max_tokens=3", "--json")
        assert code == 0, err
        assert json.loads(out)["prompt"] == "The mill"
        code, _, err = run_cli(capsys, "train", where)
        assert code == 2
        assert "is a model, not a run" in err
        assert sorted(Path(where).iterdir()) == before
    code, _, err = run_cli(capsys, "train", "mine/run/step-0000002")
    assert code == 2
    assert "--step 2" in err


def test_errors_in_training_settings_are_found_before_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_head": 5, "n_embd": 96, "n_positions": 64, "vocab_size": 9}'
    )
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_head": 4, "n_embd": 96, "n_positions": 32, "vocab_size": 9}'
    )
    for word, wanted in (
        ("model.init_from=not/there/x", "model.init_from: not/there/x: no such folder"),
        ("tokenizer.use=not/there/x", "tokenizer.use: not/there/x: no such folder"),
        ("model.init_from=./short", "train.length: 64 is longer than the model's 32 positions; lower it"),
        ("model.shape=config.json", "5 heads do not divide the width 96"),
        ("engine.device=cuda:9", "is not available"),
    ):
        code, out, err = run_cli(capsys, "run", "quickstart", word)
        assert code == 2
        assert wanted in err
        assert out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "short"]


def test_a_path_in_a_file_is_relative_to_that_file_only(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tiny_texts.parent / "project"
    project.mkdir()
    (project / "textmill.yaml").write_text("corpus: {sources: [texts]}\n")
    monkeypatch.chdir(tiny_texts.parent)  # there is another folder `texts` here
    code, _, err = run_cli(capsys, "prepare", "project")
    assert code == 2
    assert "project/texts" in err


def test_new_does_not_overwrite_a_config(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert run_cli(capsys, "new", "mine", "--text", "texts")[0] == 0
    (tiny_texts.parent / "mine" / "textmill.yaml").write_text("train: {steps: 3}\n")
    code, _, err = run_cli(capsys, "new", "mine", "--text", "texts")
    assert code == 2
    assert "exists already" in err
    assert (tiny_texts.parent / "mine" / "textmill.yaml").read_text() == "train: {steps: 3}\n"


def test_run_with_a_changed_setting_names_it_and_needs_force(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    run_cli(capsys, "new", "mine", "--text", "texts")
    assert run_cli(capsys, "run", "mine", *QUICK)[0] == 0
    code, _, err = run_cli(capsys, "run", "mine", *QUICK, "corpus.section_chars=500")
    assert code == 2
    assert "corpus.section_chars was 200, is 500" in err
    assert "--force" in err
    code, out, err = run_cli(capsys, "run", "mine", *QUICK, "corpus.section_chars=500", "--force")
    assert code == 0, err
    assert "done already" not in out
    code, out, err = run_cli(capsys, "run", "mine", *QUICK, "corpus.section_chars=500", "--force")
    assert code == 0, err
    assert "prepare: done already" in out, "run --force rebuilds only what changed"


def test_check_finds_a_flipped_bit(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    run_cli(capsys, "new", "mine", "--text", "texts")
    assert run_cli(capsys, "run", "mine", *QUICK)[0] == 0
    assert run_cli(capsys, "check", "mine")[0] == 0
    for name in (
        "corpus/train-00000.parquet",
        "tokens/train.bin",
        "tokens/valid.idx",
        "tokenizer/tokenizer.json",
        "run/step-0000002/model.safetensors",
    ):
        path = tiny_texts.parent / "mine" / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        code, _, err = run_cli(capsys, "check", "mine")
        assert code == 2
        assert f"{path.name} does not match its checksum" in err
        path.write_bytes(content)


@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=3"])
def test_the_rank_of_a_launcher_is_taken(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main([word, "--version"]) == 0
    assert os.environ.pop("LOCAL_RANK") == "3"
    assert capsys.readouterr().out.startswith("textmill ")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([word, "--version"]) == 0
    assert os.environ["LOCAL_RANK"] == "1", "what the launcher sets in the environment counts"


@pytest.mark.parametrize(("name", "value", "spins"), [("TZ", "UTC", "1000"), ("OMP_WAIT_POLICY", "active", None)])
def test_waiting_threads_leave_the_cores_to_other_programs(
    name: str, value: str, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libgomp reads this when torch is imported, unless the user says how threads wait."""
    for one in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(one, "")  # so that the test restores it
        monkeypatch.delenv(one)
    monkeypatch.setenv(name, value)
    assert main(["--help"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins
