"""Muon against torch's own, one matrix at a time there; and what a checkpoint keeps of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.engine_runs import VOCAB, batch_of, config_of, run, started
from tests.support.kernel_devices import DEVICE, INTERPRETED, on_gpu_only
from textmill.config import TorchEngine
from textmill.engines import open_engine
from textmill.engines.optimizers import Member
from textmill.engines.optimizers.muon_torch import (
    ADAM_SCALE,
    MIN_NORM,
    Muon,
    Stack,
    divide_by_norm,
    matrices_of,
    orthogonalise,
)
from textmill.models import Weight, open_family
from textmill.models.parameter_groups import Rule

HEADS, WIDTH, MOMENTUM = 2, 24, 0.9
GPU = "cuda"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def weights_and_values() -> list[tuple[Weight, torch.Tensor]]:
    dice = torch.Generator().manual_seed(4)
    shapes = [
        ("a", (WIDTH,) * 3, (3 * WIDTH, WIDTH)),
        ("b", (), (WIDTH, WIDTH)),
        ("c", (), (4 * WIDTH, WIDTH)),
        ("d", (), (WIDTH, 4 * WIDTH)),
        ("e", (2 * WIDTH, WIDTH, WIDTH), (4 * WIDTH, WIDTH)),
    ]
    return [
        (Weight(name, shape, parts=parts, groups=HEADS if parts else 1), torch.randn(shape, generator=dice))
        for name, parts, shape in shapes
    ]


def parts_of(weight: Weight, values: torch.Tensor) -> list[torch.Tensor]:
    """The matrices that torch's optimizer gets: queries, keys and values each one."""
    if not weight.parts:
        return [values.clone()]
    rows = [part // HEADS for part in weight.parts]
    return [part.reshape(-1, WIDTH).clone() for part in values.view(HEADS, -1, WIDTH).split(rows, 1)]


@pytest.mark.parametrize("momentum", [0.95, 0.8, 0.0])
def test_updates_match_torch(momentum: float) -> None:
    given = weights_and_values()
    ours = [(weight, nn.Parameter(values.clone())) for weight, values in given]
    theirs = [[nn.Parameter(part) for part in parts_of(weight, values)] for weight, values in given]
    rates = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0, "e": 0.7}
    muon = Muon(
        [(weight, parameter, Rule(True, 0.1, rates[weight.name])) for weight, parameter in ours],
        momentum,
        compiled=False,
    )
    groups = [
        {"params": parts, "lr": 0.02 * rates[weight.name]} for (weight, _), parts in zip(given, theirs, strict=True)
    ]
    oracle = torch.optim.Muon(
        groups, lr=0.02, weight_decay=0.1, momentum=momentum, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
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
        for mine, part, first in zip(
            parts_of(weight, parameter.detach()), parts, parts_of(weight, before), strict=True
        ):
            moved = (part.detach() - first).norm()
            assert (mine - part.detach()).norm() < 0.02 * moved, weight.name


def test_singular_values_are_close_to_one() -> None:
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(divide_by_norm(x)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_loss_falls() -> None:
    losses = run(started(config_of("torch", optimizer="muon")), range(40), unequal=False)
    assert losses[-1] < 3.0


def test_a_saved_engine_resumes_bitwise() -> None:
    config = config_of("torch", dropout=0.1, optimizer="muon")
    straight = started(config)
    run(straight, range(4))
    weights, moments = [(name, values.copy()) for name, values in straight.weights()], list(straight.optimizer_state())
    shapes = {name: values.shape for name, values in weights}
    kinds = {name.partition("/")[0] for name, _ in moments}
    assert kinds == {"m", "v", "momentum"}
    for name, values in moments:
        kind, _, of = name.partition("/")
        assert values.shape == shapes[of]
        assert (kind == "momentum") == (of.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))), name
    later = run(straight, range(4, 9))
    again = open_engine(config.engine, config.train, open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0))
    again.load(weights, moments, straight.updates() - 5, "saved")
    assert [loss.hex() for loss in run(again, range(4, 9))] == [loss.hex() for loss in later]
    for (name, one), (_, other) in zip(straight.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


def test_a_non_finite_gradient_skips_the_update() -> None:
    engine = started(config_of("torch", optimizer="muon"))
    run(engine, range(2))
    weights, moments = [(name, values.copy()) for name, values in engine.weights()], list(engine.optimizer_state())
    broken = [
        (name, np.full_like(values, np.inf) if name.endswith("ln_f.weight") else values) for name, values in weights
    ]
    engine.load(broken, moments, 2, "broken")
    assert engine.train_step(batch_of(3), 3, 1e-2).skipped
    for (name, values), (_, before) in zip(
        [*engine.weights(), *engine.optimizer_state()], [*broken, *moments], strict=True
    ):
        assert np.array_equal(values, before), name


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_are_close_to_one_batch(micro_batch: int) -> None:
    whole = run(started(config_of("torch", optimizer="muon")), range(5))
    assert run(started(config_of("torch", optimizer="muon", micro_batch=micro_batch)), range(5)) == pytest.approx(
        whole, rel=5e-3
    )


SIZES = [(2, 12, 24, 96), (3, 16, 40, 70), (2, 16, 50, 33), (3, 64, 192, 768)]
"""Heads, their width, the net's width and the MLP's: a query's matrix is square, tall, wide, and square in several
tiles."""


def two_layers(heads: int, D: int, width: int, inner: int, device: str) -> list[Member]:
    """Matrices of both lies, and rules that differ."""
    dice, members = torch.Generator().manual_seed(3), []
    for layer in range(2):
        shapes = [
            ((heads * D,) * 3, (3 * heads * D, width)),
            ((), (width, heads * D)),
            ((), (inner, width)),
            ((), (width, inner)),
        ]
        for number, (parts, shape) in enumerate(shapes):
            weight = Weight(f"{layer}.{number}", shape, parts=parts, groups=heads if parts else 1)
            parameter = nn.Parameter((torch.randn(shape, generator=dice) * 0.1).to(device))
            members.append(Member(weight, parameter, Rule(True, 0.1 * (number % 2), 0.9 ** (2 - layer))))
    return members


def gradients(members: list[list[Member]], clips: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Give all the same gradients, step by step, with what they are clipped by and whether they are finite."""
    dice = torch.Generator().manual_seed(6)
    for clip in clips:
        for same in zip(*members, strict=True):
            slope = torch.randn(same[0][1].shape, generator=dice)
            slope[0, 0] = slope[0, 0] if math.isfinite(clip) else torch.inf
            for _, parameter, _ in same:
                parameter.grad = slope.to(parameter.device)
        device = members[-1][0][1].device
        yield torch.tensor(clip, device=device), torch.tensor(math.isfinite(clip), device=device)


def momentum_of(stack: Any) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = {}
    stack.read_momentum(found)
    return found


@pytest.mark.kernels
@pytest.mark.long
@pytest.mark.parametrize("sizes", [*SIZES[:3], on_gpu_only(SIZES[3])])
def test_muon_kernels_match_torch(sizes: tuple[int, ...]) -> None:
    """The same gradients through both, and the same steps back, thrice; and again, to the same bits."""
    fused = pytest.importorskip("textmill.engines.optimizers.muon_torch")
    heads, D, width, inner = sizes
    plain, ours, again = (two_layers(heads, D, width, inner, DEVICE) for _ in range(3))
    for numbers in ([0, 1, 4, 5], [2, 3, 6, 7]):  # attention's and the MLP's
        groups = [[members[number] for number in numbers] for members in (plain, ours, again)]
        old = Stack([matrix for member in groups[0] for matrix in matrices_of(*member)], MOMENTUM, compiled=False)
        old.precision = torch.bfloat16
        shape = tuple(old.momenta.shape[1:])
        new, twin = (fused.FusedStack(group, shape, MOMENTUM, MIN_NORM) for group in groups[1:])
        for clip, finite in gradients(groups, [0.3, math.nan] if INTERPRETED else [1.0, 0.3, math.nan]):
            with torch.no_grad():
                before = [values.clone() for values in (*new.parameters, *new.momenta.values())]
                wanted, found = old.update_momenta(clip, finite), new.update_momenta(clip, finite)
                assert torch.equal(found, twin.update_momenta(clip, finite))
                # Rounded twice, the norm a third time in torch's.
                torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-6)
                steps = orthogonalise(wanted)
                for stack in (old, new, twin):
                    stack.apply(steps, 0.02, 0.02 * ADAM_SCALE * math.sqrt(shape[1]), finite)
            moved = [
                not torch.equal(one, other)
                for one, other in zip((*new.parameters, *new.momenta.values()), before, strict=True)
            ]
            assert all(moved) if finite else not any(moved)
            for one, other, third in zip(
                [member[1] for member in groups[0]], new.parameters, twin.parameters, strict=True
            ):
                torch.testing.assert_close(other, one, rtol=1e-6, atol=5e-7)
                torch.testing.assert_close(momentum_of(new)[other], momentum_of(old)[one], rtol=1e-6, atol=1e-7)
                assert torch.equal(other, third)


@on_a_gpu
@pytest.mark.parametrize("clips", [[1.0], [1.0, math.nan, 0.3, 0.7]])
@pytest.mark.parametrize("sizes", SIZES)
def test_updates_on_a_gpu_equal_those_on_the_cpu(sizes: tuple[int, ...], clips: list[float]) -> None:
    """Products are bf16 there and fp32 here: fifteen in a row, each rounded by up to 2^-9, are 0.03."""
    heads, D, width, inner = sizes
    here, there = (two_layers(heads, D, width, inner, device) for device in ("cpu", GPU))
    first = [parameter.detach().clone() for _, parameter, _ in here]
    muons = [Muon(members, MOMENTUM, compiled=False) for members in (here, there)]
    for clip, finite in gradients([here, there], clips):
        muons[0].step(0.02, clip.cpu(), finite.cpu())
        muons[1].step(0.02, clip, finite)
    for (weight, one, _), (_, other, _), before in zip(here, there, first, strict=True):
        assert (other.detach().cpu() - one.detach()).norm() < 0.03 * (one.detach() - before).norm(), weight.name
        torch.testing.assert_close(
            muons[1].state()["momentum"][other].cpu(), muons[0].state()["momentum"][one], rtol=1e-5, atol=1e-6
        )


@on_a_gpu
@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_compiled_net_trains_like_the_cpu(micro_batch: int) -> None:
    """With one pass a step, and with two."""
    config = config_of("torch", optimizer="muon")
    engine = TorchEngine(device=GPU, precision="fp32", micro_batch=micro_batch, compile=True)
    here, there = started(config), started(config.model_copy(update={"engine": engine}))
    assert run(there, range(6)) == pytest.approx(run(here, range(6)), rel=1e-3)
    # Of the rest a gradient that is nothing but rounding moves AdamW as far as any other.
    matrices = "c_attn.weight", "c_proj.weight", "c_fc.weight"
    for (name, one), (same, other) in zip(
        [*here.weights(), *here.optimizer_state()], [*there.weights(), *there.optimizer_state()], strict=True
    ):
        assert (same, other.shape) == (name, one.shape)
        if name.endswith(matrices):
            assert np.linalg.norm(one - other) < 0.1 * np.linalg.norm(one), name
