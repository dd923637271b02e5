"""DeepSpeed against PyTorch: the same losses at every stage of ZeRO, on one process and on several, and one state
handed back and forth."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed", reason="needs the extra deepspeed")

import deepspeed

from tests.support.deepspeed_job import do_run
from tests.support.engine_runs import LORA, batch_of, config_of, run, started
from tests.support.together import run_together
from textmill.errors import TextmillError
from textmill.processes.ranks import Ranks

STEPS, HALF_STEPS, EACH = 12, 5, 4
"""Steps in fp32, in half precision, and between two changes of the engine."""
FP32, BF16 = 2e-6, 2e-2
"""How equal is equal: relative, at every step."""
RAMP = [2, 2, 12]
"""Two samples more every few steps."""


@pytest.fixture(scope="module")
def straight() -> list[float]:
    """The torch engine's losses in fp32."""
    return run(started(config_of("torch")), range(4 * EACH))


def worst(found: list[float], expected: list[float]) -> float:
    """The greatest relative difference."""
    assert len(found) == len(expected)
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def launched(job: list[dict[str, Any]], processes: int, folder: Path) -> list[dict[str, Any]]:
    """What came of a job on so many processes; none of them is left over."""
    path = folder / f"job-{processes}-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(job))
    assert run_together([sys.executable, "-m", "tests.support.deepspeed_job", str(path)], processes) == "ok"
    found: list[dict[str, Any]] = json.loads(path.with_suffix(".out").read_text())
    return found


