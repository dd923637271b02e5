"""Batch size and blend changed in mid-run: every store gives its samples in order, none twice, none left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.blend import DataRange, sizes_of
from textmill.tokens.batches.loader import Batches


class Numbers:
    """A layout whose samples are (store, number of the sample)."""

    samples_per_epoch = 10
    store: Any = SimpleNamespace(check_mapped=lambda: None)

    def __init__(self, name: str) -> None:
        self.name = name

    def build_samples(self, samples: NDArray[np.int64]) -> Batch:
        rows = np.stack([np.full(len(samples), ord(self.name)), samples], axis=1).astype(np.int32)
        return Batch(rows, rows, samples)

    def find_documents(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        raise NotImplementedError


def batches_of(ranges: list[DataRange]) -> Batches:
    return Batches([Numbers(name) for name, _ in ranges[-1].sources], ranges)


RAMPS = st.one_of(st.just([]), st.tuples(st.just(1), st.just(1), st.integers(1, 60)).map(list))
BLENDS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 3.0, 0.5]), min_size=1, max_size=3)
RANGES = st.lists(st.tuples(st.integers(1, 9), st.integers(2, 7), RAMPS, BLENDS), min_size=1, max_size=4)


@given(RANGES)
@settings(max_examples=30, deadline=None)
def test_each_store_gives_its_samples_in_order_and_once(found: list[tuple[int, int, list[int], Any]]) -> None:
    step, ranges = 0, []
    for steps, batch, ramp, blend in found:
        ranges.append(DataRange(step, batch, ramp, sorted(blend.items())))
        step += steps
    seen: dict[str, list[int]] = {}
    position = 0
    for number, (steps, batch, ramp, blend) in enumerate(found):
        batches = batches_of(ranges[: number + 1])  # as the process after the change opens them
        given_in_range = dict.fromkeys(blend, 0)
        for one in range(ranges[number].step, ranges[number].step + steps):
            rows = batches.batch_at(one)
            assert len(rows.inputs) <= batch
            assert ramp or len(rows.inputs) == batch
            assert rows.samples.tolist() == list(range(position, position + len(rows.inputs)))
            position += len(rows.inputs)
            for store, sample in rows.inputs.tolist():
                seen.setdefault(chr(store), []).append(sample)
                given_in_range[chr(store)] += 1
        if number == 0 or ranges[number].sources != ranges[number - 1].sources:
            total, count = sum(blend.values()), sum(given_in_range.values())
            assert all(abs(given_in_range[name] - count * blend[name] / total) < 2 for name in blend)
    for name, samples in seen.items():
        assert samples == list(range(len(samples))), f"store {name} skipped or repeated a sample"


def test_earlier_steps_of_a_changed_run_are_as_they_were() -> None:
    first = DataRange(0, 4, [], [("a", 1.0), ("b", 3.0)])
    both = [first, DataRange(5, 6, [], [("b", 1.0), ("a", 1.0)])]
    before, after = batches_of([first]), batches_of(both)
    for step in range(5):
        assert (before.batch_at(step).inputs == after.batch_at(step).inputs).all()
    removed = batches_of([first, DataRange(5, 4, [], [("b", 1.0)])])
    assert removed.batch_at(5).inputs[:, 1].tolist() == [15, 16, 17, 18]  # b gave 15 of the first 20 samples
    with pytest.raises(TextmillError, match=r"a token store that tokens\.use no longer names"):
        removed.batch_at(0)


def test_a_ramp_up_goes_on_from_the_samples_seen() -> None:
    sizes = sizes_of([DataRange(0, 8, [], [("a", 1.0)]), DataRange(3, 6, [2, 2, 48], [("a", 1.0)])])
    # 24 samples are seen when the ramp-up from 2 to 6 over 48 samples begins: it is at its first increase.
    assert [sizes.size_at(step) for step in range(3, 10)] == [4] * 6 + [6]
    assert sizes.samples_before(9) == 48
