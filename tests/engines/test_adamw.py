"""AdamW moves parameters as torch's own does in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.kernel_devices import DEVICES
from textmill.config import TrainConfig
from textmill.engines.optimizers import AdamW, Member
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

WEIGHT = Weight("any", (1,))
SIZES = ((3,), (70, 130), (5000,), (2, 4096))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)], ids=str)
def test_updates_match_torch(betas: tuple[float, float], device: str) -> None:
    """Groups with rates and decays of their own, gradients that are too large by a scale, an update that is skipped,
    and going on."""
    dice, train = torch.Generator().manual_seed(1), TrainConfig(betas=list(betas), epsilon=1e-8)
    exact = [nn.Parameter(torch.randn(size, generator=dice, dtype=torch.float64)) for size in SIZES]
    ours = [nn.Parameter(parameter.detach().float().to(device)) for parameter in exact]
    rules = [Rule(trained=True, rate=1.0 + number % 2, decay=0.1 * (number > 1)) for number in range(len(SIZES))]
    members = [Member(WEIGHT, *one) for one in zip(ours, rules, strict=True)]
    adam, done = AdamW(members, train), torch.zeros((), dtype=torch.int64, device=device)
    groups = [
        {"params": [one], "lr": 0.01 * rule.rate, "weight_decay": rule.decay}
        for one, rule in zip(exact, rules, strict=True)
    ]
    oracle = torch.optim.AdamW(groups, betas=betas, eps=1e-8)
    for step in range(6):
        skipped = step == 2
        for parameter, right in zip(ours, exact, strict=True):
            gradient = torch.randn(right.shape, generator=dice, dtype=torch.float64)
            right.grad = None if skipped else gradient
            parameter.grad = (8 * gradient).float().to(device) * (float("nan") if skipped else 1)
        adam.step(0.01, torch.tensor(1 / 8, device=device), torch.tensor(not skipped, device=device), done)
        done += not skipped
        if not skipped:
            oracle.step()
        if step == 3:  # another begins where the first one was
            other = AdamW(members, train)
            for parameter in ours:
                for name, state in adam.state().items():
                    other.load_state(name, parameter, state[parameter])
            adam = other
    for parameter, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(parameter.detach().cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_adam_without_parameters_does_nothing(device: str) -> None:
    """As where Muon has all that is trained."""
    AdamW([], TrainConfig()).step(0.1, torch.ones((), device=device), *torch.ones(2, device=device).bool())
