"""Runners map a pure function over shards, locally or on Apache Beam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Protocol, Self, TypeVar

Shard = TypeVar("Shard")
Result = TypeVar("Result")


class Runner(Protocol):
    """Maps a pure, picklable function over shards; the function writes its files atomically.

    In a `with` block, the processes of one map are reused for the next.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Yield results in the order of the shards, as early as possible."""
        ...


def open_runner(config: Any) -> Runner:
    """Open the runner of the `runner` section: `new_runner` in runners/on_KIND.py."""
    runner: Runner = import_module(f"textmill.runners.on_{config.kind}").new_runner(config)
    return runner
