"""States made again in backward give the same numbers from less memory; smoothing reaches the step's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.engine_runs import VOCAB, batch_of, config_of, run, started
from textmill.config import ModelConfig, RunConfig, ShapeConfig
from textmill.tokens.batches.batch import IGNORED


def deep(recompute: int, **options: Any) -> RunConfig:
    """The contract's small net with five blocks."""
    config = config_of("torch", **options)
    shape = config.model.shape.model_copy(update={"layers": 5})  # type: ignore[union-attr]
    assert isinstance(shape, ShapeConfig)
    engine = config.engine.model_copy(update={"activation_checkpointing": recompute})
    return config.model_copy(update={"model": ModelConfig(size="nano", shape=shape), "engine": engine})


def kept(recompute: int) -> int:
    """Bytes that one step keeps for backward, without parameters."""
    engine: Any = started(deep(recompute))
    own = {parameter.data_ptr() for parameter in engine.net.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    ids = torch.from_numpy(batch_of(0).inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.net(ids)
    return sum(sizes.values())


@pytest.mark.parametrize("recompute", [1, 2, 5, 9])
def test_recompute_gives_the_same_numbers(recompute: int) -> None:
    one, other = started(deep(0, dropout=0.2)), started(deep(recompute, dropout=0.2))
    assert [loss.hex() for loss in run(one, range(4))] == [loss.hex() for loss in run(other, range(4))]
    for (name, values), (_, again) in zip(one.weights(), other.weights(), strict=True):
        assert np.array_equal(values, again), name


def test_recompute_keeps_less_memory() -> None:
    assert kept(2) < kept(0) / 3


def test_smoothing_is_in_the_loss() -> None:
    plain: Any = started(config_of("torch"))
    batch = batch_of(0, unequal=False)
    with torch.no_grad():
        scores = plain.net.logits(plain.net(torch.from_numpy(batch.inputs))).double().flatten(0, 1)
    labels = torch.from_numpy(batch.labels).long().flatten()
    wanted = F.cross_entropy(scores, labels, label_smoothing=0.3)
    engine = started(config_of("torch", label_smoothing=0.3))
    assert engine.train_step(batch, 0, 0.0).loss == pytest.approx(wanted.item(), rel=1e-6)
    without = F.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED)
    assert engine.eval_step(batch).loss == pytest.approx(float(without), rel=1e-6), "evaluation is plain"
    assert scores.shape[1] == VOCAB