@pytest.mark.long_with(0, 2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_process_matches_the_torch_engine(zero: int, straight: list[float]) -> None:
    found = do_run({"engine": {"zero": zero, "micro_batch": 4}, "steps": [0, STEPS]}, Ranks())
    assert worst(found["losses"], straight[:STEPS]) <= FP32
    assert found["updates"] == STEPS


def has_fp16() -> bool:
    """Whether DeepSpeed trains in fp16 here: it asks what the processor can."""
    return bool(deepspeed.get_accelerator().is_fp16_supported())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All runs on two processes, by name, in one launch."""
    folder = tmp_path_factory.mktemp("two")
    saved = str(folder / "zero3.npz")
    runs = {f"zero{zero}": {"engine": {"zero": zero, "micro_batch": 2}, "steps": [0, STEPS]} for zero in (0, 1, 2, 3)}
    runs["zero3"]["save"] = saved
    runs |= {
        f"bf16-{zero}": {"engine": {"zero": zero, "micro_batch": 2, "precision": "bf16"}, "steps": [0, HALF_STEPS]}
        for zero in (0, 1, 2, 3)
    }
    if has_fp16():
        runs["fp16"] = {"engine": {"zero": 2, "micro_batch": 2, "precision": "fp16"}, "steps": [0, HALF_STEPS]}
    runs["recompute"] = {"engine": {"zero": 3, "micro_batch": 2, "activation_checkpointing": 1}, "steps": [0, 5]}
    offload = {"offload_optimizer": "cpu", "offload_weights": "cpu"}
    runs["offload"] = {"engine": {"zero": 3, "micro_batch": 2, **offload}, "steps": [0, 5]}
    runs["dropout"] = {"engine": {"zero": 2, "micro_batch": 2}, "steps": [0, 5], "dropout": 0.2}
    runs["ramp"] = {"engine": {"zero": 3, "micro_batch": 1}, "steps": [0, 8], "train": {"batch_rampup": RAMP}}
    runs |= {
        f"lora-{zero}": {"engine": {"zero": zero, "micro_batch": 2}, "steps": [0, 5], "lora": True}
        for zero in (0, 2, 3)
    }
    found = launched(list(runs.values()), 2, folder)
    return {**dict(zip(runs, found, strict=True)), "saved": {"at": saved}}


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_processes_match_the_torch_engine(zero: int, two: dict[str, dict[str, Any]], straight: list[float]) -> None:
    assert worst(two[f"zero{zero}"]["losses"], straight[:STEPS]) <= FP32


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16-0", "bf16-1", "bf16-2", "bf16-3", "fp16"])
def test_meshes_in_half_precision_are_close_to_one_process(
    name: str, two: dict[str, dict[str, Any]], straight: list[float]
) -> None:
    if name == "fp16" and not has_fp16():
        pytest.skip("DeepSpeed has no fp16 on this CPU")
    difference = worst(two[name]["losses"], straight[:HALF_STEPS])
    assert 0 < difference <= BF16


def test_fp16_is_refused_if_deepspeed_does_not_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(deepspeed.get_accelerator()), "is_fp16_supported", lambda _: None)
    with pytest.raises(
        TextmillError,
        match=r"engine\.precision: DeepSpeed does not support fp16 on cpu; set bf16, fp32, or engine\.kind=torch",
    ):
        do_run({"engine": {"zero": 2, "micro_batch": 2, "precision": "fp16"}, "steps": [0, 1]}, Ranks())


@pytest.mark.long
@pytest.mark.parametrize("name", ["recompute", "offload"])
def test_recompute_changes_no_loss(name: str, two: dict[str, dict[str, Any]], straight: list[float]) -> None:
    assert worst(two[name]["losses"], straight[:5]) <= FP32


@pytest.mark.long
def test_dropout_is_the_same_on_two_processes(two: dict[str, dict[str, Any]]) -> None:
    assert worst(two["dropout"]["losses"], run(started(config_of("torch", dropout=0.2)), range(5))) <= FP32


@pytest.mark.long
def test_two_processes_divide_a_batch_ramp_up(two: dict[str, dict[str, Any]]) -> None:
    torch = do_run(
        {"engine": {"kind": "torch", "micro_batch": 2}, "steps": [0, 8], "train": {"batch_rampup": RAMP}}, Ranks()
    )
    assert worst(two["ramp"]["losses"], torch["losses"]) <= FP32


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_adapters_on_two_processes_match_the_torch_engine(zero: int, two: dict[str, dict[str, Any]]) -> None:
    assert worst(two[f"lora-{zero}"]["losses"], run(started(config_of("torch", lora=LORA)), range(5))) <= FP32


@pytest.mark.long
def test_an_evaluation_covers_the_full_batch(two: dict[str, dict[str, Any]]) -> None:
    engine = started(config_of("torch"))
    run(engine, range(STEPS))
    sums = engine.eval_step(batch_of(99))
    for name in ("zero1", "zero3"):
        loss, tokens, correct = two[name]["valid"]
        assert (tokens, correct) == (sums.loss_tokens, sums.correct)
        assert loss == pytest.approx(sums.loss, rel=1e-5)


@pytest.mark.long
def test_a_checkpoint_of_two_processes_resumes_on_one_and_three(two: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    saved = two["saved"]["at"]
    assert np.load(saved)["updates"] == STEPS
    again = {"engine": {"zero": 3, "micro_batch": 1}, "steps": [STEPS, STEPS + 6], "start": saved, "rows": 6}
    torch = do_run({**again, "engine": {"kind": "torch", "micro_batch": 6}}, Ranks())
    for found in (do_run(again, Ranks()), *launched([again], 3, tmp_path)):
        assert found["same"], "weights and moments by name, bit for bit"
        assert found["updates"] == STEPS + 6
        assert worst(found["losses"], torch["losses"]) <= FP32


def test_a_run_resumes_on_deepspeed_and_back_on_torch(tmp_path: Path, straight: list[float]) -> None:
    losses, start = [], None
    for number, kind in enumerate(["torch", "deepspeed", "torch", "deepspeed"]):
        save = str(tmp_path / f"{number}.npz")
        engine = {"kind": kind, "micro_batch": 4, **({"zero": 3} if kind == "deepspeed" else {})}
        found = do_run(
            {"engine": engine, "steps": [EACH * number, EACH * (number + 1)], "start": start, "save": save}, Ranks()
        )
        assert found["same"], "weights and moments by name, bit for bit"
        losses, start = [*losses, *found["losses"]], save
    assert worst(losses, straight) <= 1e-5


@pytest.mark.long_with(1)
@pytest.mark.parametrize("zero", [1, 3])
def test_frozen_weights_are_saved_unrounded_in_bf16(zero: int, tmp_path: Path) -> None:
    rules = {"freeze": ["wte", "h.0"], "layer_decay": 0.7}
    runs = {"bf16": {"zero": zero, "precision": "bf16"}, "torch": {"kind": "torch"}, "fp32": {"zero": zero}}
    first = dict(started(config_of("torch")).weights())
    states, losses = {}, {}
    for name, engine in runs.items():
        save = str(tmp_path / f"{name}.npz")
        losses[name] = do_run(
            {"engine": {"micro_batch": 8, **engine}, "steps": [0, 5], "save": save, "train": rules}, Ranks()
        )["losses"]
        states[name] = np.load(save)
    assert worst(losses["fp32"], losses["torch"]) <= FP32
    for name, values in first.items():
        stays = name.startswith(("transformer.wte", "transformer.h.0."))
        assert np.array_equal(states["bf16"][f"w:{name}"], values) == stays, name
        assert (f"m/{name}" in states["fp32"]) != stays


@pytest.mark.parametrize(
    ("zero", "tree"),
    [
        (2, {"communication_data_type": "fp99"}),
        (2, {"elasticity": {"enabled": True}}),
        (1, {"zero_optimization": {"overlap_comm": [3]}}),
        (3, {"zero_optimization": {"reduce_bucket_size": "big"}}),
        (0, {"tensorboard": {"enabled": "maybe"}}),
    ],
)
def test_settings_that_deepspeed_rejects_are_a_one_line_error(zero: int, tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(tree))
    for engine in ({"deepspeed_config": str(tmp_path / "ds_config.json")}, {"deepspeed_overrides": tree}):
        with pytest.raises(
            TextmillError,
            match=r"(ds_config.json|engine.deepspeed_overrides): DeepSpeed rejects these settings \(.*\); fix them",
        ) as refused:
            do_run({"engine": {"zero": zero, "micro_batch": 4, **engine}, "steps": [0, 1]}, Ranks())
        assert "\n" not in str(refused.value)


def test_keys_without_an_effect_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"activation_checkpointing": {"cpu_checkpointing": True}, "steps_per_print": 7}
    (tmp_path / "ds_config.json").write_text(json.dumps(tree))
    engine = {"zero": 0, "micro_batch": 4, "deepspeed_config": str(tmp_path / "ds_config.json")}
    do_run({"engine": engine, "steps": [0, 1]}, Ranks())
    assert "ds_config.json: ignored: activation_checkpointing, because" in capsys.readouterr().out


def test_a_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(TextmillError, match=r"needs DeepSpeed; run: pip install .*textmill\[deepspeed\]"):
        started(config_of("deepspeed"))
