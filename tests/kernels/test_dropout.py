"""Dropout is a hash of counters: the fraction of zeros, independence, and the same zeros in every slice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from textmill.kernels.dropout_torch import drop, dropout_keys

SAMPLES = np.arange(8)


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_fraction_and_the_scale(fraction: float) -> None:
    x = torch.ones(8, 64, 512)
    dropped = drop(x, fraction, dropout_keys(1, 2, SAMPLES), 3)
    zeros = (dropped == 0).float()
    spread = 4 * (fraction * (1 - fraction) / x.numel()) ** 0.5
    assert abs(float(zeros.mean()) - fraction) < spread
    assert dropped[dropped != 0].unique() == pytest.approx(1 / (1 - fraction))
    for axis in (0, 1, 2):
        others = tuple(set(range(3)) - {axis})
        assert (
            float((zeros.mean(others) - fraction).abs().max())
            < 6 * (fraction * (1 - fraction) * x.shape[axis] / x.numel()) ** 0.5
        )


def test_neighbours_are_independent() -> None:
    zeros = (drop(torch.ones(8, 64, 512), 0.5, dropout_keys(1, 2, SAMPLES), 3) == 0).float() - 0.5
    for axis in (0, 1, 2):
        pairs = zeros.narrow(axis, 0, zeros.shape[axis] - 1) * zeros.narrow(axis, 1, zeros.shape[axis] - 1)
        assert abs(float(pairs.mean()) * 4) < 0.02


def test_a_slice_of_the_batch_drops_the_same() -> None:
    x, keys = torch.randn(8, 5, 6), dropout_keys(1, 2, SAMPLES)
    whole = drop(x, 0.3, keys, 1)
    assert torch.equal(drop(x[3:6], 0.3, keys[3:6], 1), whole[3:6])
    assert torch.equal(dropout_keys(1, 2, SAMPLES[3:6]), keys[3:6])


def test_a_slice_of_the_columns_drops_the_same() -> None:
    x, keys = torch.randn(8, 5, 6), dropout_keys(1, 2, SAMPLES)
    whole = drop(x, 0.3, keys, 1)
    for number, part in enumerate(x.chunk(3, -1)):
        assert torch.equal(drop(part, 0.3, keys, 1, columns=(number, 3)), whole.chunk(3, -1)[number])


def test_seed_step_and_site_matter() -> None:
    x = torch.ones(8, 16, 16)
    base = drop(x, 0.5, dropout_keys(1, 2, SAMPLES), 1)
    for keys, site in (
        (dropout_keys(2, 2, SAMPLES), 1),
        (dropout_keys(1, 3, SAMPLES), 1),
        (dropout_keys(1, 2, SAMPLES), 2),
    ):
        agreement = float((drop(x, 0.5, keys, site) == base).float().mean())
        assert 0.45 < agreement < 0.55


def test_without_keys_nothing_is_dropped() -> None:
    x = torch.randn(2, 3)
    assert drop(x, 0.5, None, 0) is x
