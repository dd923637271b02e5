"""Where data work runs: a Runner maps a pure function over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Protocol, Self, TypeVar

Shard = TypeVar("Shard")
Result = TypeVar("Result")


class Runner(Protocol):
    """Maps a pure, picklable function over shards; the function writes its own files whole or not at all.

    In a `with` block what one map has started is kept for the next, and ended with the block.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Results in the order of the shards, each as soon as it and all before it are there."""
        ...


def open_runner(config: Any) -> Runner:
    """The runner that the `runner` section names: runners/on_KIND.py has new_runner."""
    runner: Runner = import_module(f"textmill.runners.on_{config.kind}").new_runner(config)
    return runner
