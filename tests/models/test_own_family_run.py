"""A model of the user's own family on the command line: train, generate, evaluate, LoRA, verify.

What is equal after a resume, and the server, test_examples.py checks for the families of examples/.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_runs import MYNET
from textmill.cli import main
from textmill.models import open_family

SMALL = [
    "tokenizer.vocab=300",
    "model.shape.layers=2",
    "model.shape.heads=4",
    "model.shape.width=32",
    "model.shape.inner=64",
    "model.shape.extra={kv_heads: 2}",
    "model.size=small",
    "train.length=32",
    "train.batch=8",
    "train.evaluate_every=3",
    "train.evaluate_batches=2",
    "train.log_every=1",
    "train.schedule=constant",
    "train.warmup=0",
    "engine.device=cpu",
]
GENERATE = ["sample.prompt=KING", "sample.min_tokens=0", "sample.max_tokens=8", "engine.device=cpu"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """Tokens, a copy of the family's file, and a run of three steps."""
    folder = tmp_path_factory.mktemp("own") / "project"
    shutil.copytree(tokenized, folder)
    shutil.copy(MYNET, folder / "mynet.py")
    train(folder, "run", 3)
    return folder


def words(folder: Path, run: str, steps: int, *more: str) -> list[str]:
    data = [f"folder={folder}", f"train.folder={folder / run}", f"model.family={folder / 'mynet.py'}"]
    return ["train", "quickstart", *data, *SMALL, f"train.steps={steps}", "train.save_every=3", *more]


def train(folder: Path, run: str, steps: int, *more: str) -> None:
    assert main(words(folder, run, steps, *more)) == 0


def test_the_file_runs_only_if_the_user_names_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(project / "run"), *GENERATE]) == 2
    assert f"add model.family={project / 'mynet.py'}" in capsys.readouterr().err
    assert main(["generate", str(project / "run"), f"model.family={project / 'mynet.py'}", *GENERATE]) == 0
    assert main(["show", str(project / "tokens")]) == 0, "a folder without a model needs no file"


def test_the_printed_commands_name_the_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words(project, "run", 6)[1:]]) == 0
    config = json.loads((project / "run" / "step-0000006" / "config.json").read_text())
    assert (config["model_type"], config["kv_heads"]) == ("mynet", 2)
    generate = shlex.split(capsys.readouterr().out.partition("Next:\n")[2].splitlines()[0])
    assert main([*generate[1:], *GENERATE]) == 0, capsys.readouterr().err


def test_a_changed_file_blocks_a_resume(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(project / "run", tmp_path / "run")
    changed = tmp_path / "mynet.py"
    changed.write_text(Path(MYNET).read_text() + "\n# changed\n")
    refused = [f"train.folder={tmp_path / 'run'}", f"model.family={changed}"]
    assert main(words(project, "run", 9, *refused)) == 2
    assert f"{changed}: the file has changed since" in capsys.readouterr().err


def test_a_family_with_another_objective_does_not_generate(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_family(str(project / "mynet.py")), "OBJECTIVE", "masked")
    assert main(["generate", str(project / "run"), f"model.family={project / 'mynet.py'}", *GENERATE]) == 2
    assert (
        "predicts masked tokens, not the next one, so it cannot generate text; use: textmill fill"
        in capsys.readouterr().err
    )


def test_evaluate_export_and_bare_models(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = f"model.family={project / 'mynet.py'}"
    assert (
        main(["evaluate", str(project / "run"), family, "evaluate.baselines=false", "engine.device=cpu", "--json"]) == 0
    )
    capsys.readouterr()
    assert main(["export", str(project / "run"), family, f"export.folder={tmp_path / 'plain'}"]) == 0
    texts = []
    for where in (project / "run", tmp_path / "plain"):
        capsys.readouterr()
        assert main(["generate", str(where), family, *GENERATE]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "lora", [[], pytest.param(["model.lora.rank=2"], marks=pytest.mark.long)], ids=["full", "lora"]
)
def test_an_own_family_is_finetuned(project: Path, tmp_path: Path, lora: list[str]) -> None:
    """By `textmill train` in a process that has not loaded the family's file."""
    given = [word for word in words(project, "run", 2, *lora) if not word.startswith("model.shape.")][2:]
    more = [f"train.folder={tmp_path / 'run'}", f"model.init_from={project / 'run'}", "train.optimizer=adamw"]
    command = [sys.executable, "-m", "textmill", "train", "quickstart", *given, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "step-0000002").is_dir()


def test_adapters_of_an_own_family(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = [
        "model.lora.rank=2",
        f"model.init_from={project / 'run'}",
        "train.optimizer=adamw",
        "train.learning_rate=1e-3",
    ]
    given = [word for word in words(project, "lora", 3, *lora) if not word.startswith("model.shape.")]
    assert main(given) == 0
    settings = json.loads((project / "lora" / "step-0000003" / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"] is False
    assert settings["target_modules"] == ["down", "gate", "out", "qkv", "up"]
    assert main(["generate", str(project / "lora"), f"model.family={project / 'mynet.py'}", *GENERATE]) == 0


def test_a_missing_jax_net_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    assert main(words(project, "jax", 3, "engine.kind=jax")) == 2
    assert "the family mynet has no JAX net; set engine.kind=torch" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [
        ["engine.mesh.shard=2"],
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=true"],
        ["engine.kind=deepspeed", "engine.zero=2", "train.optimizer=adamw", "train.learning_rate=1e-3"],
    ],
)
def test_two_processes_match_one(project: Path, capsys: pytest.CaptureFixture[str], mesh: list[str]) -> None:
    """FSDP and tensor parallelism with Muon, and DeepSpeed with AdamW, on two processes each."""
    if "engine.kind=deepspeed" in mesh:
        pytest.importorskip("deepspeed")
    assert main(["verify", *words(project, "run", 6, "engine.precision=fp32", *mesh)[1:]]) == 0
    assert re.search(r"gives the numbers of one process", capsys.readouterr().out)
