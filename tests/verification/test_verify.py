"""verify finds what was planted, names it, and finds nothing where nothing is."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from textmill.cli import main
from textmill.config import RunConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.errors import TextmillError
from textmill.verification.comparison import Finding, findings_of
from textmill.verification.launcher import Seen, launch
from textmill.verification.small_config import Plan, hand_over, handed_over, plan_of
from textmill.where import open_where

PLANTED = {
    "a missing all-reduce": (
        ["engine.mesh.replicate=2"],
        """
        import contextlib
        from textmill.engines import data_parallel_torch
        data_parallel_torch.DataParallel.during_pass = lambda *_: contextlib.nullcontext()
        """,
    ),
    "a mean of means": (
        ["engine.mesh.replicate=2"],
        """
        from textmill.engines import on_torch
        weights = on_torch.token_weights
        def of_means(batch, loss, tokens, samples):
            own, samples = on_torch.count_loss_tokens(batch)
            return weights(batch, loss, 2 * own, 2 * samples)
        on_torch.token_weights = of_means
        """,
    ),
    "a mask left out": (
        ["engine.mesh.replicate=2", "train.packed.isolate_documents=true"],
        "from textmill.engines import on_torch\non_torch.OnTorch._documents = lambda *_: None",
    ),
    "unscaled accumulation": (
        ["engine.mesh.replicate=2", "train.batch=32", "engine.micro_batch=8"],
        """
        from textmill.engines import on_torch
        weights = on_torch.token_weights
        on_torch.token_weights = lambda batch, *rest: 2 * weights(batch, *rest)
        """,
    ),
    "a wrong group": (
        ["engine.mesh.replicate=2", "engine.mesh.tensor=2"],
        """
        from textmill.engines import parallel_torch
        def sum_gradients(self, parameters):
            self.data_parallel = parallel_torch.DataParallel(parameters, None)
        parallel_torch.Parallel.sum_gradients = sum_gradients
        """,
    ),
    "a bias added by each rank": (
        ["engine.mesh.tensor=2"],
        """
        import torch
        from textmill.engines.tensor_parallel_torch import RowLinear
        RowLinear.forward = lambda self, x: self.tensor.leave(torch.nn.functional.linear(x, self.weight, self.bias))
        """,
    ),
    "positions of another's tokens": (
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=true"],
        """
        import torch
        from textmill.engines.tensor_parallel_torch import PositionEmbedding
        PositionEmbedding.forward = lambda self, places: torch.nn.Embedding.forward(self, places.chunk(self.tensor.count, -1)[0])
        """,
    ),
    "a stale LayerNorm": (
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=true"],
        "from textmill.engines.parallel_torch import Parallel\nParallel.join_gradients = lambda *_: None",
    ),
}
"""Settings, and what every process of several imports before anything else."""
ADAMW = ["train.optimizer=adamw", "train.learning_rate=3e-3"]
"""In place of the recipe's, which DeepSpeed does not take."""


def plan(*settings: str) -> Plan:
    small = ["engine.precision=fp32", "model.shape.heads=4", "model.shape.dropout=0.1"]
    return plan_of(open_where("quickstart", [*ADAMW, *small, *settings]).config)


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    """What one process saw, by its config: several meshes have the same."""
    return {}


def findings(plan: Plan, folder: Path, alone: dict[str, Seen]) -> list[Finding]:
    key = plan.alone[0].model_dump_json()
    first = [] if key in alone else [(plan.alone, folder / "alone", 1)]
    *one, many = launch([*first, (plan.many, folder / "many", plan.processes)])
    if one:
        alone[key] = one[0][0]
    return findings_of(plan.trials[0], alone[key], many[0])


