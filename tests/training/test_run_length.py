"""The length of a run: every unit becomes steps, and actions are due after the right ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoConfig

from bench.kill_train import read_metrics
from textmill import open_model
from textmill.config import RunConfig, TrainConfig
from textmill.config.load import build_config
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.tokens.batches.blend import BatchSizes
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.training.loop import train
from textmill.training.run_length import RunLength, plan_run_length
from textmill.where import open_where


def planned(length: int = 10, epoch_samples: int = 50, **settings: Any) -> RunLength:
    section = TrainConfig(**{"batch": 8, "warmup": 0, **settings})
    return plan_run_length(section, BatchSizes(section.batch, section.batch_rampup), epoch_samples, length)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 1000),
        ({"steps": 3}, 3),
        ({"epochs": 1}, 7),  # 50 samples: six steps of 8 and a part of the seventh
        ({"epochs": 2}, 13),
        ({"epochs": 0.16}, 1),
        ({"epochs": 0.1 + 0.2}, 2),
        ({"epochs": 4}, 25),
        ({"samples": 79}, 9),
        ({"samples": 80}, 10),
        ({"tokens": 799}, 9),
        ({"tokens": 800}, 10),
        ({"samples": 24, "batch_rampup": [2, 3, 10]}, 5),  # 2, 2, 2, 5 and 8 make 19, one more step would be 27
        ({"epochs": 0.5, "batch_rampup": [2, 3, 10]}, 6),  # 25 samples
    ],
)
def test_units_become_steps(settings: dict[str, Any], steps: int) -> None:
    found = planned(**settings)
    assert found.steps == steps
    assert found.train.unit == "steps"
    assert f"{steps:,} steps" in found.describe()


def test_epochs_end_where_their_last_sample_is_seen() -> None:
    found = planned(epochs=3)
    assert [done for done in range(1, 20) if found.is_due("epoch", done)] == [7, 13, 19]
    assert [done for done in range(1, 20) if found.is_due(5, done)] == [5, 10, 15, 19]
    grown = planned(samples=60, batch_rampup=[2, 3, 10])
    assert [done for done in range(1, 11) if grown.is_due("epoch", done)] == [9, 10]
    whole = planned(epoch_samples=16, steps=6)
    assert [done for done in range(1, 7) if whole.is_due("epoch", done)] == [2, 4, 6]


def test_batch_rampup_is_described() -> None:
    assert planned(steps=9, batch_rampup=[2, 3, 10]).describe() == (
        "9 steps of 2 samples, growing to 8 from step 5 on, 10 tokens each: 510 tokens, 1.02 epochs of 50 samples"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 7}, r"train\.samples: 7 is less than one step, which has 80 tokens; raise it"),
        ({"tokens": 79}, r"train\.tokens: 79 is less"),
        ({"epochs": 1, "warmup": 8}, r"train\.warmup: 8 is more than the 7 steps of train\.epochs=1"),
        ({"epochs": 1, "steps": 5}, r"train\.epochs: the run's length is set by train\.steps too; keep one"),
        ({"tokens": 1, "samples": 5}, r"train\.tokens: the run's length is set by train\.samples too"),
        ({"evaluate_every": 0}, r"train\.evaluate_every: found 0; give a number of steps above 0, or epoch"),
        ({"batch_rampup": [2, 3]}, r"train\.batch_rampup: found \[2, 3\]; give three"),
        ({"batch_rampup": [0, 3, 5]}, r"train\.batch_rampup: found"),
        ({"batch_rampup": [8, 3, 5]}, r"train\.batch_rampup: starts with 8, which is not below train\.batch=8"),
        (
            {"batch_rampup": [2, 4, 5]},
            r"train\.batch_rampup: an increment of 4 does not divide the growth from 2 to train\.batch=8; 2 does",
        ),
    ],
)
def test_invalid_lengths_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        planned(**settings)


def test_a_batch_rampup_that_micro_batches_do_not_divide_is_refused() -> None:
    tree = {"train": {"batch": 8, "batch_rampup": [2, 2, 100]}}
    assert build_config({**tree, "engine": {"micro_batch": 2}}).train.batch_rampup == [2, 2, 100]
    with pytest.raises(
        TextmillError,
        match=r"engine\.micro_batch: 4 does not divide train\.batch=8 with train\.batch_rampup=2,2,100; 2 does",
    ):
        build_config({**tree, "engine": {"micro_batch": 4}})


def test_a_unit_reads_back_and_the_last_one_set_wins(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 5}\n")
    config = open_where(str(file), ["train.epochs=2.5"]).config
    assert (config.train.unit, config.train.epochs) == ("epochs", 2.5)
    assert "steps" not in config.model_dump()["train"]
    file.write_text(config.to_yaml())
    assert open_where(str(file), []).config == config
    assert open_where(str(file), ["train.steps=7"]).config.train == TrainConfig(steps=7)
    with pytest.raises(ValidationError, match="steps"):
        TrainConfig(steps=None)  # type: ignore[arg-type]


QUICK: dict[str, Any] = {
    "tokenizer": {"vocab": 300},
    "model": {"size": "nano", "shape": {"layers": 1, "heads": 1, "width": 16}},
    "train": {
        "length": 32,
        "batch": 32,
        "batch_rampup": [8, 8, 75],
        "checkpoints": {"keep": 9},
        "schedule": "constant",
        "warmup": 0,
        "log_every": 1,
        "evaluate_every": "epoch",
        "save_every": "epoch",
    },
    "engine": {"device": "cpu"},
    "runner": {"workers": 1},
}


def test_epochs_resume_like_steps_and_a_growing_batch_is_counted(
    tiny_texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluate and save at the end of each epoch; a run extended by half an epoch equals a run of that length."""

    def config(run: str, epochs: float) -> RunConfig:
        corpus = {"sources": [str(tiny_texts)], "documents": "block", "dedup": "none", "split": [80, 20]}
        section = {**QUICK["train"], "folder": str(tiny_texts.parent / run), "epochs": epochs}
        return build_config({**QUICK, "folder": str(tiny_texts.parent), "corpus": corpus, "train": section})

    once, twice = (config(run, 1.5) for run in ("once", "twice"))
    prepare(once)
    fit_tokenizer(once)
    tokenize(once)
    train(config("twice", 1))
    train(twice)
    train(once)
    assert read_metrics(once.folder_of("train")) == read_metrics(twice.folder_of("train"))
    epoch = open_batches(once.train, open_splits(once), length=32, folder=None).layouts[0].samples_per_epoch
    sizes = [
        8,
        8,
        8,
        8,
        16,
        16,
        24,
    ]  # eight more at 25, 50 and 75 samples: a step begins after 0, 8, 16, 24, 32, 48, 64 and 88
    ends = [sum(sizes) + 32 * step for step in range(99)]
    assert epoch > ends[0]
    first, last = (next(end for end in ends if end >= share * epoch) for share in (1, 1.5))
    steps = [len(sizes) + ends.index(end) for end in (first, last)]
    run = once.folder_of("train")
    assert [line["step"] for line in read_metrics(run) if "valid_loss" in line] == steps
    progress = [json.loads((run / f"step-{step:07d}" / "progress.json").read_text()) for step in steps]
    assert [one["samples"] for one in progress] == [first, last]
    assert [one["tokens"] for one in progress] == [32 * first, 32 * last]
    best = min(progress, key=lambda one: float.fromhex(one["valid_loss"]))
    output = capsys.readouterr().out
    assert f"{steps[1]} steps of 8 samples, growing to 32 from step 8 on" in output
    assert (
        f"train: the best checkpoint is step {best['step']}, valid loss {float.fromhex(best['valid_loss']):.4f}: "
        in output
    )
    assert open_model(str(run / "best")).step == best["step"]
    assert AutoConfig.from_pretrained(run / "best").vocab_size == 300
    changes = json.loads((twice.folder_of("train") / f"step-{steps[1]:07d}" / "progress.json").read_text())["changes"]
    assert [change["change"] for change in changes] == ["train.epochs was 1.0, is 1.5"]
