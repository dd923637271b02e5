"""A schedule, a filter and a task in files of one's own, next to the built-in parts that they repeat; their records;
and that nothing runs which the user did not name. Loss and optimizer: tests/models/test_examples.py."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.together import run_together
from textmill.cli import main
from textmill.config import TrainConfig
from textmill.config.own_files import load_part, open_own_file
from textmill.engines.meshes import Mesh
from textmill.engines.optimizers import check_optimizer_mesh
from textmill.errors import TextmillError

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEDULE = """
def learning_rate(step, train):
    warm = round(train.warmup * train.steps)
    if step < warm:
        return train.learning_rate * (step + 1) / warm
    return train.learning_rate * (1 - (step - warm) / (train.steps - warm))
"""
LOSS = """
import torch.nn.functional as F

def loss(logits, batch):
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten().long(), ignore_index=-100, reduction="none")
    return (losses * batch.weights.flatten()).sum()
"""
FILTER = """
def keep(text, fields):
    return fields["stars"] > 2 and "spam" not in text
"""
TASK = """
from textmill.evaluation.task import Measured

def measure(scorer, settings, entry):
    scores = scorer.score_texts([("The king", " is"), ("The king", " was")])
    first, second = (score.log_likelihood for score in scores)
    items = [{"id": "king", "is": first}]
    return Measured({"is_before_was": first - second}, {"protocol": "two words", "examples": 1}, items=items)
