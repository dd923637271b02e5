"""Muon against torch's own, one matrix at a time there; and what a checkpoint keeps of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.engines.test_contract import VOCAB, batch_of, config_of, run, started
from textmill.engines import open_engine
from textmill.engines.muon_torch import Muon, orthogonalised
from textmill.models import Weight, open_family
from textmill.models.rules import Rule

HEADS, WIDTH = 2, 24


def weights_and_values() -> list[tuple[Weight, torch.Tensor]]:
    dice = torch.Generator().manual_seed(4)
    shapes = [
        ("a", "qkv", (3 * WIDTH, WIDTH)),
        ("b", "linear", (WIDTH, WIDTH)),
        ("c", "linear", (4 * WIDTH, WIDTH)),
        ("d", "linear", (WIDTH, 4 * WIDTH)),
    ]
    return [(Weight(name, shape, 0.02, layout), torch.randn(shape, generator=dice)) for name, layout, shape in shapes]  # type: ignore[arg-type]


def parts_of(weight: Weight, values: torch.Tensor) -> list[torch.Tensor]:
    """The matrices that torch's optimizer gets: queries, keys and values each one."""
    if weight.layout != "qkv":
        return [values.clone()]
    return [values.view(HEADS, 3, -1, WIDTH)[:, which].reshape(-1, WIDTH).clone() for which in range(3)]


def test_updates_are_torchs() -> None:
    given = weights_and_values()
    ours = [(weight, nn.Parameter(values.clone())) for weight, values in given]
    theirs = [[nn.Parameter(part) for part in parts_of(weight, values)] for weight, values in given]
    rates = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0}
    muon = Muon([(weight, parameter, Rule(True, 0.1, rates[weight.name])) for weight, parameter in ours], HEADS, compiled=False)
    groups = [{"params": parts, "lr": 0.02 * rates[weight.name]} for (weight, _), parts in zip(given, theirs, strict=True)]
    oracle = torch.optim.Muon(groups, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
    dice = torch.Generator().manual_seed(5)
    for _ in range(4):
        for (weight, parameter), parts in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=dice)
            for part, slope in zip(parts, parts_of(weight, parameter.grad), strict=True):
                part.grad = slope
        muon.step(0.02, torch.tensor(1.0), torch.tensor(True))
        oracle.step()
    for (weight, parameter), parts in zip(ours, theirs, strict=True):
        before = dict((one.name, values) for one, values in given)[weight.name]
        for mine, part, first in zip(parts_of(weight, parameter.detach()), parts, parts_of(weight, before), strict=True):
            moved = (part.detach() - first).norm()
            assert (mine - part.detach()).norm() < 0.02 * moved, weight.name


def test_singular_values_come_near_one() -> None:
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(x))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_loss_falls() -> None:
    losses = run(started(config_of("torch", optimizer="muon")), range(40), unequal=False)
    assert losses[-1] < 3.0


def test_saved_and_loaded_it_goes_on_bit_for_bit() -> None:
    config = config_of("torch", dropout=0.1, optimizer="muon")
    straight = started(config)
    run(straight, range(4))
    weights, moments = [(name, values.copy()) for name, values in straight.weights()], list(straight.moments())
    shapes = {name: values.shape for name, values in weights}
    kinds = {name.partition("/")[0] for name, _ in moments}
    assert kinds == {"m", "v", "momentum"}
    for name, values in moments:
        kind, _, of = name.partition("/")
        assert values.shape == shapes[of]
        assert (kind == "momentum") == (of.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))), name
    later = run(straight, range(4, 9))
    again = open_engine(config, open_family("gpt2").shape_of(config.model, vocab=VOCAB, end=0))
    again.load(weights, moments, straight.updates() - 5, "saved")
    assert [loss.hex() for loss in run(again, range(4, 9))] == [loss.hex() for loss in later]
    for (name, one), (_, other) in zip(straight.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    engine = started(config_of("torch", optimizer="muon"))
    run(engine, range(2))
    weights, moments = [(name, values.copy()) for name, values in engine.weights()], list(engine.moments())
    broken = [(name, np.full_like(values, np.inf) if name.endswith("ln_f.weight") else values) for name, values in weights]
    engine.load(broken, moments, 2, "broken")
    assert engine.train_step(batch_of(3), 3, 1e-2).skipped
    for (name, values), (_, before) in zip([*engine.weights(), *engine.moments()], [*broken, *moments], strict=True):
        assert np.array_equal(values, before), name


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_come_near_one_batch(micro_batch: int) -> None:
    whole = run(started(config_of("torch", optimizer="muon")), range(5))
    assert run(started(config_of("torch", optimizer="muon", micro_batch=micro_batch)), range(5)) == pytest.approx(whole, rel=5e-3)
