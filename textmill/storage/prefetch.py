"""Prefetching: threads compute the next items while the caller uses the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int = 1, depth: int = 2
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, work(item)) in order; at most `depth` further results are computed ahead."""
    with ThreadPoolExecutor(threads, "prefetch") as pool:
        pending: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                pending.append((item, pool.submit(work, item)))
                if len(pending) > depth:
                    yield _wait_for(*pending.popleft())
            while pending:
                yield _wait_for(*pending.popleft())
        finally:
            for _, future in pending:
                future.cancel()


def _wait_for(item: Item, future: Future[Result]) -> tuple[Item, Result]:
    return item, future.result()