@pytest.mark.long_with(*[bug for bug in PLANTED if bug != "a missing all-reduce"])
@pytest.mark.parametrize("bug", PLANTED)
def test_what_is_planted_is_found(
    bug: str, alone: dict[str, Seen], tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, code = PLANTED[bug]
    guarded = "import os\nif int(os.environ.get('WORLD_SIZE', 1)) > 1:\n" + textwrap.indent(
        textwrap.dedent(code), "    "
    )
    (tmp_path / "sitecustomize.py").write_text(guarded)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    parted = [finding for finding in findings(plan(*settings), tmp_path, alone) if not finding.holds]
    assert parted
    assert any(finding.hint for finding in parted)


def test_a_right_config_is_called_right_and_a_wrong_one_ends_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", "quickstart", "engine.precision=fp32", "engine.recompute=1", "train.loss=sample_mean"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "replicate 2 gives the numbers of one process" in told
    assert "PARTED" not in told
    monkeypatch.setattr("textmill.verification.launch", lambda trials: [_of(trials[0], 1.0), _of(trials[1], 1.5)])
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert (
        "does not give the numbers of one process: losses from step 1 on (there 1.5 times that of one process)"
        in said.err
    )


def _of(trial: tuple[list[RunConfig], Path, int], loss: float) -> list[Seen]:
    gradients = [("m/a", np.ones(3, np.float32))]
    return [
        Seen([{"loss": loss, "norm": 1.0, "asked": 5}], [1.0, 5, 5], ["same"] * trial[2], gradients) for _ in trial[0]
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "mesh"),
    [
        ("jax", ["engine.mesh.shard=2"], "shard 2 on 2 devices"),
        ("deepspeed", ["engine.zero=3"], "zero 3, replicate 2 on 2 processes"),
    ],
)
def test_the_other_engines_are_held_against_themselves_alone(
    kind: str, settings: list[str], mesh: str, tmp_path: Path
) -> None:
    """A right config, and in the same processes one whose several were told something else."""
    pytest.importorskip(kind, reason=f"needs the extra {kind}")
    right = plan(f"engine.kind={kind}", *settings)
    assert right.spoken().startswith(mesh)
    other = right.many[0].model_copy(update={"train": right.many[0].train.model_copy(update={"label_smoothing": 0.1})})
    alone, many = launch(
        [(right.alone, tmp_path / "alone", 1), ([right.many[0], other], tmp_path / "many", right.processes)]
    )
    assert all(finding.holds for finding in findings_of(right.trials[0], alone[0], many[0]))
    parted = [finding.what for finding in findings_of(right.trials[0], alone[0], many[1]) if not finding.holds]
    assert [what.partition(" ")[0] for what in parted] == ["losses", "gradient", "gradients", "the"], parted


def test_a_file_of_deepspeeds_may_speak_of_the_whole_run(tmp_path: Path) -> None:
    zero = {"stage": 3, "overlap_comm": False}
    file = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    (tmp_path / "ds.json").write_text(json.dumps(file))
    config = open_where(
        "quickstart",
        [*ADAMW, "engine.kind=deepspeed", f"engine.deepspeed_config={tmp_path / 'ds.json'}", "train.batch=512"],
    ).config
    small = plan_of(config)
    assert [trial.precision for trial in small.trials] == ["fp32", "bf16"]
    engines = [one.engine for one in small.many if isinstance(one.engine, DeepSpeedEngine)]
    assert [(one.zero, one.deepspeed_config, one.micro_batch, one.deepspeed_overrides) for one in engines] == 2 * [
        (3, None, 2, {"zero_optimization": zero})
    ]
    assert small.many[0].train.batch == 12


def test_adapters_on_first_weights_reach_the_processes(tmp_path: Path) -> None:
    """No run has them, so its config would not be let in."""
    given = open_where("quickstart", ["model.lora.rank=4", "model.init_from=somewhere", "engine.mesh.shard=2"]).config
    small = given.model_copy(update={"model": given.model.model_copy(update={"init_from": None})})
    with pytest.raises(TextmillError, match=r"model\.lora: needs weights to adapt"):
        RunConfig.model_validate_json(small.model_dump_json())
    hand_over(small, tmp_path)
    assert handed_over(tmp_path) == small


def test_a_process_that_ends_badly_is_told_with_what_it_said(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1':\n    sys.exit('out of luck')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    assert main(["verify", "quickstart", "engine.precision=fp32"]) == 2
    assert "process 1 of 2 ended with 1; it said: SystemExit: out of luck" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "engine.mesh.tensor=7"]) == 2
    assert "engine.mesh.tensor: 7 does not divide" in capsys.readouterr().err


def test_a_large_mesh_is_cut_down_and_what_is_said_is_kept() -> None:
    large = plan("engine.mesh.replicate=64", "train.batch=512", "engine.micro_batch=4", "train.label_smoothing=0.1")
    assert (large.processes, large.sizes) == (2, {"replicate": 2, "shard": 1, "tensor": 1})
    small, alone = large.many[0], large.alone[0]
    assert (small.engine.micro_batch, small.train.batch, alone.engine.micro_batch) == (2, 12, 6), (
        "three micro-batches a process"
    )
    assert small.train.label_smoothing == 0.1
    assert [trial.precision for trial in plan("engine.precision=auto").trials] == ["fp32", "bf16"]
