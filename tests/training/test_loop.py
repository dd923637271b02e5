"""The training loop from the outside: finished, killed, stopped, changed, forced, sampled, opened by transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kill_train import COMMAND, hash_checkpoint, read_metrics, textmill, train_arguments
from tests.support.small_runs import config_for
from textmill.cli import main
from textmill.errors import TextmillError
from textmill.training.loop import train

STEPS = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("loop") / "root"))


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Path:
    """A run of 30 steps without interruption."""
    run = root / "undisturbed"
    done = textmill(*train_arguments(root, run, STEPS))
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.long
def test_a_run_killed_repeatedly_gives_the_same_bits(root: Path, undisturbed: Path) -> None:
    run = root / "killed"
    for fault in (
        "kill@step:3",
        "kill@disk:25",
        "kill@step:22",
    ):  # before the first save, during a save, and between two saves
        done = textmill(*train_arguments(root, run, STEPS), env={**os.environ, "TEXTMILL_FAULT": fault})
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert textmill(*train_arguments(root, run, STEPS)).returncode == 0
    assert read_metrics(run) == read_metrics(undisturbed)
    assert hash_checkpoint(run, STEPS) == hash_checkpoint(undisturbed, STEPS)


def test_a_closed_terminal_saves_and_exits_75_and_a_closed_pipe_loses_nothing(root: Path, undisturbed: Path) -> None:
    run = root / "stopped"
    words = [*train_arguments(root, run, STEPS), "train.save_every=1000"]
    stopping = {**os.environ, "TEXTMILL_FAULT": "stop@step:7"}
    program = [sys.executable, "-m", "textmill"]
    process = subprocess.Popen(
        [*program, *words], env=stopping, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGCONT)
    _, output = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "stopped by SIGHUP at step" in output
    step = json.loads((run / "stopped.json").read_text())["step"]
    assert (run / f"step-{step:07d}").is_dir()
    # In a separate process: torch rounds differently in a process that once used bf16 on a CPU without it.
    read_end, write_end = os.pipe()
    os.close(read_end)
    resumed = [*program, *train_arguments(root, run, STEPS)]
    assert subprocess.run(resumed, stdout=write_end, stderr=write_end, timeout=300).returncode == 0
    os.close(write_end)
    assert read_metrics(run) == read_metrics(undisturbed)
    assert (run / f"step-{STEPS:07d}").is_dir()
    assert not (run / "stopped.json").exists()


@pytest.mark.long
def test_a_full_disk_keeps_every_checkpoint(root: Path, undisturbed: Path) -> None:
    """The kernel refuses files above a size, as a full disk does; the run reports it and keeps its checkpoints."""
    from textmill.checkpoints.folders import find_checkpoint_damage, list_checkpoints

    run, limit = root / "full", 100_000
    words = train_arguments(root, run, STEPS)
    assert textmill(*words, env={**os.environ, "TEXTMILL_FAULT": "kill@step:11"}).returncode == -signal.SIGKILL
    whole = list(list_checkpoints(run))
    assert 5 in whole, "the save of step 10 waits for it, and may itself be interrupted"
    small = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); {COMMAND[-1]}"
    full = subprocess.run([*COMMAND[:-1], small, *words], capture_output=True, text=True, timeout=300)
    assert full.returncode == 75, full.stderr
    assert (
        "cannot write a checkpoint (File too large); earlier checkpoints are intact; free some disk space"
        in full.stderr
    )
    assert "Traceback" not in full.stderr
    assert sorted(path.name for path in run.glob("step-*")) == [f"step-{step:07d}" for step in whole], (
        "nothing incomplete, nothing lost"
    )
    assert [find_checkpoint_damage(folder) for folder in list_checkpoints(run).values()] == [[] for _ in whole]
    assert textmill(*words).returncode == 0
    assert read_metrics(run) == read_metrics(undisturbed)
    assert hash_checkpoint(run, STEPS) == hash_checkpoint(undisturbed, STEPS)


def test_a_finished_run_does_nothing(root: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"
    }
    train(config_for(root, undisturbed, STEPS))
    assert "done already" in capsys.readouterr().out
    train(config_for(root, undisturbed, STEPS - 10, "train.log_every=7"))
    printed = capsys.readouterr()
    assert "done already" in printed.out
    assert "changed" not in printed.err, "nothing was trained with the other settings"
    assert before == {
        path: path.stat().st_mtime_ns for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.batch=16"], "train.batch was 8, is 16"),
        (["train.seed=7"], "train.seed was 1234, is 7"),
        (["train.loss=sample_mean"], "train.loss was token_mean, is sample_mean"),
        (["model.shape.layers=3"], "model.layers was 2, is 3"),
        (["model.shape.dropout=0.0"], r"model.attention_dropout was 0\.1, is 0\.0"),
    ],
)
def test_a_changed_result_setting_is_refused(root: Path, undisturbed: Path, words: list[str], message: str) -> None:
    with pytest.raises(TextmillError, match=message) as error:
        train(config_for(root, undisturbed, STEPS, *words))
    assert "--force" in str(error.value)


def test_a_refused_run_leaves_no_files(root: Path, tmp_path: Path) -> None:
    """Refused by the first checks, after the data's index was written, and by the engine."""
    refusals = {
        "model.init_from=nowhere": "nowhere",
        "train.batch_rampup=3,3,100": "train.batch_rampup",
        "engine.micro_batch=3": "engine.micro_batch",
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for word, message in refusals.items():
        for folder in ("new/one", "mine"):
            with pytest.raises(TextmillError, match=message):
                train(config_for(root, tmp_path / folder, STEPS, word))
            assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
                "mine",
                "mine/notes.txt",
            ]


