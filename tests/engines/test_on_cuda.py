"""The torch engine on a GPU gives the CPU's numbers; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import engine_runs
from tests.support.engine_runs import VOCAB, adapting, batch_of, config_of, run, started
from textmill.config import LoraConfig, ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import open_engine
from textmill.kernels import matmul_torch
from textmill.models import open_family
from textmill.tokens.batches.batch import Batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def on_gpu(precision: str = "fp32", deterministic: bool = False, **options: object) -> RunConfig:
    config = config_of("torch", **options)  # type: ignore[arg-type]
    engine = TorchEngine(device="cuda", precision=precision, micro_batch=4, deterministic=deterministic)  # type: ignore[arg-type]
    return config.model_copy(update={"engine": engine})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fp32_equals_the_cpu(dropout: float) -> None:
    assert run(started(on_gpu(dropout=dropout)), range(10)) == pytest.approx(
        run(started(config_of("torch", dropout=dropout)), range(10)), rel=1e-5
    )


def test_bf16_is_near_and_learns() -> None:
    exact, near = (
        run(started(on_gpu()), range(30), unequal=False),
        run(started(on_gpu("bf16")), range(30), unequal=False),
    )
    assert near == pytest.approx(exact, rel=2e-2)
    assert near[-1] < near[0] - 1


def test_compiled_equals_eager() -> None:
    config = on_gpu(dropout=0.1)
    compiled = config.model_copy(update={"engine": config.engine.model_copy(update={"compile": True})})
    assert run(started(compiled), range(6)) == pytest.approx(run(started(config), range(6)), rel=1e-5)


def test_isolated_documents_give_the_same_loss_compiled_and_eager() -> None:
    """Compiled, the mask is in blocks; shapes that fill them are needed."""
    shape = ShapeConfig(layers=2, heads=2, width=64, positions=256)
    train = TrainConfig(batch=4, length=256, learning_rate=1e-2)
    ids = np.random.default_rng(1).integers(0, VOCAB, (4, 257), dtype=np.int32)
    documents = (np.arange(256, dtype=np.int32) // 75 + 1)[None].repeat(4, 0)
    batch = Batch(ids[:, :-1], ids[:, 1:], np.arange(4), documents=documents)
    losses = []
    for compiled in (False, True):
        engine = TorchEngine(device="cuda", precision="fp32", micro_batch=4, compile=compiled)
        opened = started(RunConfig(model=ModelConfig(size="nano", shape=shape), train=train, engine=engine))
        losses.append([opened.train_step(batch, step, 1e-2).loss for step in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "dropout": {"shape": {"dropout": 0.1}},
    "adapters": {"lora": LoraConfig(rank=4)},
    "adapters and dropout": {"lora": LoraConfig(rank=4, dropout=0.1), "shape": {"dropout": 0.1}},
    "a frozen part": {"train": {"freeze": ["wte", "h.0.*", "*.bias"]}},
    "states made again": {"engine": {"activation_checkpointing": 1}},
    "Muon, smoothing": {"train": {"optimizer": "muon", "label_smoothing": 0.1}},
    "parts of a batch": {"engine": {"micro_batch": 2}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_give_the_same_loss_compiled_and_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products chosen and kernels of our own, as if the net were large; at a rate that does not make much of a
    rounding."""
    monkeypatch.setattr(matmul_torch, "MIN_FLOPS", 0)
    more = SETTINGS[name]
    shape = ShapeConfig(layers=2, heads=2, width=128, positions=128, **more.get("shape", {}))
    train = TrainConfig(batch=4, length=128, learning_rate=3e-3, **more.get("train", {}))
    ids = np.random.default_rng(1).integers(0, VOCAB, (4, 129), dtype=np.int32)
    batch, losses = Batch(ids[:, :-1], ids[:, 1:], np.arange(4)), []
    for compiled in (False, True):
        engine = TorchEngine(
            device="cuda", precision="bf16", compile=compiled, **{"micro_batch": 4, **more.get("engine", {})}
        )
        config = RunConfig(model=ModelConfig(size="nano", shape=shape), train=train, engine=engine)
        opened = started(adapting(config, more.get("lora")))
        losses.append([opened.train_step(batch, step, 3e-3).loss for step in range(8)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < losses[1][0]


def test_fp16_is_close_to_fp32_once_the_scale_fits() -> None:
    exact, engine = run(started(on_gpu()), range(1)), started(on_gpu("fp16"))
    steps = [engine.train_step(batch_of(0), 0, 0.0) for _ in range(30)]
    assert steps[0].skipped
    assert not steps[-1].skipped
    assert steps[-1].loss == pytest.approx(exact[0], rel=1e-3)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 products here"
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_fp8_is_near_and_learns(monkeypatch: pytest.MonkeyPatch, family: str, compiled: bool) -> None:
    monkeypatch.setattr(engine_runs, "FAMILY", [family])
    config = on_gpu("fp8")
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"compile": compiled})})
    exact, near = run(started(on_gpu("bf16")), range(30), unequal=False), run(started(config), range(30), unequal=False)
    assert near == pytest.approx(exact, rel=3e-2)
    assert near[-1] < near[0] - 1


def test_auto_takes_the_gpu_in_bf16() -> None:
    config = config_of("torch").model_copy(update={"engine": TorchEngine()})
    facts = started(config).describe()
    assert facts["device"].startswith("cuda")
    assert facts["precision"] in ("bfloat16", "float32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_is_bitwise(precision: str) -> None:
    config = on_gpu(precision, deterministic=True, dropout=0.1)
    try:
        straight = started(config)
        run(straight, range(4))
        weights, moments = list(straight.weights()), list(straight.optimizer_state())
        later = run(straight, range(4, 9))
        shape = open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0)
        again = open_engine(config.engine, config.train, shape, config.model.lora)
        again.load(weights, moments, 4, "saved")
        assert run(again, range(4, 9)) == later
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_non_finite_gradient_skips_the_update() -> None:
    engine = started(on_gpu())
    run(engine, range(2))
    weights, moments = list(engine.weights()), list(engine.optimizer_state())
    broken = [
        (name, np.full_like(values, np.inf) if name.endswith("ln_f.weight") else values) for name, values in weights
    ]
    engine.load(broken, moments, 2, "broken")
    assert engine.train_step(batch_of(3), 3, 1e-2).skipped
    assert engine.updates() == 2
    for (name, values), (_, before) in zip(engine.weights(), broken, strict=True):
        assert np.array_equal(values, before), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_save_allocates_no_host_memory(optimizer: str) -> None:
    engine: Any = started(on_gpu(optimizer=optimizer))
    run(engine, range(1))
    engine.pinned_buffers.close()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    held = [*engine.weights(), *engine.optimizer_state()]
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert len(held) > 20
