"""Meshes of 8 and 512 ranks: memory, traffic and overlap of rank 0, whose collectives return at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fake_meshes import PASSES, Collectives, batch_of_rank, config_of, shape_of, started
from textmill.commands.plan import communication_of
from textmill.engines import parallel_torch
from textmill.engines.memory import Device, Estimator, fake_ranks
from textmill.errors import TextmillError

MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "8 replicas": (8, {}, {}),
    "8 shards": (8, {"shard": 8}, {}),
    "8 shards, kept": (8, {"shard": 8, "keep_gathered": True}, {}),
    "8 shards, recomputed": (8, {"shard": 8}, {"activation_checkpointing": 1}),
    "tensor 8": (8, {"tensor": 8, "sequence_parallel": False}, {}),
    "sequence 8": (8, {"tensor": 8}, {}),
    "sequence 8, llama": (8, {"tensor": 8}, {"family": "llama"}),
    "512 replicas": (512, {}, {}),
    "512 shards": (512, {"shard": 512}, {}),
    "64 replicas of 8 shards": (512, {"shard": 8}, {}),
    "64 replicas of tensor 8": (512, {"tensor": 8}, {}),
    "8 replicas of 8 shards of tensor 8": (512, {"shard": 8, "tensor": 8}, {}),
    "256 replicas of 2 stages": (512, {"pipeline": 2}, {}),
    "32 replicas of tensor 8 of 2 stages": (512, {"pipeline": 2, "tensor": 8}, {}),
    "4 replicas of 8 shards of tensor 8 of 2 stages": (512, {"pipeline": 2, "shard": 8, "tensor": 8}, {}),
    "4 replicas of 2 stages, interleaved": (8, {"pipeline": 2, "schedule": "interleaved"}, {"layers": 4}),
}
SMALL = 200
"""Bytes of a step that are not planned: sums of the loss and of the gradient norm, of one number each."""


@pytest.mark.long_with("8 shards, kept", "8 shards, recomputed", "tensor 8", "sequence 8, llama", "512 shards")
@pytest.mark.parametrize("name", MESHES)
def test_a_step_sends_and_holds_what_the_plan_says(name: str) -> None:
    """Sent bytes of ring collectives, and held bytes, of a real step, against the plan's formulas."""
    world, mesh, settings = MESHES[name]
    config = config_of(mesh, world, **settings)
    shape = shape_of(config)
    estimator = Estimator(shape, config.train, config.model.lora)
    estimate = estimator.estimate(config.engine, world, Device(False, 1 << 34, "fp32"))
    planned = sum(communication_of(config.engine, estimator, estimate).values())
    with fake_ranks(world):
        engine = started(config, world)
        with Collectives() as collectives:
            _ = engine.train_step(batch_of_rank(), 0, 1e-3).loss
        here = [parameter for name, parameter in engine.net.named_parameters() if name not in engine.net.absent]
        weights = sum(engine.parallel.local(parameter).nbytes for parameter in here)
        states = engine.optimizer.optimizers["adamw"].state().values()
        moments = sum(one.nbytes for state in states for one in state.values())
    sent = sum(one.sent for one in collectives.found)
    assert sent == pytest.approx(planned, rel=0, abs=SMALL)
    assert (weights, moments) == (estimate.state.weights, estimate.state.optimizer)


def test_traffic_of_a_rank_hardly_grows_with_the_replicas() -> None:
    """2 (n - 1) / n times the gradients, once in a step: 7 / 8 and 511 / 512."""
    found = []
    for world in (8, 512):
        with fake_ranks(world):
            engine = started(config_of({}, world), world)
            with Collectives() as collectives:
                _ = engine.train_step(batch_of_rank(), 0, 1e-3).loss
            gradients = sum(parameter.numel() * 4 for parameter in engine.net.parameters())
        found.append(sum(one.sent for one in collectives.found if one.sent > SMALL) / gradients)
    assert found == pytest.approx([2 * 7 / 8, 2 * 511 / 512])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_are_sent_while_backward_still_computes(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last block are on their way before the first block has any."""
    compile_, all_reduce = torch.compile, dist.all_reduce
    monkeypatch.setattr(torch, "compile", lambda *given, **more: compile_(*given, **{**more, "backend": "aot_eager"}))
    monkeypatch.setattr(parallel_torch, "BUCKET_BYTES", 1 << 16)
    sums: list[int] = []

    def counted(tensor: Tensor, *given: Any, **more: Any) -> Any:
        sums.append(tensor.nbytes)
        return all_reduce(tensor, *given, **more)

    monkeypatch.setattr(dist, "all_reduce", counted)
    sent: list[int] = []
    with fake_ranks(8):
        engine = started(config_of({}, 8, compile=compiled), 8)
        for parameter in engine.net.blocks[0].parameters():
            parameter.register_hook(lambda _: sent.append(len(sums)))
        note = engine.train_step(batch_of_rank(), 0, 1e-3).note
    assert (note is not None) == compiled
    first_pass, last_pass = sent[: len(sent) // 2], sent[len(sent) // 2 :]
    assert set(first_pass) == {0}, "gradient accumulation sends nothing before the last pass"
    assert 0 < min(last_pass) < len(sums) - 1


class TorchDynamoException(RuntimeError):
    """Has the name of torch's own compile error."""


def test_a_compile_error_after_gradients_were_sent_does_not_send_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under auto, the pass is repeated eagerly; the other replicas wait for one all-reduce of each bucket."""
    monkeypatch.setattr(parallel_torch, "BUCKET_BYTES", 1 << 16)
    found, counts = [], []
    for fails in (False, True):
        with fake_ranks(8):
            engine: Any = started(config_of({}, 8, compile=fails), 8)
            engine.compile_requested, passes = False, iter(range(PASSES))

            compute = engine._forward_backward

            def run_pass(
                *given: Any, engine: Any = engine, compute: Any = compute, passes: Any = passes, fails: bool = fails
            ) -> Tensor:
                engine.compiled = None
                loss: Tensor = compute(*given)
                if fails and next(passes, None) == PASSES - 1:
                    raise TorchDynamoException
                return loss

            engine._forward_backward = run_pass
            with Collectives() as collectives:
                result = engine.train_step(batch_of_rank(), 0, 1e-3)
            assert (result.note is not None) == fails
            found.append(dict(engine.weights()))
            counts.append(len(collectives.found))
    assert counts[0] == counts[1] > 3
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name], name)


def test_a_compile_error_with_collectives_in_the_forward_pass_is_an_error() -> None:
    """One rank that repeats its pass alone would wait for the others, which are further on."""
    with fake_ranks(8):
        engine: Any = started(config_of({"tensor": 8}, 8, compile=True), 8)
        engine.compile_requested = False

        def run_pass(*_: Any) -> Any:
            raise TorchDynamoException("no such instruction")

        engine._forward_backward = run_pass
        with pytest.raises(TextmillError, match=r"no such instruction; set engine\.compile=false"):
            engine.train_step(batch_of_rank(), 0, 1e-3)
