"""JAX against torch: the same losses, the same dropout, one checkpoint; and a mesh of four host devices against one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engine_runs import LORA, adapting, first_of, rows_of
from textmill.config import (
    JaxEngine,
    JaxMesh,
    LoraConfig,
    ModelConfig,
    RunConfig,
    ShapeConfig,
    TorchEngine,
    TrainConfig,
)
from textmill.engines import Engine, open_engine, open_ranks
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.processes.ranks import Ranks
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.verification.launcher import free_port

VOCAB, LENGTH, ROWS = 150, 24, 8
KINDS = {"torch": TorchEngine, "jax": JaxEngine}
GPT2 = open_family("gpt2")


def config_of(
    kind: str,
    *,
    dropout: float = 0.0,
    train: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    **engine: Any,
) -> RunConfig:
    shape = ShapeConfig(layers=2, heads=2, width=32, positions=LENGTH, dropout=dropout)
    settings = {"batch": ROWS, "length": LENGTH, "learning_rate": 1e-3, **(train or {})}
    chosen = KINDS[kind](**{"device": "cpu", "micro_batch": 4, **engine})
    config = RunConfig(model=ModelConfig(size="nano", shape=shape), train=TrainConfig(**settings), engine=chosen)
    return adapting(config, lora)


def started(config: RunConfig, ranks: Ranks | None = None) -> Engine:
    """An engine whose weights begin at the same numbers."""
    net = GPT2.shape_of(config.model, vocab=VOCAB, eos_id=0)
    engine = open_engine(config.engine, config.train, net, config.model.lora, ranks)
    engine.load(first_of(config, net), [], 0, "the first weights")
    return engine


def engine_of(kind: str, **options: Any) -> Engine:
    return started(config_of(kind, **options))


def batch_of(step: int, *, documents: bool = False) -> Batch:
    """Samples that ask for different numbers of tokens, one of them for none."""
    dice = np.random.default_rng(step)
    ids = (dice.integers(0, 12, (ROWS, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
    labels = ids[:, 1:].copy()
    for row in range(ROWS):
        labels[row, row * LENGTH // ROWS :] = IGNORED
    numbers = np.sort(dice.integers(1, 4, (ROWS, LENGTH)), 1).astype(np.int32) if documents else None
    return Batch(ids[:, :-1], labels, np.arange(step * ROWS, (step + 1) * ROWS), documents=numbers)


def losses_of(engine: Engine, steps: range, lr: float = 1e-2, **options: Any) -> list[float]:
    return [step.loss for step in [engine.train_step(batch_of(step, **options), step, lr) for step in steps]]


def test_fifty_steps_match_torch_and_checkpoints_are_interchangeable() -> None:
    torch, jax = engine_of("torch"), engine_of("jax")
    wanted = losses_of(torch, range(50))
    assert wanted[-1] < 0.8 * wanted[0]
    assert losses_of(jax, range(50)) == pytest.approx(wanted, rel=2e-6)
    # What JAX ends with is what torch ends with, by name, and either goes on from it.
    held = {"": dict(jax.weights()), "moments": dict(jax.optimizer_state())}
    assert jax.updates() == torch.updates() == 50
    for name, values in [*torch.weights(), *torch.optimizer_state()]:
        other = held["moments" if name.startswith(("m/", "v/")) else ""][name]
        # The key's bias has no gradient but noise, which Adam makes as large as any other.
        close = np.abs(other - values).max() < 1e-4 * max(1e-6, np.abs(values).max())
        assert close or "c_attn.bias" in name, name
    again = engine_of("torch")
    again.load(held[""].items(), held["moments"].items(), 50, "what JAX saved")
    for one, other in ((again.weights(), held[""]), (again.optimizer_state(), held["moments"])):
        assert all(np.array_equal(values, other[name]) for name, values in one), "bit for bit, through both layouts"
    third = engine_of("jax")
    third.load(again.weights(), again.optimizer_state(), again.updates(), "what torch took over")
    later = losses_of(torch, range(50, 60))
    assert losses_of(again, range(50, 60)) == pytest.approx(later, rel=1e-5)
    assert [loss.hex() for loss in losses_of(third, range(50, 55))] == [
        loss.hex() for loss in losses_of(jax, range(50, 55))
    ]


@pytest.mark.long
def test_dropout_documents_and_losses_match_the_torch_engine() -> None:
    train = {"loss": "sample_mean", "label_smoothing": 0.1, "clip": 0.3, "freeze": ["wpe"], "layer_decay": 0.7}
    torch, jax = (engine_of(kind, dropout=0.2, train=train, activation_checkpointing=1) for kind in KINDS)
    wanted = losses_of(torch, range(12), documents=True)
    assert losses_of(jax, range(12), documents=True) == pytest.approx(wanted, rel=2e-6)
    assert losses_of(engine_of("torch", train=train), range(1), documents=True) != wanted[:1], "dropout is on"
    assert {name for name, _ in jax.optimizer_state()} == {name for name, _ in torch.optimizer_state()}
    one, other = torch.eval_step(batch_of(99, documents=True)), jax.eval_step(batch_of(99, documents=True))
    assert (other.loss_tokens, other.correct) == (one.loss_tokens, one.correct)
    assert other.loss == pytest.approx(one.loss, rel=1e-5)


@pytest.mark.long
def test_bf16_is_near_fp32_and_near_torch() -> None:
    wanted = losses_of(engine_of("torch", precision="bf16"), range(20))
    jax = engine_of("jax", precision="bf16")
    found = losses_of(jax, range(20))
    assert found == pytest.approx(wanted, rel=2e-2)
    assert found != wanted
    assert jax.describe()["precision"] == "bfloat16"
    assert all(values.dtype == np.float32 for _, values in jax.weights())


@pytest.mark.long
def test_muon_matches_torch() -> None:
    train = {"optimizer": "muon", "muon": {"adamw_rate_factor": 0.5, "momentum": 0.8}}
    torch, jax = (engine_of(kind, train=train) for kind in KINDS)
    assert losses_of(jax, range(15)) == pytest.approx(losses_of(torch, range(15)), rel=5e-3)
    assert [name for name, _ in jax.optimizer_state()] == [name for name, _ in torch.optimizer_state()]
    first = {name: values for name, values in torch.optimizer_state() if name.startswith("momentum/")}
    for name, values in jax.optimizer_state():
        if name in first:
            assert np.abs(values - first[name]).max() < 5e-2 * np.abs(first[name]).max(), name


@pytest.mark.long
def test_deterministic_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is deterministic anyway; the test checks that XLA knows the option and gets it only if it is set."""
    from textmill.engines import on_jax

    wanted = losses_of(engine_of("jax", micro_batch=8), range(2))
    assert losses_of(engine_of("jax", micro_batch=8, deterministic=True), range(2)) == wanted
    monkeypatch.setattr(on_jax, "DETERMINISTIC", {"xla_no_such_option": True})
    assert losses_of(engine_of("jax", micro_batch=8), range(1)) == wanted[:1]
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        losses_of(engine_of("jax", micro_batch=8, deterministic=True), range(1))


