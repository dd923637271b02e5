"""`train.multi_token`: the gradient of both labels against torch's own in fp64, its weight, resuming, and refusals."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.engine_runs import batch_of, config_of, started
from tests.support.kernel_devices import DEVICES, INTERPRETED
from tests.support.loss_oracle import PADDED, VOCAB, exact, given, relative_difference
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.config import MultiTokenConfig, TrainConfig
from textmill.config.load import build_config
from textmill.engines import losses_torch
from textmill.engines.losses_torch import LossFormula, WeightedLabels, summed_loss
from textmill.engines.micro_batches import micro_batches
from textmill.errors import TextmillError
from textmill.schedules import multi_token_weight_at
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.training.loop import train
from textmill.training.run_length import plan_run_length

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.2, 1e-3)])
def test_the_gradient_is_that_of_both_labels(
    device: str, dtype: torch.dtype, smoothing: float, z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_torch, "CPU_LOGITS", 20 * PADDED)
    monkeypatch.setattr(losses_torch, "GPU_TOKENS", 20)
    x, head, labels, weights = given(23 if INTERPRETED else 73, dtype, device)
    added = labels.roll(-1)
    added[4::7] = labels[4::7]  # the same token twice
    added = torch.where((labels == IGNORED) | (added == IGNORED), IGNORED, added)
    multi_token_weights = torch.where(added == IGNORED, 0, 0.4 * weights)
    x.requires_grad_()
    head.requires_grad_()
    both = WeightedLabels(labels, weights, WeightedLabels(added, multi_token_weights))
    loss = summed_loss(x, head, both, LossFormula(VOCAB, smoothing, z))
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    wanted, *first_gradients = exact(x.detach(), head.detach(), labels, weights, smoothing, z)
    _, *added_gradients = exact(x.detach(), head.detach(), added, multi_token_weights, smoothing, z)
    assert float(loss.detach()) == pytest.approx(wanted.item(), rel=1e-6 if dtype == torch.float32 else 1e-3)
    for found, one, other in zip((x.grad, head.grad), first_gradients, added_gradients, strict=True):
        assert found is not None
        assert relative_difference(found, 3 * (one + other)) < BOUNDS[dtype]
    assert head.grad is not None
    assert head.grad[VOCAB:].abs().max() == 0, "padding rows have no gradient"


def test_the_added_label_is_the_next_one_of_the_same_text() -> None:
    labels = np.array([[5, 6, IGNORED, 7, 8], [1, 2, 3, 4, 5]], np.int32)
    batch = Batch(np.zeros_like(labels), labels, np.arange(2), multi_token_weight=0.5)
    net: Any = started(config_of("torch"))
    weights = np.array([[1, 2, 0, 3, 4], [1, 1, 1, 1, 1]], np.float32)
    ((_, found),) = micro_batches(batch, net.net, 2, torch.device("cpu"), weights=weights)
    assert found.multi_token_labels is not None
    assert found.multi_token_weights is not None
    assert found.multi_token_labels.tolist() == [[6, IGNORED, IGNORED, 8, IGNORED], [2, 3, 4, 5, IGNORED]]
    assert found.multi_token_weights.tolist() == [[0.5, 0, 0, 1.5, 0], [0.5, 0.5, 0.5, 0.5, 0]]
    doubled = found.scaled(torch.tensor(2.0)).multi_token_weights
    assert doubled is not None
    assert doubled.tolist() == (2 * found.multi_token_weights).tolist(), "fp16's loss scale"


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_step_has_the_gradient_of_the_formula(micro_batch: int) -> None:
    engine: Any = started(config_of("torch", micro_batch=micro_batch))
    batch = batch_of(0)
    net = started(config_of("torch")).net.double()  # type: ignore[attr-defined]
    scores = net.logits(net(torch.from_numpy(batch.inputs))).log_softmax(-1)
    labels = torch.from_numpy(batch.labels).long()
    first = F.nll_loss(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    shifted = scores[:, :-1][labels[:, :-1] != IGNORED], labels[:, 1:][labels[:, :-1] != IGNORED]
    added = F.nll_loss(*shifted, ignore_index=IGNORED, reduction="sum") / (labels != IGNORED).sum()
    (first + 0.3 * added).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]).norm()
    step = engine.train_step(replace(batch, multi_token_weight=0.3), 0, 0.0)
    assert step.loss == pytest.approx(float(first.detach()), rel=1e-6), "the logged loss is that of the next token"
    assert step.norm == pytest.approx(float(norm), rel=1e-5)


def test_without_weight_a_step_is_the_usual_one() -> None:
    one, other = (started(config_of("torch")) for _ in range(2))
    for step in range(3):
        plain = one.train_step(batch_of(step), step, 1e-2)
        assert other.train_step(replace(batch_of(step), multi_token_weight=0.0), step, 1e-2).loss == plain.loss
    for (name, values), (_, again) in zip(one.weights(), other.weights(), strict=True):
        assert np.array_equal(values, again), name


def test_the_weight_falls_to_zero() -> None:
    settings = TrainConfig(steps=100, multi_token=MultiTokenConfig(weight=0.5))
    weights = [multi_token_weight_at(step, settings) for step in (0, 10, 20, 50, 99)]
    assert weights == pytest.approx([0.5, 0.4, 0.3, 0, 0])
    assert [multi_token_weight_at(step, settings, 20) for step in (5, 20, 35, 50)] == pytest.approx([0.5, 0.5, 0.25, 0])
    assert [multi_token_weight_at(step, settings, 60) for step in (60, 61)] == pytest.approx([0.5, 0])


def test_with_minutes_the_weight_falls_once_the_steps_are_known() -> None:
    class Layout:
        samples_per_epoch = 1000

    class Sized:
        layouts = [Layout()]
        sizes = None

    settings = TrainConfig(minutes=1, warmup=2, multi_token=MultiTokenConfig(weight=0.5))
    length = plan_run_length(settings, Sized(), 8)  # type: ignore[arg-type]
    batch = batch_of(0)
    assert length.with_multi_token_weight(batch, 15_000).multi_token_weight == 0.5
    known = length.with_measured_steps(100, 10)
    assert [known.with_multi_token_weight(batch, step).multi_token_weight for step in (10, 30, 50)] == pytest.approx(
        [0.5, 0.25, 0]
    )
    plain = plan_run_length(TrainConfig(minutes=1), Sized(), 8)  # type: ignore[arg-type]
    assert plain.with_multi_token_weight(batch, 3).multi_token_weight is None


def test_a_run_resumes_bitwise(tokenized: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(tokenized, tmp_path / "root"))
    words = ["train.checkpoints.keep=5", "train.evaluate_batches=1"]
    config = config_for(root, root / "both", 12, *words, "train.multi_token.weight=0.5")
    train(config)
    metrics, weights = read_metrics(root / "both"), hash_checkpoint(root / "both", 12)
    train(config, step=5)
    assert read_metrics(root / "both") == metrics
    assert hash_checkpoint(root / "both", 12) == weights
    train(config_for(root, root / "plain", 12, *words))
    assert hash_checkpoint(root / "plain", 12) != weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"kind": "jax"}}, "the JAX engine has no multi-token prediction; remove it, or set engine.kind"),
        ({"engine": {"kind": "deepspeed"}}, "the DeepSpeed engine has no multi-token prediction; remove it, or set"),
        ({"engine": {"mesh": {"tensor": 2}}}, "cannot be used with engine.mesh.tensor=2; remove one of them"),
        ({"train": {"layout": "masked"}}, "cannot be used with train.layout=masked; remove one of them"),
        ({"train": {"distil": {"teachers": ["big"]}}}, "cannot be used with train.distil.teachers; remove one of them"),
    ],
)
def test_what_does_not_support_it_refuses_it_by_name(settings: dict[str, Any], message: str) -> None:
    tree = {**settings, "train": {**settings.get("train", {}), "multi_token": {"weight": 0.5}}}
    with pytest.raises(TextmillError) as raised:
        build_config(tree)
    assert str(raised.value).startswith(f"train.multi_token.weight: {message}")


@pytest.mark.long
def test_shards_train_as_one_process(tokenized: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(tokenized, tmp_path / "root"))
    for count in (1, 2):
        words = ["train.multi_token.weight=0.5", "engine.micro_batch=4", f"engine.mesh.shard={count}"]
        command = [sys.executable, "-m", "textmill", *train_arguments(root, root / str(count), 6), *words]
        assert run_together(command, count) == "ok"
    for one, other in zip(read_metrics(root / "1"), read_metrics(root / "2"), strict=True):
        assert one == {name: pytest.approx(value, rel=2e-5) for name, value in other.items()}
