"""The files of examples/ through the whole life of a model, and in the model process of a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import textmill
from bench.kill_train import hash_checkpoint, read_metrics
from bench.kill_train import textmill as textmill_command
from textmill.cli import main
from textmill.config import SampleConfig
from textmill.conversion.readers import check_with_reader
from textmill.generation.requests import Request, TextChunk
from textmill.reports.run_files import read_run
from textmill.server.lifecycle import open_service
from textmill.where import open_where

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILIES = ["mixture_of_experts", "recurrent"]
SMALL = [
    "model.shape.layers=2",
    "model.shape.heads=2",
    "model.shape.width=32",
    "model.shape.inner=64",
    "model.shape.dropout=0.1",
]
TRAIN = [
    "tokenizer.vocab=300",
    "model.size=small",
    "train.length=32",
    "train.batch=8",
    "train.preset=none",
    "train.learning_rate=3e-3",
    "train.schedule=constant",
    "train.warmup=0",
    "train.log_every=1",
    "train.save_every=3",
    "train.evaluate_every=3",
    "train.evaluate_batches=2",
    "train.packed.isolate_documents=true",
    "engine.micro_batch=4",
    "engine.device=cpu",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return tokenized


def train(root: Path, run: Path, steps: int, *more: str) -> None:
    given = [f"folder={root}", f"train.folder={run}", f"train.steps={steps}", *TRAIN, *more]
    assert main(["train", "quickstart", *given]) == 0


def check_server(run: Path, settings: dict[str, str], ids: list[int]) -> None:
    """The model process of a server loads the file."""
    service = open_service(open_where(str(run), {**settings, "serve.slots": 2}).config)

    async def first_chunk() -> TextChunk:
        chunks = asyncio.Queue[TextChunk]()
        await service.model.load()
        try:
            service.model.submit(Request(tuple(ids), SampleConfig(max_tokens=4)), chunks.put_nowait)
            return await asyncio.wait_for(chunks.get(), 60)
        finally:
            await service.model.close(0)

    done = asyncio.run(first_chunk()).done
    assert done is not None
    assert done.reason in ("length", "stop")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_through_its_life(root: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family = f"model.family={EXAMPLES / name}.py"
    given = [family, *SMALL, "train.optimizer=muon"]
    for steps in (3, 6):
        train(root, tmp_path / "run", steps, *given)
    train(root, tmp_path / "straight", 6, *given)
    assert hash_checkpoint(tmp_path / "run", 6) == hash_checkpoint(tmp_path / "straight", 6)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    balance = [line["auxiliary_loss"] for line in lines if "auxiliary_loss" in line]
    # Two layers; a perfectly balanced one has 1 x the weight of the loss.
    assert all(0.019 < one < 0.05 for one in balance)
    assert bool(balance) == (name == "mixture_of_experts")

    settings = {"model.family": f"{EXAMPLES / name}.py", "engine.device": "cpu"}
    opened = textmill.open(tmp_path / "run", settings)
    greedy = {"temperature": 0.0, "max_tokens": 8, "min_tokens": 8}
    (text,) = opened.generate("KING", **greedy)
    net, ids = opened.net(), opened.tokenizer.encode("KING")
    wanted = list(ids)
    with torch.no_grad():
        for _ in range(8):
            wanted.append(int(net.logits(net(torch.tensor([wanted])))[0, -1].argmax()))
    assert text == opened.tokenizer.decode(wanted[len(ids) :])
    assert opened.evaluate(baselines=False)["perplexity"]["bits_per_byte"] > 0

    if name == FAMILIES[0]:  # what the file itself does not change
        check_server(tmp_path / "run", settings, ids)
        lora = [family, "model.lora.rank=2", f"model.init_from={tmp_path / 'run'}"]
        train(root, tmp_path / "lora", 3, *lora)
        assert textmill.open(tmp_path / "lora", settings).generate("KING", **greedy)

    capsys.readouterr()
    for kind in ("gguf", "onnx"):
        export = ["export", str(tmp_path / "run"), family, f"export.kind={kind}", f"export.folder={tmp_path / kind}"]
        assert main(export) == 2
        assert name in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), family, f"export.folder={tmp_path / 'plain'}"]) == 0
    model: Any = SimpleNamespace(shape=net.shape, tokenizer=opened.tokenizer)
    (opens,) = check_with_reader(model, tmp_path / "plain", "hf", "fp32", ["a text"], "the export")
    assert opens == f"not opened with other programs, which do not know the family {name}"
    assert read_run(tmp_path / "run").parameters == net.shape.parameters, "without running the file"


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_killed_run_resumes_bitwise(root: Path, tmp_path: Path, name: str) -> None:
    """With SIGKILL after a step and while a checkpoint is written, with all three examples' code."""
    parts = [f"model.family={EXAMPLES / name}.py", f"train.optimizer={EXAMPLES / 'lion.py'}", *SMALL]

    def start(run: str, fault: str = "") -> int:
        given = [f"folder={root}", f"train.folder={tmp_path / run}", "train.steps=9", *TRAIN, *parts]
        return textmill_command("train", "quickstart", *given, env={**os.environ, "TEXTMILL_FAULT": fault}).returncode

    assert start("straight") == 0
    # Each time it goes on from the last intact checkpoint.
    assert [start("killed", fault) for fault in ("kill@step:4", "kill@disk:30", "kill@step:8")].count(
        -signal.SIGKILL
    ) >= 2
    assert start("killed") == 0
    assert hash_checkpoint(tmp_path / "killed", 9) == hash_checkpoint(tmp_path / "straight", 9)
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "straight")