def test_a_loss_in_chunks_equals_the_full_loss() -> None:
    """Against the formula, written out in double precision."""
    import jax
    import jax.numpy as jnp

    from textmill.engines.losses_jax import loss_and_correct, summed_loss

    dice = np.random.default_rng(1)
    x, head = dice.standard_normal((4, 7, 16)).astype(np.float32), dice.standard_normal((128, 16)).astype(np.float32)
    labels, shares = batch_of(0).labels[:4, :7], dice.random((4, 7)).astype(np.float32)
    scores = (x.astype(np.float64) @ head.astype(np.float64).T)[..., :VOCAB][..., :100]
    spread = np.log(np.exp(scores).sum(-1))
    labelled = labels != IGNORED
    labels = np.where(labelled, labels % 100, IGNORED).astype(np.int32)
    picked = np.take_along_axis(scores, np.where(labelled, labels, 0)[..., None], -1)[..., 0]
    wanted = np.where(labelled, spread - 0.8 * picked - 0.2 * scores.mean(-1), 0)
    for tokens in (1000, 12, 4):
        loss = jax.jit(lambda x, head, tokens=tokens: summed_loss(x, head, labels, shares, None, 100, tokens, 0.2))
        assert float(loss(x, head)) == pytest.approx((wanted * shares).sum(), rel=1e-6)
        slope_x, slope_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, head)
        bump = jnp.zeros_like(x).at[0, 0, 3].set(1e-2)
        assert float(slope_x[0, 0, 3]) == pytest.approx(
            float(loss(x + bump, head) - loss(x - bump, head)) / 2e-2, rel=2e-3, abs=1e-4
        )
        assert not np.asarray(slope_head)[100:].any(), "padding rows learn nothing"
        sums, right = loss_and_correct(jnp.asarray(x), jnp.asarray(head), jnp.asarray(labels), 100, tokens)
        np.testing.assert_allclose(
            np.asarray(sums), np.where(labelled, spread - picked, 0).sum(1), rtol=1e-5, atol=1e-5
        )
        assert (np.asarray(right) == ((scores.argmax(-1) == labels) & labelled).sum(1)).all()