"""
SMALL = ["train.warmup=0.25", "train.save_every=4", "engine.micro_batch=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("own_parts") / "root"))


def train(root: Path, run: str, *more: str, steps: int = 8) -> int:
    return main([*train_arguments(root, root / run, steps), *SMALL, *more])


def test_a_schedule(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in formula in a file gives its bits, also when the run is resumed; a changed file is refused."""
    path = root / "my_schedule.py"
    path.write_text(SCHEDULE)
    given = ["train.preset=none", f"train.schedule={path}"]
    assert train(root, "built_in", "train.preset=none", "train.schedule=linear") == 0
    assert train(root, "own", *given, "train.steps=8", "train.epochs=null") == 0
    assert read_metrics(root / "own") == read_metrics(root / "built_in")
    shutil.copytree(root / "own", root / "resumed")
    shutil.rmtree(root / "resumed" / "step-0000008")
    assert train(root, "resumed", *given) == 0
    assert hash_checkpoint(root / "resumed", 8) == hash_checkpoint(root / "built_in", 8)
    assert (root / "own" / "step-0000008" / "train.schedule.py.txt").read_text() == SCHEDULE
    assert main(["check", str(root / "own")]) == 0

    path.write_text(SCHEDULE + "# changed\n")
    capsys.readouterr()
    assert train(root, "own", *given, steps=12) == 2
    assert "train.schedule was a file with SHA-256" in capsys.readouterr().err
    assert main(["train", str(root / "own")]) == 2, "the recorded file is not run"
    assert "train.schedule was a file" in capsys.readouterr().err
    assert train(root, "own", *given, "--change", steps=12) == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def rate(step, train): return 1", "does not define learning_rate; see docs/own-parts.md"),
        ("1 / 0", "fails when it is loaded: ZeroDivisionError"),
        (
            "def learning_rate(step, train):\n    return -1 if step == train.steps - 1 else 1e-3",
            "learning_rate(step=7, ...)",
        ),
        ("def learning_rate(step, train): pass", "returns None; a learning rate is a finite number"),
    ],
)
def test_mistakes_in_a_schedule(
    root: Path, tmp_path: Path, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert train(root, "wrong", f"train.schedule={tmp_path / 'mine.py'}") == 2
    assert message in capsys.readouterr().err
    assert not (root / "wrong").exists()


def test_an_edited_file_does_not_change_what_runs(tmp_path: Path) -> None:
    """A run uses the file as it was read, and recorded, at its start."""
    path = tmp_path / "mine.py"
    path.write_text("def part(): return 1")
    assert load_part(str(path), "train.loss", "part")() == 1
    path.write_text("def part(): return 2")
    assert load_part(str(path), "train.loss", "part")() == 1
    open_own_file(str(path), "train.loss", "part")
    assert load_part(str(path), "train.loss", "part")() == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)", "with doubled batch.weights the loss is"),
        ("(losses * batch.weights.flatten()).mean()", "the losses of two halves of a batch add up to"),
        ("(losses * batch.weights.flatten()).sum() + 0.01 * logits.logsumexp(-1).square().sum()", "have a gradient"),
        ("(losses * batch.weights.flatten()).sum().log() - torch.inf", "returns -inf; return a finite loss"),
        ("losses", "fails with RuntimeError: grad can be implicitly created only for scalar outputs"),
    ],
)
def test_a_loss_that_breaks_its_contract(
    root: Path, tmp_path: Path, body: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step, since micro-batches and processes would change the numbers without a word."""
    (tmp_path / "loss.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\ndef loss(logits, batch):\n"
        "    labels = batch.labels.flatten().long()\n"
        "    losses = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction='none')\n"
        f"    return {body}\n"
    )
    assert train(root, "wrong_loss", f"train.loss={tmp_path / 'loss.py'}") == 2
    assert message in capsys.readouterr().err
    assert not (root / "wrong_loss").exists()


def test_an_optimizer_with_state_of_other_shapes(root: Path) -> None:
    """SOAP's matrices and its count of updates are saved: a resumed run has the bits of one that was not stopped."""
    given = [f"train.optimizer={EXAMPLES / 'soap.py'}", "train.learning_rate=3e-3", "model.shape.layers=1"]
    assert train(root, "soap", *given) == 0
    shutil.copytree(root / "soap", root / "soap_resumed")
    shutil.rmtree(root / "soap_resumed" / "step-0000008")
    assert train(root, "soap_resumed", *given) == 0
    assert hash_checkpoint(root / "soap_resumed", 8) == hash_checkpoint(root / "soap", 8)
    state = load_file(root / "soap" / "step-0000008" / "optimizer.safetensors")
    width = state["momentum/transformer.h.0.attn.c_attn.weight"].shape
    sizes = {tuple(state[f"{name}/transformer.h.0.attn.c_attn.weight"].shape) for name in ("left", "right_basis")}
    assert sizes == {(size, size) for size in width}
    assert state["steps/transformer.h.0.attn.c_attn.weight"] == 8
    basis = state["left_basis/transformer.h.0.mlp.c_fc.weight"]
    assert abs(basis @ basis.T - np.eye(len(basis))).max() < 1e-4
    assert "m/transformer.wte.weight" in state, "AdamW updates what `takes` leaves"
    with pytest.raises(TextmillError, match="does not say that its update works on each number alone"):
        check_optimizer_mesh(TrainConfig(optimizer=str(EXAMPLES / "soap.py")), Mesh(shard=2))
    check_optimizer_mesh(TrainConfig(optimizer=str(EXAMPLES / "soap.py")), Mesh(replicate=2))
    check_optimizer_mesh(TrainConfig(optimizer=str(EXAMPLES / "lion.py")), Mesh(shard=2))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def update(parameter, gradient, state, lr, decay): parameter = parameter - lr * gradient",
            "changed no weight",
        ),
        (
            "import torch\ndef new_state(parameter): return {'sums': torch.zeros(2).double()}\n"
            "def update(parameter, gradient, state, lr, decay): parameter.sub_(lr * gradient)",
            "new_state returns torch.float64 as 'sums'; give tensors of torch.float32",
        ),
    ],
)
def test_mistakes_in_an_optimizer(
    root: Path, tmp_path: Path, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code)
    run = f"wrong_{len(code)}"
    assert train(root, run, f"train.optimizer={tmp_path / 'mine.py'}") == 2
    assert message in capsys.readouterr().err


