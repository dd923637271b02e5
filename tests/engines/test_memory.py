"""The memory estimate against the tensors of real engines, and against peaks that were measured on a GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from tests.support import memory_process
from tests.support.engine_runs import LENGTH, LORA, batch_of, config_of, started
from tests.support.layout_process import VOCAB
from tests.support.layout_process import config_of as layout_config
from tests.support.layout_process import started as layout_started
from tests.support.memory_process import MESHES, OPTIMIZERS, config_with, held_bytes
from tests.support.together import run_together
from textmill.config import JaxEngine, JaxMesh, ModelConfig, RunConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.engines.memory import (
    Device,
    Estimate,
    Estimator,
    State,
    largest_on_gpu,
    sample_activations,
    saved_bytes,
    saved_per_sample,
    state_on_deepspeed,
    state_on_jax,
    state_on_torch,
)
from textmill.engines.meshes import Mesh, mesh_of
from textmill.models import open_family
from textmill.models.nets_torch import new_net

KINDS = ("weights", "gradients", "optimizer")


def parts_of(state: State) -> dict[str, int]:
    return {kind: getattr(state, kind) for kind in KINDS}


def shape_of(config: RunConfig, vocab: int = VOCAB) -> Any:
    return open_family("gpt2").shape_of(config.model, vocab=vocab, eos_id=0)


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "muon"}, {"ema_window": 20.0}, {"freeze": ["h.0", "wte"]}], ids=str
)
def test_one_process_holds_the_estimated_bytes(settings: dict[str, Any]) -> None:
    config = layout_config({}, **settings)
    state = state_on_torch(config.train, shape_of(config), None, Mesh())
    assert parts_of(state) == held_bytes(layout_started(config))
    assert state.buffers == 0


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks holds, by mesh and optimizer."""
    folder = tmp_path_factory.mktemp("memory")
    assert run_together([sys.executable, memory_process.__file__, str(folder)], 2) == "ok"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_each_rank_holds_at_most_the_estimated_bytes(
    mesh: str, optimizer: str, two_ranks: list[dict[str, Any]]
) -> None:
    config = config_with(mesh, optimizer)
    shape = shape_of(config)
    first, second = (rank[f"{mesh} {optimizer}"] for rank in two_ranks)
    state = parts_of(state_on_torch(config.train, shape, None, mesh_of(config.engine, config.train, shape, 2)))
    assert state == first
    assert all(state[kind] >= second[kind] for kind in KINDS)


def test_deepspeed_holds_the_estimated_bytes() -> None:
    config = config_of("deepspeed")
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"zero": 2})})
    engine: Any = started(config)
    _ = engine.train_step(batch_of(0), 0, 1e-3).loss
    zero = engine.engine.optimizer
    state = state_on_deepspeed(config.engine, config.train, engine.net.shape, None, 1, 4)
    moments = [values for one in zero.optimizer.state.values() for values in one.values() if values.dim()]
    masters = sum(values.nbytes for values in zero.single_partition_of_fp32_groups)
    assert state.weights == sum(parameter.nbytes for parameter in engine.net.parameters())
    assert state.optimizer == masters + sum(values.nbytes for values in moments)


