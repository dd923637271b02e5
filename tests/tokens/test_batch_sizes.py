"""A batch that grows: Megatron's rule at every step, and an order of samples that it does not break."""

from __future__ import annotations

import numpy as np
import pytest

from textmill.tokens.batches.batch_sizes import Sizes


def megatron_size(consumed: int, batch: int, start: int, increment: int, samples: int) -> int:
    """The rule of Megatron's rampup-batch-size as it is described, its division in floating point."""
    rises = (batch - start) // increment
    if consumed > samples:
        return batch
    return start + int(consumed / (samples / rises)) * increment


@pytest.mark.parametrize(
    ("batch", "start", "increment", "samples"),
    [
        (32, 4, 4, 448),
        (32, 8, 8, 100),
        (16, 1, 1, 1000),
        (12, 3, 9, 7),
        (64, 16, 16, 1),
        (40, 4, 6, 333),
        (8, 2, 3, 64),
        (512, 32, 32, 9000),
    ],
)
def test_every_step_has_megatrons_size(batch: int, start: int, increment: int, samples: int) -> None:
    sizes, consumed = Sizes(batch, [start, increment, samples]), 0
    for step in range(3 * samples // start + 5):
        assert (step, sizes.before(step), sizes.at(step)) == (
            step,
            consumed,
            megatron_size(consumed, batch, start, increment, samples),
        )
        consumed += sizes.at(step)
    assert sizes.at(0) == start
    assert sizes.at(step) == batch
    assert len(sizes.stretches) <= (batch - start) // increment + 1


@pytest.mark.parametrize("sizes", [Sizes(7), Sizes(32, [4, 4, 448]), Sizes(12, [3, 9, 7])])
def test_samples_in_steps(sizes: Sizes) -> None:
    """Against counting."""
    ends = np.cumsum([sizes.at(step) for step in range(400)])
    for samples in range(1, 1000, 3):
        assert sizes.steps_in(samples) == np.searchsorted(ends, samples, side="right")
        assert sizes.steps_over(samples) == np.searchsorted(ends, samples, side="left") + 1
