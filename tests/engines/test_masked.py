"""Masked tokens and sentence pairs in every engine, against transformers' losses and gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.engine_runs import MAKE, engines_of
from tests.support.masked_batches import LENGTHS, VOCAB, masked_batch
from textmill.config import JaxMesh, ModelConfig, RunConfig, ShapeConfig, TrainConfig
from textmill.engines import Engine, open_engine
from textmill.engines.micro_batches import labelled_positions
from textmill.errors import TextmillError
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import IGNORED, Batch

ROWS, LENGTH = len(LENGTHS), sum(LENGTHS[0])


@pytest.fixture(
    params=[pytest.param(kind, marks=() if kind == "torch" else pytest.mark.long) for kind in engines_of("bert")]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def config_of(kind: str, *, micro_batch: int = ROWS, **shape: Any) -> RunConfig:
    numbers = {"layers": 2, "width": 32, "positions": LENGTH, **shape}
    model = ModelConfig(family="bert", size="tiny", shape=ShapeConfig(**numbers))
    train = TrainConfig(batch=ROWS, length=LENGTH, learning_rate=1e-2, clip=0.0)
    return RunConfig(model=model, train=train, engine=MAKE[kind](device="cpu", micro_batch=micro_batch))


def started(config: RunConfig) -> Engine:
    shape = open_family("bert").shape_of(config.model, vocab=VOCAB, eos_id=3)
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    engine.load(initial_weights(shape, 5), [], 0, "the first weights")
    return engine


def steps_of(engine: Engine, steps: range) -> list[tuple[float, float, float]]:
    results = [engine.train_step(masked_batch(step), step, 1e-2) for step in steps]
    return [(one.loss, one.terms["pair_loss"], one.norm) for one in results]


def theirs_of(config: RunConfig, engine: Engine) -> Any:
    from transformers import BertConfig, BertForPreTraining, MegatronBertConfig, MegatronBertForPreTraining

    family = open_family("bert")
    shape: Any = family.shape_of(config.model, vocab=VOCAB, eos_id=3)
    post = shape.norm == "post"
    hf = (BertConfig if post else MegatronBertConfig)(**family.hf_config_of(shape))
    theirs = (BertForPreTraining if post else MegatronBertForPreTraining)(hf).eval()
    theirs.load_state_dict({name: torch.from_numpy(values) for name, values in engine.weights()}, strict=False)
    theirs.tie_weights()
    return theirs


def losses_of(theirs: Any, batch: Batch) -> tuple[Any, Any]:
    """The mean over masked tokens and the mean over pairs, each pair computed alone."""
    masked, pairs = [], []
    assert batch.types is not None
    assert batch.pair_labels is not None
    for row, counts in enumerate(LENGTHS):
        start = 0
        for count in counts:
            part = (slice(row, row + 1), slice(start, start + count))
            ids, types, labels = (
                torch.from_numpy(one[part]).long() for one in (batch.inputs, batch.types, batch.labels)
            )
            out = theirs(ids, token_type_ids=types)
            logits = out.prediction_logits[labels != IGNORED]
            masked.append(F.cross_entropy(logits, labels[labels != IGNORED], reduction="none"))
            label = torch.from_numpy(batch.pair_labels[part][:, 0]).long()
            pairs.append(F.cross_entropy(out.seq_relationship_logits, label, reduction="none"))
            start += count
    return torch.cat(masked).mean(), torch.cat(pairs).mean()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_losses_and_gradients_equal_transformers(kind: str, norm: str) -> None:
    """The update minimises the sum of both means."""
    config = config_of(kind, micro_batch=4, norm=norm)
    engine, batch = started(config), masked_batch(0)
    theirs = theirs_of(config, engine)
    masked, pair = losses_of(theirs, batch)
    (masked + pair).backward()
    masked, pair = masked.detach(), pair.detach()
    sums = engine.eval_step(batch)
    step = engine.train_step(batch, 0, 1e-2)
    assert step.loss == pytest.approx(float(masked), rel=1e-6)
    assert step.terms == {"pair_loss": pytest.approx(float(pair), rel=1e-6)}
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    norm_of_all = np.sqrt(sum(float((one.astype(np.float64) ** 2).sum()) for one in gradients.values()))
    assert step.norm == pytest.approx(norm_of_all, rel=1e-5)
    for name, values in engine.optimizer_state():
        if name.startswith("m/"):
            wanted = gradients[name.removeprefix("m/")]
            assert np.abs(values / 0.1 - wanted).max() < 1e-5 * norm_of_all, name
    counts = [sums.loss_tokens, sums.others["pair"].loss_tokens]
    assert counts == [int((batch.labels != IGNORED).sum()), sum(map(len, LENGTHS))]
    assert sums.loss / counts[0] == pytest.approx(float(masked), rel=1e-6)
    assert sums.others["pair"].loss / counts[1] == pytest.approx(float(pair), rel=1e-6)


def test_both_losses_fall(kind: str) -> None:
    engine = started(config_of(kind, dropout=0.1))
    first = engine.eval_step(masked_batch(999))
    losses = steps_of(engine, range(60))
    assert losses[0][0] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert losses[0][1] == pytest.approx(np.log(2), rel=0.05)
    assert np.mean([loss for loss, _, _ in losses[-5:]]) < 3.5
    assert np.mean([pair for _, pair, _ in losses[-5:]]) < 0.1
    last = engine.eval_step(masked_batch(999))
    assert last.correct > first.correct
    assert last.others["pair"].correct == last.others["pair"].loss_tokens


def test_micro_batches_equal_one_batch_and_a_saved_engine_resumes_bitwise(kind: str) -> None:
    whole = steps_of(started(config_of(kind, dropout=0.1)), range(4))
    config = config_of(kind, dropout=0.1, micro_batch=2)
    engine = started(config)
    parts = steps_of(engine, range(2))
    weights = [(name, values.copy()) for name, values in engine.weights()]
    moments = list(engine.optimizer_state())
    later = steps_of(engine, range(2, 4))
    for found, wanted in zip(parts + later, whole, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    again = open_engine(config.engine, config.train, open_family("bert").shape_of(config.model, vocab=VOCAB, eos_id=3))
    again.load(weights, moments, 2, "saved")
    assert steps_of(again, range(2, 4)) == later


def test_without_pairs(kind: str) -> None:
    """A net without a pair head, and one whose batches have no pairs: the same masked loss, and no pair loss."""
    batch = masked_batch(0, pairs=False)
    with_head, without = started(config_of(kind)), started(config_of(kind, pair_head=False))
    steps = [engine.train_step(batch, 0, 1e-2) for engine in (with_head, without)]
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-6)
    assert steps[0].norm == pytest.approx(steps[1].norm, rel=1e-5)
    assert [one.terms for one in steps] == [{}, {}]
    assert not with_head.eval_step(batch).others
    assert len(list(with_head.weights())) == len(list(without.weights())) + 4
    with pytest.raises(TextmillError, match=r"no pair head; set model\.shape\.pair_head=true"):
        without.train_step(masked_batch(0), 1, 1e-2)


MESHES = ({"shard": 4}, {"shard": 2, "tensor": 2})


@pytest.mark.long
def test_jax_meshes_match_torch() -> None:
    """In a process of its own, since the number of devices is settled once."""
    pytest.importorskip("jax", reason="needs the extra jax")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = [sys.executable, "-c", "from tests.engines import test_masked; test_masked.on_four_devices()"]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    wanted = steps_of(started(config_of("torch", micro_batch=2, heads=4, dropout=0.1)), range(3))
    for mesh, steps in zip(MESHES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        for found, expected in zip(steps, wanted, strict=True):
            assert found == pytest.approx(expected, rel=2e-6), mesh


def on_four_devices() -> None:
    """What the test above starts."""
    config, found = config_of("jax", micro_batch=2, heads=4, dropout=0.1), []
    for sizes in MESHES:
        engine = config.engine.model_copy(update={"mesh": JaxMesh(**sizes)})
        found.append(steps_of(started(config.model_copy(update={"engine": engine})), range(3)))
    print(json.dumps(found))


def test_few_positions_reach_the_head() -> None:
    labels = np.full((3, 64), IGNORED, np.int32)
    labels[0, [5, 9, 63]], labels[1, 2] = [7, 8, 9], 3
    positions = labelled_positions(labels)
    assert positions.shape == (3, 4), "a multiple of 64 / 32"
    assert np.take_along_axis(labels, positions, 1).tolist() == [[7, 8, 9, -100], [3, -100, -100, -100], [-100] * 4]
    assert labelled_positions(np.full((2, 64), IGNORED, np.int32)).shape == (2, 2)
    assert labelled_positions(np.zeros((2, 63), np.int32)).shape == (2, 63)


def test_other_families_refuse_pairs() -> None:
    config = config_of("torch").model_copy(update={"model": ModelConfig(size="nano", shape=ShapeConfig(layers=1))})
    shape = open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0)
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    engine.load(initial_weights(shape, 5), [], 0, "the first weights")
    with pytest.raises(TextmillError, match=r"types, pair_labels, which the model family gpt2 does not use"):
        engine.train_step(replace(masked_batch(0), documents=None), 0, 1e-2)
