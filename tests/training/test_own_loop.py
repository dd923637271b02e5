"""A loop of one's own over the steps of a run: the bits of the command, resumed, on two processes; and its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import textmill
from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.errors import TextmillError

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 8
MORE = ["engine.micro_batch=2", "train.save_every=4", "train.evaluate_every=4", "train.evaluate_batches=1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("own_loop") / "root"))


@pytest.fixture(scope="module")
def command(root: Path) -> Path:
    """A run of the command, with four micro-batches in each step."""
    textmill.train(config_for(root, root / "command", STEPS, *MORE))
    return root / "command"


def own_loop(root: Path, run: str, kind: str, stop: int = 0, *more: str) -> list[str]:
    given = [*train_arguments(root, root / run, STEPS)[1:], *MORE, *more]
    return [sys.executable, "-m", "tests.support.own_loop", kind, str(stop), *given]


@pytest.mark.parametrize("kind", ["run", "loss"])
def test_a_loop_that_breaks_off_and_resumes_gives_the_bits_of_the_command(root: Path, command: Path, kind: str) -> None:
    for stop in (6, 0):
        subprocess.run(own_loop(root, kind, kind, stop), check=True, capture_output=True)
    assert read_metrics(root / kind) == read_metrics(command)
    assert hash_checkpoint(root / kind, STEPS) == hash_checkpoint(command, STEPS)


def test_a_loss_on_full_logits_gives_the_numbers_of_the_command(root: Path, command: Path) -> None:
    subprocess.run(own_loop(root, "logits", "logits"), check=True, capture_output=True)
    own, theirs = (
        [line for line in read_metrics(run) if "loss" in line or "valid_loss" in line]
        for run in (root / "logits", command)
    )
    assert len(own) == len(theirs)
    for one, other in zip(own, theirs, strict=True):
        for name in ("loss", "grad_norm", "valid_loss"):
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=2e-6)
    logged = [json.loads(line) for line in (root / "logits" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["square"]) for line in logged if "square" in line] == [
        (2, 4),
        (4, 16),
        (6, 36),
        (8, 64),
    ]


def test_a_loop_over_a_net_with_an_auxiliary_loss(root: Path) -> None:
    """A mixture of experts logs the bits of the command in each term; a loss on full logits the same numbers."""
    given = ["model.size=small", "model.shape.layers=1", f"model.family={EXAMPLES / 'mixture_of_experts.py'}"]
    lines = {}
    for kind in ("command", "loss", "logits"):
        config = config_for(root, root / f"experts_{kind}", 2, "engine.micro_batch=4", "train.warmup=0", *given)
        with textmill.open_training(config) as run:
            for step in run:
                if kind == "command":
                    step.run()
                    continue
                for batch in step:
                    if kind == "loss":
                        step.backward(step.loss(batch))
                        continue
                    losses = torch.nn.functional.cross_entropy(
                        step.logits(batch).flatten(0, 1), batch.labels.flatten().long(), reduction="none"
                    )
                    step.backward((losses * batch.weights.flatten()).sum())
        lines[kind] = read_metrics(root / f"experts_{kind}")
    assert lines["loss"] == lines["command"]
    assert hash_checkpoint(root / "experts_loss", 2) == hash_checkpoint(root / "experts_command", 2)
    assert all("perplexity" in line for line in lines["command"] if "loss" in line)
    assert not any("perplexity" in line for line in lines["logits"]), "the loss may be any"
    for one, other in zip(lines["logits"], lines["command"], strict=True):
        for name in ("loss", "auxiliary_loss", "grad_norm"):
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=2e-6)


def test_metrics_outside_of_the_loop_are_refused(root: Path, command: Path) -> None:
    """Also by a run that has no step left, so that a script may be started again."""
    with textmill.open_training(config_for(root, command, STEPS, *MORE)) as run:
        assert list(run) == []
        with pytest.raises(TextmillError, match=r"log: metrics belong to a step; call run\.log inside the loop"):
            run.log(final=1.0)


def test_two_processes_give_the_bits_of_two_processes_of_the_command(root: Path) -> None:
    given = [*train_arguments(root, root / "command_2", STEPS), *MORE]
    assert run_together([sys.executable, "-m", "textmill", *given], 2) == "ok"
    assert run_together(own_loop(root, "loss_2", "loss"), 2) == "ok"
    assert read_metrics(root / "loss_2") == read_metrics(root / "command_2")
    assert hash_checkpoint(root / "loss_2", STEPS) == hash_checkpoint(root / "command_2", STEPS)


def skip(step: Any) -> None:
    pass


def forget_the_loss(step: Any) -> None:
    for _ in step:
        pass


def take_the_only_batch(step: Any) -> None:
    step.batch  # noqa: B018
    step.backward(step.loss(step.batch))


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        (skip, [], "step 1: was not computed; call step.run()"),
        (forget_the_loss, [], "step 1: a micro-batch without a loss; call step.backward(loss)"),
        (take_the_only_batch, MORE, "step 1: has several micro-batches; write: for batch in step, or set"),
        (forget_the_loss, ["engine.kind=jax"], "an own loss in a loop needs engine.kind=torch"),
    ],
)
def test_mistakes_in_a_loop(root: Path, tmp_path: Path, body: Any, settings: list[str], message: str) -> None:
    if "engine.kind=jax" in settings:
        pytest.importorskip("jax")

    def train() -> None:
        with textmill.open_training(config_for(root, tmp_path, STEPS, *settings)) as run:
            for step in run:
                body(step)

    with pytest.raises(TextmillError) as caught:
        train()
    assert str(caught.value).startswith(message)


def test_a_step_with_one_micro_batch_and_its_activations(root: Path, tmp_path: Path) -> None:
    with textmill.open_training(config_for(root, tmp_path, 2, "engine.micro_batch=8", "train.warmup=0")) as run:
        for step in run:
            with run.capture("h.0.mlp") as outputs:
                step.backward(step.loss(step.batch))
            assert [tuple(output.shape) for output in outputs] == [(8, 32, 32)]
            assert (step.batch.inputs.numpy() == step.samples.inputs).all()
        unknown = pytest.raises(TextmillError, match=r"capture: no module 'h\.0\.mpl'; choose one such as h\.0\.mlp")
        with unknown, run.capture("h.0.mpl"):
            pass
    with textmill.open_training(config_for(root, tmp_path, 2, "engine.micro_batch=8", "train.warmup=0")) as run:
        assert list(run) == [], "nothing is left to do"


def test_an_opened_run(root: Path, command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = textmill.open(command, {"engine.device": "cpu"})
    batch = run.batch(3)
    with torch.no_grad():
        net = run.net()
        logits = net.logits(net(torch.tensor(batch.inputs)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(batch.labels).flatten().long())
    assert abs(float(loss) - read_metrics(command)[0]["loss"]) < 1
    assert batch.inputs.shape == (8, 32)
    assert np.array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])
    assert run.tokenizer.decode(run.tokenizer.encode("KING")) == "KING"
    assert run.generate("KING", max_tokens=4, temperature=0.0) == run.generate("KING", max_tokens=4, temperature=0.0)
    assert run.evaluate(baselines=False)["perplexity"]["bits_per_byte"] > 0
    with torch.no_grad(), run.capture("h.0.attn") as outputs:
        run.net()(torch.tensor(batch.inputs))
    assert [tuple(output.shape) for output in outputs] == [(8, 32, 32)]
    curves = run.curves()
    assert ElementTree.fromstring(curves._repr_svg_()).tag.endswith("svg")
    assert "valid loss, steps 4 to 8" in repr(curves)
    with pytest.raises(TextmillError, match=r"sample\.temprature: no such key; did you mean 'sample\.temperature'"):
        run.generate("KING", temprature=0.0)
