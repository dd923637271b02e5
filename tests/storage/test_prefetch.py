"""Prefetched results come in order, at most `depth` ahead, and an error is raised when its result is taken."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.waiting import LONGEST
from textmill.storage.prefetch import prefetch


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_order(threads: int) -> None:
    def slow_for_even(one: int) -> int:
        time.sleep(0.01 * (one % 2 == 0))
        return one * one

    assert list(prefetch(slow_for_even, range(3, 20), threads=threads, depth=threads)) == [
        (one, one * one) for one in range(3, 20)
    ]


def test_no_more_than_depth_results_are_computed_ahead() -> None:
    computed: list[int] = []
    taken = prefetch(lambda one: computed.append(one), iter(range(1000)), threads=4, depth=3)
    next(taken)
    taken.close()
    assert sorted(computed) == list(range(len(computed)))
    assert len(computed) <= 4


def test_threads_run_concurrently() -> None:
    together = threading.Barrier(3, timeout=LONGEST)
    assert [one for one, _ in prefetch(lambda one: together.wait(), range(3), threads=3, depth=3)] == [0, 1, 2]


def test_an_error_is_raised_when_its_result_is_taken() -> None:
    taken = prefetch(lambda one: 1 // one, [2, 1, 0, 3])
    assert [next(taken), next(taken)] == [(2, 0), (1, 1)]
    with pytest.raises(ZeroDivisionError):
        next(taken)