def test_changeable_settings_are_accepted_and_recorded(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = root / "more"
    train(config_for(root, run, 10))
    train(config_for(root, run, 14, "train.log_every=2", "engine.micro_batch=4"))
    progress = json.loads((run / "step-0000014" / "progress.json").read_text())
    changes = [change["change"] for change in progress["changes"]]
    assert {change["step"] for change in progress["changes"]} == {10}
    for wanted in ("train.steps was 10, is 14", "train.log_every was 1, is 2", "engine.micro_batch was auto, is 4"):
        assert wanted in changes
    assert "changed since step 10: train.steps was 10, is 14" in capsys.readouterr().err
    config = config_for(root, run, 14, "train.log_every=2", "engine.micro_batch=4")
    train(config.model_copy(update={"train": config.train.model_copy(update={"epochs": 0.0055})}))
    printed = capsys.readouterr().err
    assert "changed since step 14: the length of the run was train.steps=14, is train.epochs=0.0055" in printed
    assert "1000" not in printed


def test_fp16_resumes_with_its_loss_scale(root: Path) -> None:
    config = config_for(
        root, root / "half", 24, "engine.precision=fp16", "train.checkpoints.keep=9", "train.evaluate_batches=1"
    )
    with torch.backends.mkldnn.flags(enabled=False):  # fp16 is slow on a CPU without it
        train(config)
        first = read_metrics(root / "half")
        train(config, step=15)
    assert read_metrics(root / "half") == first
    scales = [line["loss_scale"] for line in first if "loss" in line]
    assert scales[:3] == [2**32, 2**32, 2**31]
    assert scales[-1] < scales[14], "it kept falling after the save"
    progress = json.loads((root / "half" / "step-0000024" / "progress.json").read_text())
    assert 0 < progress["updates"] < 24, "an overflow is not an update"
    assert progress["scaling"]["scale"] == scales[-1]


def test_divergence_at_the_lowest_loss_scale_ends_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.engines.on_torch.FIRST_SCALE", 16.0)
    wild = (
        "engine.precision=fp16",
        "train.learning_rate=1e30",
        "train.clip=0",
        "train.warmup=0",
        "train.evaluate_batches=1",
    )
    with (
        pytest.raises(
            TextmillError,
            match=r"the loss is no longer finite at step .* at a loss scale of 1; .*engine.precision=fp32",
        ),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        train(config_for(root, root / "wild", 60, *wild))
    scales = [line["loss_scale"] for line in read_metrics(root / "wild") if "loss" in line]
    assert set(scales) == {16, 8, 4, 2, 1}
    assert scales.count(1) == 5, "five steps at the lowest scale are enough"


def test_resume_from_an_earlier_step_and_start_from_scratch(root: Path) -> None:
    run = root / "back"
    train(config_for(root, run, 12, "train.checkpoints.keep=5"))
    first = read_metrics(run)
    train(config_for(root, run, 12, "train.checkpoints.keep=5"), step=5)
    assert read_metrics(run) == first, "resuming from step 5 gives the same numbers"
    weights = hash_checkpoint(run, 12)
    train(config_for(root, run, 12, "train.checkpoints.keep=5", "train.seed=3"), force="yes")
    assert read_metrics(run) != first
    assert hash_checkpoint(run, 12) != weights


def test_sample_prompts_use_the_saved_checkpoint(root: Path) -> None:
    from textmill.checkpoints.folders import open_checkpoint
    from textmill.generation import sample_prompts

    run = root / "prompts"
    config = config_for(
        root, run, 10, 'train.sample_prompts=["KING:", ""]', "sample.min_tokens=0", "sample.max_tokens=8"
    )
    train(config)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(5, "KING:"), (5, ""), (10, "KING:"), (10, "")]
    again = sample_prompts(open_checkpoint(run / "step-0000010"), ["KING:", ""], config.sample, config.engine)
    assert [line["text"] for line in lines[2:]] == [line["text"] for line in again]


def test_a_second_process_is_refused(root: Path, undisturbed: Path) -> None:
    from textmill.storage.files import file_lock

    with (
        file_lock(undisturbed / ".lock", "busy"),
        pytest.raises(TextmillError, match="another process is training in this folder"),
    ):
        train(config_for(root, undisturbed, STEPS))


def test_other_data_is_refused(root: Path, undisturbed: Path, tiny_texts: Path, tmp_path: Path) -> None:
    settings = [f"folder={tmp_path}", f"corpus.sources={tiny_texts}", f"tokenizer.use={root / 'tokenizer'}"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "quickstart", *settings]) == 0
    with pytest.raises(TextmillError, match=r"tokens was .*, is "):
        train(config_for(tmp_path, undisturbed, STEPS))