def test_an_optimizer_and_a_loss_of_ones_own(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lion by its formula; a loss in a file that is the built-in one gives its numbers."""
    optimizer = f"train.optimizer={EXAMPLES / 'lion.py'}"
    loss = tmp_path / "my_loss.py"
    loss.write_text(
        "import torch.nn.functional as F\n\n\n"
        "def loss(logits, batch):\n"
        "    labels = batch.labels.flatten().long()\n"
        "    losses = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction='none')\n"
        "    return (losses * batch.weights.flatten()).sum()\n"
    )
    given = ["model.size=nano", "model.shape.layers=1", "train.learning_rate=1e-3", "train.weight_decay=0"]
    for steps in (3, 6):
        train(root, tmp_path / "run", steps, *given, optimizer, f"train.loss={loss}")
    train(root, tmp_path / "straight", 6, *given, optimizer, f"train.loss={loss}")
    train(root, tmp_path / "built_in", 6, *given, optimizer)
    assert hash_checkpoint(tmp_path / "run", 6) == hash_checkpoint(tmp_path / "straight", 6)

    def losses(run: str) -> list[float]:
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    assert losses("run") == pytest.approx(losses("built_in"), rel=1e-3)
    train(root, tmp_path / "one", 1, *given, optimizer)
    before, after = (textmill.open(tmp_path / "one", {"engine.device": "cpu"}, step=step) for step in (1, 1))
    assert before.generate("KING", max_tokens=2), "needs no file of code"
    changed = {round(float(one), 5) for one in (after.net().blocks[0].ln_1.weight - 1).abs().flatten()}
    assert changed == {0.001}, "the sign of the first momentum times the rate"
    capsys.readouterr()
    loss.write_text(loss.read_text() + "\n# changed\n")
    words = [f"folder={root}", f"train.folder={tmp_path / 'run'}", *TRAIN, *given, optimizer, f"train.loss={loss}"]
    assert main(["train", "quickstart", "train.steps=9", *words]) == 2
    assert "train.loss was a file with SHA-256" in capsys.readouterr().err
    assert main(["train", "quickstart", f"folder={root}", "train.optimizer=lino"]) == 2
    assert "train.optimizer: found 'lino'; give one of adamw, muon, or your own file" in capsys.readouterr().err
