"""Batches made beside training: the next ones are ready when the step before is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from textmill.tokens.batches.batch import Batch

DEPTH = 2


def ahead(batch_at: Callable[[int], Batch], start: int, stop: int) -> Iterator[tuple[int, Batch]]:
    """(step, batch) for each step, made by a thread that runs a few steps ahead."""
    with ThreadPoolExecutor(1, "batches") as pool:
        waiting: deque[Future[Batch]] = deque()
        try:
            for step in range(start, stop):
                while len(waiting) <= DEPTH and step + len(waiting) < stop:
                    waiting.append(pool.submit(batch_at, step + len(waiting)))
                yield step, waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