def test_transformers_opens_a_trained_checkpoint(undisturbed: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from textmill.models.nets_torch import open_net

    folder = undisturbed / f"step-{STEPS:07d}"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("To be, or not to be, that").input_ids])
    net = open_net(folder, torch.device("cpu"))
    with torch.no_grad():
        assert (theirs(ids).logits - net.logits(net(ids))).abs().max() < 1e-5


def test_a_run_starts_from_given_weights(root: Path, undisturbed: Path) -> None:
    run = root / "continued"
    for start in (undisturbed, undisturbed / f"step-{STEPS:07d}"):
        train(config_for(root, run, 3, f"model.init_from={start}", "train.warmup=0"), force="yes")
        first, trained_long = read_metrics(run)[0]["loss"], read_metrics(undisturbed)[0]["loss"]
        assert first < trained_long - 0.5, "it starts where the other ended, not from scratch"
    config = config_for(
        root, root / "small-vocab", 3, f"model.init_from={_with_fewer_vectors(undisturbed, root)}", "train.warmup=0"
    )
    with pytest.raises(TextmillError, match="tokenize with the model's own tokenizer"):
        train(config)


def _with_fewer_vectors(run: Path, root: Path) -> Path:
    """A model folder whose embedding is too small for the tokenizer."""
    folder = root / "fewer"
    folder.mkdir(exist_ok=True)
    hf = json.loads((run / f"step-{STEPS:07d}" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "vocab_size": 200}))
    return folder


def test_a_failure_before_the_first_step_keeps_every_checkpoint(root: Path) -> None:
    """Resuming from an earlier step or from scratch removes nothing before the start has succeeded."""
    from textmill.checkpoints.folders import find_checkpoint_damage, list_checkpoints

    run = root / "kept"
    train(config_for(root, run, 12, "train.checkpoints.keep=1", "train.checkpoints.keep_every=5"))
    assert list(list_checkpoints(run)) == [5, 10, 12]
    metrics = read_metrics(run)
    attempts: list[tuple[list[str], dict[str, object], str]] = [
        ([], {"step": 5}, "has no optimizer state: it was pruned"),
        (["model.init_from=nowhere/at-all/x"], {"force": "yes"}, "no such folder"),
        (["engine.device=cuda:7"], {"force": "yes"}, "is not available"),
        (["engine.device=cuda:7", "train.steps=20"], {}, "is not available"),
    ]
    for words, options, message in attempts:
        steps = 20 if options.get("step") else 12
        with pytest.raises(TextmillError, match=message):
            train(
                config_for(root, run, steps, "train.checkpoints.keep=1", "train.checkpoints.keep_every=5", *words),
                **options,
            )  # type: ignore[arg-type]
        assert list(list_checkpoints(run)) == [5, 10, 12]
        assert all(find_checkpoint_damage(folder) == [] for folder in list_checkpoints(run).values())
        assert read_metrics(run) == metrics
    train(config_for(root, run, 5), step=5)
    assert list(list_checkpoints(run)) == [5, 10, 12], "done already, nothing changed"


def test_a_run_restarts_from_its_own_weights(root: Path) -> None:
    run = root / "self"
    train(config_for(root, run, 20))
    last = read_metrics(run)[-1]["valid_loss"]
    train(config_for(root, run, 2, f"model.init_from={run}", "train.warmup=0"), force="yes")
    assert read_metrics(run)[0]["loss"] < last + 0.3


def test_a_prompt_that_does_not_fit_does_not_stop_training(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = root / "long-prompt"
    prompt = "word " * 200
    train(config_for(root, run, 5, f"train.sample_prompts={prompt}", "sample.min_tokens=0"))
    assert (run / "step-0000005").is_dir()
    assert "train.sample_prompts: sample.prompt" in capsys.readouterr().out


def test_given_weights_count_by_content(root: Path, undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    base, run = tmp_path / "base", root / "given"
    shutil.copytree(undisturbed / f"step-{STEPS:07d}", base)
    train(config_for(root, run, 5, f"model.init_from={base}"))
    base.rename(tmp_path / "moved")
    train(config_for(root, run, 6, f"model.init_from={tmp_path / 'moved'}"))
    shutil.copytree(undisturbed / f"step-{STEPS:07d}", base)
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (base / "model.safetensors").write_bytes(data)
    (base / "progress.json").unlink()  # now a plain model folder, without checksums that show the change
    with pytest.raises(TextmillError, match=r"model\.init_from was"):
        train(config_for(root, run, 7, f"model.init_from={base}"))


def test_only_dropout_may_change_on_given_weights(root: Path, undisturbed: Path) -> None:
    run = root / "dropped"
    train(config_for(root, run, 2, f"model.init_from={undisturbed}", "train.warmup=0", "model.shape.dropout=0.3"))
    assert json.loads((run / "step-0000002" / "config.json").read_text())["resid_pdrop"] == 0.3