def test_a_sharded_jax_mesh_divides_the_state_of_one_device() -> None:
    config = config_of("jax", lora=LORA)
    config = config.model_copy(update={"engine": JaxEngine(mesh=JaxMesh(shard=2), micro_batch=4)})
    shape = shape_of(config)
    one, two = (state_on_jax(config.train, shape, config.model.lora, Mesh(shard=shards)) for shards in (1, 2))
    assert one.weights / 2 <= two.weights < 0.51 * one.weights, "all but a few biases are divided"
    assert two.gradients == one.gradients / 2
    assert two.optimizer == 2 * two.gradients


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_traced_activations_are_those_of_a_real_pass(dropout: float) -> None:
    config = config_of("torch", dropout=dropout)
    shape = shape_of(config)
    net, kept = new_net(shape, torch.device("cpu")), {}
    own = {parameter.data_ptr() for parameter in net.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(3, LENGTH, dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(ids, torch.zeros(3, dtype=torch.int32) if dropout else None)
    real = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
    assert saved_bytes(shape, 3, LENGTH, torch.float32) == real
    assert saved_per_sample(shape, LENGTH, torch.float32, 0) == pytest.approx(real / 3, rel=0.02)


def on_gpu(size: str, batch: int, memory: int = 140, **settings: Any) -> Estimate:
    """The estimate of a run in bf16 on one GPU."""
    train = TrainConfig(batch=batch, length=1024, **settings)
    config = RunConfig(model=ModelConfig(size=size), train=train, engine=TorchEngine(micro_batch=batch))
    return Estimator(shape_of(config, 50257), train).estimate(config.engine, 1, Device(True, memory << 30, "bf16"))


@pytest.mark.parametrize(
    ("size", "batch", "peak"), [("small", 64, 26.5), ("medium", 32, 32.3), ("large", 16, 35.2), ("xl", 8, 41.1)]
)
def test_peaks_measured_on_a_gpu(size: str, batch: int, peak: float) -> None:
    """The GiB that docs/benchmarks.md has of an H200."""
    assert on_gpu(size, batch).memory.total / 2**30 == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize(
    ("model", "length", "batch", "checkpointing", "reserved"),
    [
        ({"family": "bert", "size": "base"}, 512, 64, 0, 12.25),
        ({"size": "medium"}, 1024, 32, 1, 10.37),
        ({"size": "small", "init_from": "another", "lora": {"rank": 8}}, 1024, 32, 0, 14.33),
    ],
    ids=["labelled tokens alone", "activation checkpointing", "copies in bf16 without gradients"],
)
def test_parts_that_are_not_there_at_once_are_not_added(
    model: dict[str, Any], length: int, batch: int, checkpointing: int, reserved: float
) -> None:
    """The GB of bench/LOG.md, 2026-11-17: logits of labelled tokens only; no logits in the recomputed group's backward;
    half-precision copies of frozen matrices."""
    engine = {"micro_batch": batch, "activation_checkpointing": checkpointing}
    config = RunConfig.model_validate({"model": model, "train": {"batch": batch, "length": length}, "engine": engine})
    family = open_family(config.model.family)
    vocab = 30522 if config.model.family == "bert" else 50257
    estimator = Estimator(
        family.shape_of(config.model, vocab=vocab, eos_id=0, length=length).with_dropout(0.0),
        config.train.model_copy(update={"optimizer": "adamw"}),
        config.model.lora,
    )
    found = estimator.estimate(config.engine, 1, Device(True, 140 << 30, "bf16"))
    assert found.memory.total / 1e9 == pytest.approx(reserved, rel=0.05)


def test_copies_of_gathered_weights_stay_on_every_shard() -> None:
    """FSDP frees a gathered block, but not autocast's copy of it: all 354 million parameters of medium, in bf16."""
    config = RunConfig(model=ModelConfig(size="medium"), train=TrainConfig(batch=64, length=1024))
    estimator, device = Estimator(shape_of(config, 50257), config.train), Device(True, 140 << 30, "bf16")
    half, full = (
        estimator.estimate(TorchEngine(mesh=MeshConfig(shard=64), micro_batch=1, precision=precision), 64, device)
        for precision in ("bf16", "fp32")
    )
    copies = half.memory.activations - full.memory.activations / 2 + half.memory.gradients
    assert copies == pytest.approx(2 * 354e6, rel=0.01)


def test_small_nets_stand_for_a_deep_one() -> None:
    config = RunConfig(
        model=ModelConfig(size="medium"),
        train=TrainConfig(batch=64),
        engine=TorchEngine(mesh=MeshConfig(shard=8, tensor=4), micro_batch=1),
    )
    estimator, device = Estimator(shape_of(config, 50257), config.train), Device(True, 16 << 30, "bf16")
    exact = estimator.estimate(config.engine, 32, device)
    assert exact.memory == estimator.estimate(config.engine, 32, device, exact=False).memory


def test_activation_checkpointing_keeps_the_stream_and_one_block() -> None:
    shape = shape_of(RunConfig(model=ModelConfig(size="small")), 50257)
    kept = sample_activations(shape, 1024, 32.0, 4.0, 2, Mesh(), 1)
    stream, block = 768 * 1024 * 2, 32 * 768 * 1024
    assert kept == 12 * stream + block


def test_automatic_micro_batches_keep_memory_free() -> None:
    """24 bytes of each weight and 40 of each channel of a token in a layer, in 60% of the memory."""
    estimate, shape = on_gpu("small", 512), shape_of(RunConfig(model=ModelConfig(size="small")), 50257)
    for gigabytes in (16, 24, 80):
        found = largest_on_gpu(
            512, estimate.state, sample_activations(shape, 1024, 32.0, 4.0, 2, Mesh(), 0), gigabytes << 30
        )
        fits = (0.6 * (gigabytes << 30) - 24 * 124_475_904) / (40 * 768 * 12 * 1024)
        assert found == 1 << int(fits).bit_length() - 1
