"""The command plan: what a run takes, on machines that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.kill_train import train_arguments
from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.commands.plan import OLD_GPUS, communication_of
from textmill.config import ModelConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.devices import GPUS, peak_flops_by_name
from textmill.engines.memory import Device, Estimator
from textmill.models import open_family
from textmill.storage.tensor_files import read_model

YUAN = [
    "plan",
    "gpt2-small",
    "train.optimizer=adamw",
    "train.batch=512",
    "train.length=2048",
    "tokenizer.vocab=53228",
    "model.size=yuan-4.7b",
    "plan.gpu=V100",
    "plan.memory_gb=16",
    "plan.devices=4",
    "engine.mesh.tensor=4",
    "plan.tokens=100000000000",
]
MEGATRON = [
    "plan",
    "gpt2-small",
    "train.optimizer=adamw",
    "train.batch=512",
    "train.length=1024",
    "tokenizer.vocab=50257",
    "model.size=megatron-8.3b",
    "plan.gpu=V100",
    "plan.devices=512",
    "engine.mesh.tensor=8",
    "plan.price=2",
    "train.steps=300000",
]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs plan with --json; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: list[str]) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        assert not list(tmp_path.iterdir()), "a plan writes nothing"
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_yuan_on_four_small_gpus(planned: Any) -> None:
    found = planned(YUAN)
    assert sum(found["parameters"].values()) == pytest.approx(4.7e9, rel=0.001), "as published"
    assert found["memory"]["optimizer"] == 2 * found["memory"]["weights"] == 2 * found["memory"]["gradients"]
    assert found["memory"]["weights"] == pytest.approx(4 * 4.7e9 / 4, rel=0.01), "fp32, a quarter on each device"
    assert not found["fits"]
    assert found["epochs"] == pytest.approx(3, rel=1e-5)
    assert found["tokens"] / found["tokens_per_second"] / 3600 == pytest.approx(found["hours"])
    assert found["disk"]["tokens"] == 2 * 100_000_000_000
    assert len(found["settings_that_fit"]) == 3


@pytest.mark.long
def test_settings_that_are_offered_do_fit(planned: Any) -> None:
    for one in planned(YUAN)["settings_that_fit"]:
        changes = [f"{key}={value}" for key, value in one["settings"].items()]
        kept = YUAN if "engine.kind" not in one["settings"] else [a for a in YUAN if not a.startswith("engine.mesh")]
        again = planned([*kept, *changes])
        assert again["fits"], changes
        assert again["memory"]["total"] == one["total"]


def test_megatron_on_512_gpus(planned: Any) -> None:
    found = planned(MEGATRON)
    assert sum(found["parameters"].values()) == pytest.approx(8.3e9, rel=0.005), "as published"
    assert found["memory"]["mesh"] == {"replicate": 64, "shard": 1, "tensor": 8}
    assert found["fits"]
    assert found["steps"] == 300_000
    assert found["tokens"] == 300_000 * 512 * 1024
    # Narayanan et al. 2021: 8 x tokens x parameters with activation checkpointing; 6 without. Attention adds to it.
    assert found["flops"] == pytest.approx(6 * 8.3e9 * found["tokens"], rel=0.06)
    rate = 512 * 125e12 * found["mfu"]
    assert found["hours"] == pytest.approx(found["flops"] / rate / 3600)
    assert sum(found["step_parts"].values()) == pytest.approx(found["step_seconds"])
    assert found["step_parts"]["waiting"] > 0
    assert found["cost"] == pytest.approx(found["hours"] * 512 * 2)


def test_a_gpu_without_rates_is_taken_to_reach_forty_percent(planned: Any) -> None:
    found = planned(["plan", "gpt2-small", "plan.memory_gb=80", "plan.tflops=100", "plan.tokens=1000000"])
    assert found["speed"].startswith("assumed: 40%")
    assert found["mfu"] == pytest.approx(0.4)
    assert found["step_parts"] is None
    own = str(Path(__file__).parents[2] / "examples" / "recurrent.py")
    arguments = ["plan", "gpt2-small", f"model.family={own}", "plan.gpu=A100", "plan.tokens=1000000"]
    assert planned(arguments)["speed"].startswith("assumed: 40%"), "nothing is known of its kernels"


def test_the_fastest_settings_fit_and_are_sorted(planned: Any) -> None:
    """Two machines with a slow network between them."""
    base = ["plan", "gpt2-small", "train.optimizer=adamw", "train.batch=64", "plan.gpu=A100", "plan.memory_gb=16"]
    base += ["plan.devices=2", "plan.per_node=1", "plan.network_gbit_s=10"]
    fastest = planned([*base, "--best"])["fastest"]
    rates = [one["tokens_per_second"] for one in fastest]
    assert rates == sorted(rates, reverse=True)
    one = fastest[0]
    again = planned([*base, *(f"{key}={value}" for key, value in one["settings"].items())])
    assert again["fits"]
    assert again["memory"]["total"] == one["total"]
    assert again["tokens_per_second"] == pytest.approx(one["tokens_per_second"])
    fast = planned([*base, "plan.network_gbit_s=1600", *(f"{key}={value}" for key, value in one["settings"].items())])
    assert fast["tokens_per_second"] > 1.1 * one["tokens_per_second"], "10 Gbit/s are a limit"
    assert one["settings"]["engine.mesh.pipeline"] == 2, "a pipeline sends least"


def test_a_limit_of_epochs_shortens_the_plan(planned: Any) -> None:
    """An epoch of 100 steps of 512 samples, 1,024 tokens each."""
    long, tokens = [*MEGATRON[:-1], "train.minutes=1e6", "train.max_epochs=2"], "plan.tokens=52428800"
    found = planned([*long, tokens])
    assert (found["steps"], found["epochs"]) == (200, 2)
    assert found["hours"] == pytest.approx(found["tokens"] / found["tokens_per_second"] / 3600)
    assert planned([*MEGATRON, "train.max_epochs=2", tokens])["steps"] == 200
    assert planned([*MEGATRON, "train.max_epochs=2"])["steps"] == 300_000, "nobody knows how long an epoch is"


def test_bert(planned: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("bert") / "bert.yaml"
    file.write_text(
        "tokenizer: {kind: wordpiece, vocab: 30522}\nmodel: {family: bert, size: large}\n"
        "train: {layout: masked, length: 512, batch: 256, steps: 1000}\n"
    )
    found = planned(["plan", str(file), "plan.gpu=V100", "plan.devices=64"])
    assert sum(found["parameters"].values()) == 336_226_108, "as published, with both heads"
    smaller = ["model.size=tiny", "train.batch=2", "train.length=16", "plan.probe_steps=2"]
    assert planned(["plan", str(file), *smaller])["speed"].startswith("timed here")


def test_a_run_that_fits_here_is_timed(tokenized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = train_arguments(tokenized, tmp_path / "run", 30)
    capsys.readouterr()
    assert main(["plan", *arguments[1:], "plan.probe_steps=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speed"].startswith("timed here")
    assert found["hours"] == pytest.approx(30 * found["step_seconds"] / 3600)
    assert found["steps"] == 30
    manifest = json.loads((tokenized / "tokens" / "manifest.json").read_text())
    assert found["train_tokens"] == manifest["splits"]["train"]["tokens"]
    assert main(["plan", *arguments[1:], "plan.probe_steps=0"]) == 0
    assert "time: not known; set plan.gpu or plan.tflops" in capsys.readouterr().out


def test_data_parallel_gradients_are_sent_twice_around_the_ring() -> None:
    engine = TorchEngine(mesh=MeshConfig(replicate=4))
    shape = open_family("gpt2").shape_of(ModelConfig(size="nano"), vocab=128, eos_id=0)
    estimator = Estimator(shape, TrainConfig(batch=8))
    sent = communication_of(engine, estimator, estimator.estimate(engine, 4, Device(True, 1 << 34, "bf16")))
    assert sent == {"data parallel: gradients": 2 * 3 * 4 * shape.parameters / 4}


def test_memory_is_known_before_the_tokens(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "gpt2-small", "plan.gpu=A100"]
    found = planned(arguments)
    assert found["steps"] is None
    assert found["hours"] is None
    assert found["fits"]
    assert main(arguments) == 0
    assert "steps: not known before the text is tokenized; set plan.tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.gpu=Z80", "train.steps=10"], "plan.gpu: 'Z80' is not known; give one of H200"),
        (
            ["plan.devices=3", "train.steps=10"],
            "engine.mesh: replicate=1 x shard=1 x tensor=2 needs 2 processes, found 3",
        ),
        (["train.steps=10", "--best"], "--best: the rates of 'GPU' are not known; set plan.gpu to one of H200"),
        (
            ["plan.gpu=A100", "plan.devices=2", "engine.precision=fp32", "train.steps=10", "--best"],
            "--best: there is no forecast for fp32 and for a family in a file of your own; set engine.precision=bf16",
        ),
        (["engine.mesh.tensor=5", "plan.devices=5"], "engine.mesh.tensor: 5 does not divide model.shape.heads=12"),
    ],
)
def test_mistakes(
    settings: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    first = ["plan", "gpt2-small", "engine.mesh.tensor=2", "plan.memory_gb=16"]
    assert main([*first, *settings]) == 2
    assert message in capsys.readouterr().err


def test_a_given_tokenizer_and_teachers_count(planned: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_folder(tmp_path_factory.mktemp("given") / "teacher", korean_tokenizer())
    plain = ["plan", "gpt2-small", "plan.gpu=A100", "plan.tokens=1000000", f"tokenizer.use={folder}"]
    found = planned(plain)
    fitted = planned(plain[:-1])
    fewer = 768 * (32_000 - korean_tokenizer().vocab)
    assert sum(fitted["parameters"].values()) - sum(found["parameters"].values()) == fewer
    taught = planned([*plain, f"train.distil.teachers=[{folder}]"])
    weights = 4 * sum(values.size for _, values in read_model(folder))
    assert taught["memory"]["buffers"] - found["memory"]["buffers"] >= weights
    assert taught["flops_per_token"] > found["flops_per_token"]


def test_every_gpu_is_found_by_its_product_name() -> None:
    assert GPUS.keys() > OLD_GPUS.keys()
    for name, gpu in GPUS.items():
        assert peak_flops_by_name(f"NVIDIA {name} 16GB") == 1e12 * gpu.tflops, "a name that begins another follows it"