def test_state_that_an_update_replaces_is_kept(root: Path, tmp_path: Path) -> None:
    """`state["momentum"] = ...` is as good as a change in place."""
    in_place = "state['momentum'].mul_(0.9).add_(gradient)"
    replaced = "state['momentum'] = state['momentum'] * 0.9 + gradient"
    for name, change in (("in_place", in_place), ("replaced", replaced)):
        (tmp_path / f"{name}.py").write_text(
            "STATE = ('momentum',)\n"
            f"def update(parameter, gradient, state, lr, decay):\n    {change}\n"
            "    parameter.sub_(state['momentum'] * lr)\n"
        )
        given = [f"train.optimizer={tmp_path / name}.py", "train.learning_rate=0.1", "model.shape.layers=1"]
        assert train(root, name, *given, steps=4) == 0
    assert hash_checkpoint(root / "in_place", 4) == hash_checkpoint(root / "replaced", 4)


@pytest.mark.long
def test_two_processes_with_own_parts(root: Path, tmp_path: Path) -> None:
    """Over gloo, with data parallelism and with sharded weights: the numbers of one process, and a resume's bits."""
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "schedule.py").write_text(SCHEDULE)
    parts = [
        f"train.loss={tmp_path / 'loss.py'}",
        f"train.schedule={tmp_path / 'schedule.py'}",
        f"train.optimizer={EXAMPLES / 'lion.py'}",
        f"model.family={EXAMPLES / 'mixture_of_experts.py'}",
        "model.size=small",
        "train.preset=none",
        "train.learning_rate=1e-3",
        "model.shape.layers=2",
        "model.shape.inner=64",
        "engine.micro_batch=4",
    ]
    # Lion's signs amplify rounding, so that only the first steps of other sums are near.
    assert main([*train_arguments(root, tmp_path / "one", 8), *SMALL, *parts]) == 0
    for mesh in ("engine.mesh.replicate=2", "engine.mesh.shard=2"):
        name = mesh.removeprefix("engine.mesh.")

        def together(run: Path, steps: int, given: str = mesh) -> str:
            arguments = [*train_arguments(root, run, 8), *SMALL, *parts, given, f"train.save_every={steps}"]
            return run_together([sys.executable, "-m", "textmill", *arguments], 2)

        assert together(tmp_path / name, 4) == "ok"
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-resumed")
        shutil.rmtree(tmp_path / f"{name}-resumed" / "step-0000008")
        assert together(tmp_path / f"{name}-resumed", 4) == "ok"
        assert hash_checkpoint(tmp_path / name, 8) == hash_checkpoint(tmp_path / f"{name}-resumed", 8)
        for one, two in zip(read_metrics(tmp_path / "one")[:3], read_metrics(tmp_path / name)[:3], strict=True):
            for key in ("loss", "learning_rate", "auxiliary_loss"):
                assert two.get(key) == pytest.approx(one.get(key), rel=1e-4)


def write_reviews(folder: Path) -> list[str]:
    rows = [{"text": f"review number {n} {'spam' if n % 5 == 0 else 'fine'}", "stars": n % 6} for n in range(120)]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_filter.py").write_text(FILTER)
    return [row["text"] for row in rows if row["stars"] > 2 and "spam" not in row["text"]]