@pytest.mark.long
def test_a_mesh_of_four_devices_gives_the_losses_of_one() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    here = Path(__file__)
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent)]),
    }
    child = [sys.executable, "-c", "import test_on_jax; test_on_jax.on_four_devices()"]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = losses_of(engine_of("torch", micro_batch=1, train={"clip": 0.5}), range(20))
    for mesh, losses in found["losses"].items():
        assert losses == pytest.approx(wanted, rel=1e-6), mesh
    assert found["parts"] == {"replicate": 1.0, "shard": 0.25, "both": 0.25}, (
        "the fraction of a matrix that one device holds"
    )
    assert found["again"] == found["losses"]["both"][10:], "a resume on the same mesh is bitwise"
    one = dict(engine_of("torch").weights())
    assert found["names"] == sorted(one)
    adapted = engine_of("torch", micro_batch=1, train={"clip": 0.5}, lora=LORA)
    assert found["adapted"] == pytest.approx(losses_of(adapted, range(5)), rel=1e-6)
    assert found["adapters"] == sorted(name for name, _ in adapted.weights())
    messages = (
        "needs 3 devices, found 4",
        "4 does not divide model.shape.heads=2; 2 would",
        "6 samples cannot be divided evenly by 4 devices; 4 or 8",
    )
    assert len(found["refused"]) == len(messages)
    assert all(part in found_message for part, found_message in zip(messages, found["refused"], strict=True)), found[
        "refused"
    ]


def on_four_devices() -> None:
    """What the test above starts in a process of its own, since the number of devices is settled once."""
    meshes = {"replicate": {"replicate": 4}, "shard": {"shard": 4}, "both": {"shard": 2, "tensor": 2}}
    found: dict[str, Any] = {"losses": {}, "parts": {}, "refused": []}
    for name, sizes in meshes.items():
        options = {"micro_batch": 1, "mesh": JaxMesh(**sizes), "train": {"clip": 0.5}}
        engine: Any = engine_of("jax", **options)
        first = losses_of(engine, range(10))
        held, moments = list(engine.weights()), list(engine.optimizer_state())
        found["losses"][name] = first + losses_of(engine, range(10, 20))
        matrix = engine.params["transformer.h.0.mlp.c_fc.weight"]
        found["parts"][name] = matrix.addressable_shards[0].data.size / matrix.size
        if name == "both":
            again = engine_of("jax", **options)
            again.load(held, moments, 10, "saved")
            found["again"] = losses_of(again, range(10, 20))
            found["names"] = sorted(name for name, _ in held)
            adapted = engine_of("jax", lora=LORA, **options)
            found["adapted"] = losses_of(adapted, range(5))
            found["adapters"] = sorted(name for name, _ in adapted.weights())
        engine.close()
    for sizes, train in (({"shard": 3}, {}), ({"tensor": 4}, {}), ({}, {"batch": 6})):
        try:
            engine_of("jax", micro_batch=1, mesh=JaxMesh(**sizes), train=train)
        except TextmillError as error:
            found["refused"].append(str(error))
    print(json.dumps(found))


