"""Runners map a pure function over shards, locally or on Apache Beam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from multiprocessing import current_process
from typing import Any, Protocol, Self, TypeVar

from textmill.errors import TextmillError

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
    if getattr(current_process(), "_inheriting", False):
        raise TextmillError(
            "a worker process tried to start workers while importing your script; "
            "put the call under: if __name__ == '__main__':"
        )
    runner: Runner = import_module(f"textmill.runners.on_{config.kind}").new_runner(config)
    return runner
