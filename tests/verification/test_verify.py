"""verify finds planted bugs, names the likely cause, and gives no false alarm."""

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
from textmill.verification import Comparison, compare_trial
from textmill.verification.launcher import TrialResult, launch
from textmill.verification.small_config import VerificationPlan, build_plan, read_config
from textmill.where import open_where

PLANTED = {
    "a missing all-reduce": (
        ["engine.mesh.replicate=2"],
        """
        import contextlib
        from textmill.engines import parallel_torch
        parallel_torch.DataParallel.during_pass = lambda *_: contextlib.nullcontext()
        """,
    ),
    "a mean of means": (
        ["engine.mesh.replicate=2"],
        """
        from textmill.engines import on_torch
        from textmill.processes.ranks import Ranks
        weights = on_torch.token_weights
        def of_means(batch, loss, tokens, samples):
            own, samples, _ = on_torch.count_labels(batch, Ranks())
            return weights(batch, loss, 2 * own, 2 * samples)
        on_torch.token_weights = of_means
        """,
    ),
    "a missing mask": (
        ["engine.mesh.replicate=2", "train.packed.isolate_documents=true"],
        """
        from dataclasses import replace
        from textmill.engines import on_torch
        parts = on_torch.micro_batches
        def without_documents(batch, *rest, **given):
            return parts(replace(batch, documents=None), *rest, **given)
        on_torch.micro_batches = without_documents
        """,
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
        def forward(self, x):
            return self.tensor.from_parallel_region(torch.nn.functional.linear(x, self.weight, self.bias))
        RowLinear.forward = forward
        """,
    ),
    "positions of another rank's tokens": (
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=true"],
        """
        import torch
        from textmill.engines.tensor_parallel_torch import PositionEmbedding
        def forward(self, positions):
            return torch.nn.Embedding.forward(self, positions.chunk(self.tensor.count, -1)[0])
        PositionEmbedding.forward = forward
        """,
    ),
    "LayerNorm gradients that are not summed": (
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=true"],
        "from textmill.engines.parallel_torch import Parallel\nParallel.join_gradients = lambda *_: None",
    ),
    "a sum that is lost in compiled code": (
        ["engine.mesh.tensor=2", "engine.mesh.sequence_parallel=false", "engine.compile=true"],
        """
        import torch
        from textmill.engines.tensor_parallel_torch import TensorParallel
        all_reduce = TensorParallel.all_reduce
        def lost(self, x):
            return x.clone() if torch.compiler.is_compiling() else all_reduce(self, x)
        TensorParallel.all_reduce = lost
        """,
    ),
}
"""Settings, and the code that every process of the mesh runs before anything else."""
ADAMW = ["train.optimizer=adamw", "train.learning_rate=3e-3"]
"""Instead of the recipe's Muon, which the DeepSpeed engine does not support."""


def plan(*settings: str) -> VerificationPlan:
    small = ["engine.precision=fp32", "model.shape.heads=4", "model.shape.dropout=0.1"]
    return build_plan(open_where("quickstart", [*ADAMW, *small, *settings]).config)


@pytest.fixture(scope="module")
def singles() -> dict[str, TrialResult]:
    """The results of one process by config, which several meshes share."""
    return {}


def compare(plan: VerificationPlan, folder: Path, singles: dict[str, TrialResult]) -> list[Comparison]:
    key = plan.single[0].model_dump_json()
    first = [] if key in singles else [(plan.single, folder / "single", 1)]
    *one, parallel = launch([*first, (plan.parallel, folder / "parallel", plan.processes)])
    if one:
        singles[key] = one[0][0]
    if plan.trials[-1].compiled:
        assert all(comparison.passed for comparison in compare_trial(plan.trials[0], singles[key], parallel[0]))
    return compare_trial(plan.trials[-1], singles[key], parallel[-1])


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(
    bug: str, singles: dict[str, TrialResult], tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, code = PLANTED[bug]
    guarded = "import os\nif int(os.environ.get('WORLD_SIZE', 1)) > 1:\n" + textwrap.indent(
        textwrap.dedent(code), "    "
    )
    (tmp_path / "sitecustomize.py").write_text(guarded)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    failed = [comparison for comparison in compare(plan(*settings), tmp_path, singles) if not comparison.passed]
    assert failed
    assert any(comparison.hint for comparison in failed)


def test_a_correct_config_passes_and_a_wrong_one_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "verify",
        "quickstart",
        "engine.precision=fp32",
        "engine.activation_checkpointing=1",
        "train.loss=sample_mean",
    ]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "replicate 2 gives the numbers of one process" in output
    assert "  fp32  equal   losses of 8 steps: difference " in output
    assert "DIFFERS" not in output
    monkeypatch.setattr(
        "textmill.verification.launch", lambda trials: [_results(trials[0], 1.0), _results(trials[1], 1.5)]
    )
    assert main(command) == 1
    output = capsys.readouterr()
    assert "  fp32  DIFFERS losses from step 1 on" in output.out
    assert output.err.count("\n") == 1
    assert (
        "does not give the numbers of one process: losses from step 1 on (there 1.5 times that of one process)"
        in output.err
    )


def _results(trial: tuple[list[RunConfig], Path, int], loss: float) -> list[TrialResult]:
    gradients = [("m/a", np.ones(3, np.float32))]
    steps = [{"loss": loss, "norm": 1.0, "loss_tokens": 5}]
    return [TrialResult(steps, [1.0, 5, 5], ["same"] * trial[2], gradients) for _ in trial[0]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "mesh"),
    [
        ("jax", ["engine.mesh.shard=2"], "shard 2 on 2 simulated devices"),
        ("deepspeed", ["engine.zero=3"], "zero 3, replicate 2 on 2 processes"),
    ],
)
def test_other_engines_are_compared_with_one_process_of_their_own(
    kind: str, settings: list[str], mesh: str, tmp_path: Path
) -> None:
    """A correct config, and in the same processes one with another label smoothing on the mesh."""
    pytest.importorskip(kind, reason=f"needs the extra {kind}")
    right = plan(f"engine.kind={kind}", *settings)
    assert right.describe().startswith(mesh)
    config = right.parallel[0]
    wrong = config.model_copy(update={"train": config.train.model_copy(update={"label_smoothing": 0.1})})
    single, parallel = launch(
        [(right.single, tmp_path / "single", 1), ([config, wrong], tmp_path / "parallel", right.processes)]
    )
    assert all(comparison.passed for comparison in compare_trial(right.trials[0], single[0], parallel[0]))
    comparisons = compare_trial(right.trials[0], single[0], parallel[1])
    failed = [comparison.what for comparison in comparisons if not comparison.passed]
    assert [what.partition(" ")[0] for what in failed] == ["losses", "gradient", "gradients", "evaluation"], failed


def test_a_deepspeed_json_may_contain_the_runs_batch_and_precision(tmp_path: Path) -> None:
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
    small = build_plan(config)
    assert [trial.precision for trial in small.trials] == ["fp32", "bf16"]
    engines = [one.engine for one in small.parallel if isinstance(one.engine, DeepSpeedEngine)]
    assert [(one.zero, one.deepspeed_config, one.micro_batch, one.deepspeed_overrides) for one in engines] == 2 * [
        (3, None, 2, {"zero_optimization": zero})
    ]
    assert small.parallel[0].train.batch == 12


def test_adapters_on_initial_weights_reach_the_processes(tmp_path: Path) -> None:
    """The config's validation rejects adapters without given weights."""
    given = open_where("quickstart", ["model.lora.rank=4", "model.init_from=somewhere", "engine.mesh.shard=2"]).config
    small = given.model_copy(update={"model": given.model.model_copy(update={"init_from": None})})
    with pytest.raises(TextmillError, match=r"model\.lora: needs weights to adapt"):
        RunConfig.model_validate_json(small.model_dump_json())
    (tmp_path / "config.json").write_text(small.model_dump_json())
    assert read_config(tmp_path / "config.json") == small


@pytest.mark.long
def test_a_failed_process_is_reported_with_its_last_line(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    os.write(2, b'out of luck')\n    os._exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    assert main(["verify", "quickstart", "engine.precision=fp32"]) == 2
    assert "process 1 of 2 exited with code 1; its last line: out of luck" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "engine.mesh.tensor=7"]) == 2
    assert "engine.mesh.tensor: 7 does not divide" in capsys.readouterr().err


def test_a_large_mesh_is_reduced_and_other_settings_are_kept() -> None:
    large = plan("engine.mesh.replicate=64", "train.batch=512", "engine.micro_batch=4", "train.label_smoothing=0.1")
    assert (large.processes, large.sizes) == (2, {"replicate": 2, "shard": 1, "tensor": 1, "pipeline": 1})
    small, single = large.parallel[0], large.single[0]
    assert (small.engine.micro_batch, small.train.batch, single.engine.micro_batch) == (2, 12, 6), (
        "three micro-batches a process"
    )
    assert small.train.label_smoothing == 0.1
    assert [trial.name for trial in plan("engine.precision=auto").trials] == ["fp32", "bf16"]
    compiled = plan("engine.compile=true")
    assert [trial.name for trial in compiled.trials] == ["fp32", "fp32 compiled"]
    assert [getattr(config.engine, "compile", None) for config in compiled.parallel] == [False, True]
    assert compiled.single[1] == compiled.single[0]