def test_a_filter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It sees the text and the kept fields, in worker processes, and is counted and recorded."""
    wanted = write_reviews(tmp_path)
    project = tmp_path / "textmill.yaml"
    corpus = {"sources": ["reviews.jsonl"], "keep_fields": ["stars"], "filter": "my_filter.py", "keep_dropped": True}
    project.write_text(yaml.safe_dump({"corpus": corpus, "runner": {"workers": 2}}))
    assert main(["prepare", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    folder = tmp_path / "corpus"
    kept = [text for path in folder.glob("t*-*.parquet") for text in pq.read_table(path)["text"].to_pylist()]
    kept += [text for path in folder.glob("valid-*.parquet") for text in pq.read_table(path)["text"].to_pylist()]
    assert sorted(kept) == sorted(wanted)
    account = json.loads((folder / "account.json").read_text())
    assert account["dropped"] == {"filter": 120 - len(wanted)}
    assert f"filter {120 - len(wanted)}" in output
    assert (folder / "corpus.filter.py.txt").read_text() == FILTER
    assert main(["check", str(folder)]) == 0
    assert main(["prepare", str(tmp_path)]) == 0
    assert "done already" in capsys.readouterr().out

    (tmp_path / "my_filter.py").write_text(FILTER.replace("> 2", "> 3"))
    assert main(["prepare", str(tmp_path)]) == 2
    assert "corpus.filter was a file with SHA-256" in capsys.readouterr().err
    assert main(["prepare", str(folder)]) == 2, "the recorded file is not run"
    (tmp_path / "my_filter.py").write_text("def keep(text, fields): fields['star']")
    assert main(["prepare", str(tmp_path), "--force"]) == 2
    assert "my_filter.py:1 fails with KeyError: 'star'; the document begins 'review number" in capsys.readouterr().err
    (tmp_path / "my_filter.py").write_text("def keep(text, fields): pass")
    assert main(["prepare", str(tmp_path), "--force"]) == 2
    assert "my_filter.py returns None; return True to keep a document" in capsys.readouterr().err
    assert main(["prepare", str(tmp_path), "corpus.filter=spam"]) == 2
    assert "corpus.filter: found 'spam'; name a Python file" in capsys.readouterr().err


def test_a_task(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured by the command and in mid-run; its code is part of the protocol."""
    (tmp_path / "my_task.py").write_text(TASK)
    task = tmp_path / "my_task.py"
    assert train(root, "tasks", f"train.tasks=[{task}]") == 0
    logged = [line for line in read_metrics(root / "tasks") if "my_task/is_before_was" in line]
    assert len(logged) == 1
    run = str(root / "tasks")
    assert main(["evaluate", run, f"evaluate.tasks=[{task}]", "engine.device=cpu"]) == 0
    output = capsys.readouterr().out
    assert "is_before_was" in output
    assert "code_sha256" in output
    (result,) = (root / "tasks" / "evaluation").glob("*-my_task-*.json")
    measured = json.loads(result.read_text())["my_task"]["is_before_was"]
    assert measured == pytest.approx(logged[0]["my_task/is_before_was"], rel=1e-5)
    assert result.with_suffix(".py.txt").read_text() == TASK
    assert json.loads(result.with_suffix(".items.jsonl").read_text())["task"] == "my_task"

    task.write_text(TASK + "# another protocol\n")
    assert main(["evaluate", run, f"evaluate.tasks=[{task}]", "engine.device=cpu"]) == 0
    assert len(list((root / "tasks" / "evaluation").glob("*-my_task-*.json"))) == 2
    task.write_text("def score(): pass")
    assert main(["evaluate", run, f"evaluate.tasks=[{task}]"]) == 2
    assert "my_task.py does not define measure; see docs/own-parts.md" in capsys.readouterr().err


def test_a_recorded_file_is_never_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a run nor from a checkpoint that was copied from somewhere else."""
    assert train(root, "plain") == 0
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n{TASK}")
    monkeypatch.chdir(tmp_path)
    copied = tmp_path / "copied"
    shutil.copytree(root / "plain" / "step-0000008", copied)
    recorded = yaml.safe_load((copied / "run.yaml").read_text())
    recorded["evaluate"] = {"tasks": [str(evil), "perplexity", "evil.py:data.jsonl"]}
    recorded["train"] |= dict.fromkeys(("loss", "optimizer", "schedule"), "evil.py") | {"tasks": ["evil.py"]}
    recorded["corpus"]["filter"] = "evil.py"
    for folder in (copied, root / "plain" / "step-0000008", root / "plain"):
        (folder / "run.yaml").write_text(yaml.safe_dump(recorded))
    text = tmp_path / "text.txt"
    text.write_text("The king is here.\n" * 20)
    for where in (copied, root / "plain", copied / "run.yaml"):
        main(["evaluate", str(where), f"evaluate.text=[{text}]", "engine.device=cpu"])
        main(["train", str(where), f"train.folder={tmp_path / 'new'}", "engine.device=cpu", "train.steps=1"])
        main(["prepare", str(where)])
    assert not (tmp_path / "was_run").exists()
    assert main(["evaluate", str(root / "plain"), "evaluate.tasks=[evil.py]", "engine.device=cpu"]) == 0
    assert (tmp_path / "was_run").exists()