@pytest.mark.long
def test_two_processes_give_the_losses_of_one() -> None:
    """Weights in parts over both, so that saving gathers what lies with the other."""
    here = Path(__file__)
    common = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent)]), "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    code = "from test_on_jax import as_one_of_two; from textmill.processes.signals import run_and_exit; "
    code += "run_and_exit(as_one_of_two)"
    child = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(child, env={**common, "RANK": rank}, stdout=subprocess.PIPE, text=True) for rank in ("0", "1")
    ]
    outputs = [json.loads(process.communicate(timeout=900)[0].splitlines()[-1]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    torch = engine_of("torch", micro_batch=4)
    wanted = losses_of(torch, range(5))
    sums = torch.eval_step(batch_of(7))
    for one in outputs:
        assert one["losses"] == pytest.approx(wanted, rel=1e-6)
        assert one["loss_tokens"] == sums.loss_tokens
        assert one["loss"] == pytest.approx(sums.loss, rel=1e-5)
    names = sorted(name for name, _ in [*torch.weights(), *torch.optimizer_state()])
    assert sorted(outputs[0]["names"] + outputs[1]["names"]) == names, (
        "each keeps its own half, and both together have all"
    )
    norms = {name: float(np.abs(values).sum()) for name, values in torch.weights()}
    for name, norm in {**outputs[0]["norms"], **outputs[1]["norms"]}.items():
        assert "c_attn.bias" in name or norm == pytest.approx(norms[name], rel=1e-4, abs=1e-4), name


def free_ports() -> int:
    """A port that is free with the next one: processes meet at the first, JAX at the second."""
    while True:
        with socket.socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", 1 + (port := free_port())))
            return port


def as_one_of_two() -> int:
    """What the test above starts twice."""
    config = config_of("jax", mesh=JaxMesh(shard=2))
    ranks = open_ranks(config.engine)
    engine = started(config, ranks)
    losses = [engine.train_step(rows_of(batch_of(step), engine.samples_of(ROWS)), step, 1e-2).loss for step in range(5)]
    sums = engine.eval_step(batch_of(7))
    kept = list(engine.weights(lambda name: len(name) % 2 == ranks.rank))
    names = [name for name, _ in [*kept, *engine.optimizer_state(lambda name: len(name) % 2 == ranks.rank)]]
    norms = {name: float(np.abs(values).sum()) for name, values in kept}
    print(
        json.dumps(
            {"losses": losses, "loss_tokens": sums.loss_tokens, "loss": sums.loss, "names": names, "norms": norms}
        ),
        flush=True,
    )
    engine.close()
    ranks.close()
    return 0


@pytest.mark.long
def test_a_missing_package_is_named() -> None:
    script = (
        "import sys; sys.modules['jax'] = None; from textmill.config import JaxEngine; "
        "from textmill.engines import open_ranks; open_ranks(JaxEngine())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "engine.kind=jax needs jax and optax; run: pip install 'textmill[jax]'"
    )


def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(
        TextmillError, match=r"engine\.device: 'tpu' is not available; found cpu; set engine\.device=auto"
    ):
        engine_of("jax", device="tpu")
