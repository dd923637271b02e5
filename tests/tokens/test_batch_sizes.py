"""A growing batch follows Megatron's rule at every step and keeps the order of samples."""

from __future__ import annotations

import numpy as np
import pytest

from textmill.tokens.batches.blend import BatchSizes


def megatron_size(consumed: int, batch: int, start: int, increment: int, samples: int) -> int:
    """The documented rule of Megatron's rampup-batch-size, with floating-point division."""
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
    sizes, consumed = BatchSizes(batch, [start, increment, samples]), 0
    for step in range(3 * samples // start + 5):
        assert (step, sizes.samples_before(step), sizes.size_at(step)) == (
            step,
            consumed,
            megatron_size(consumed, batch, start, increment, samples),
        )
        consumed += sizes.size_at(step)
    assert sizes.size_at(0) == start
    assert sizes.size_at(step) == batch
    assert len(sizes.phases) <= (batch - start) // increment + 1


@pytest.mark.parametrize("sizes", [BatchSizes(7), BatchSizes(32, [4, 4, 448]), BatchSizes(12, [3, 9, 7])])
def test_samples_in_steps(sizes: BatchSizes) -> None:
    """Compare with counting step by step."""
    ends = np.cumsum([sizes.size_at(step) for step in range(400)])
    for samples in range(1, 1000, 3):
        assert sizes.full_steps_in(samples) == np.searchsorted(ends, samples, side="right")
        assert sizes.steps_to_cover(samples) == np.searchsorted(ends, samples, side="left") + 1
