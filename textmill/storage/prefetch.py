"""Work done by threads ahead of whoever takes it: the next pieces are ready when they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def ahead(
    work: Callable[[Given], Made], given: Iterable[Given], *, threads: int = 1, depth: int = 2
) -> Iterator[tuple[Given, Made]]:
    """(one, what work makes of it) for each, in order; at most `depth` wait while one is taken."""
    with ThreadPoolExecutor(threads, "ahead") as pool:
        waiting: deque[tuple[Given, Future[Made]]] = deque()
        try:
            for one in given:
                waiting.append((one, pool.submit(work, one)))
                if len(waiting) > depth:
                    yield _done(*waiting.popleft())
            while waiting:
                yield _done(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def _done(one: Given, future: Future[Made]) -> tuple[Given, Made]:
    return one, future.result()
