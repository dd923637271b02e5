"""Runners map a pure function over shards, locally or on Apache Beam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from multiprocessing import current_process
from typing import Any, Protocol, Self, TypeVar

from textmill.errors import TextmillError

Shard = TypeVar("Shard")
Result = TypeVar("Result")


class Runner(Protocol):
    """Maps a pure, picklable function over shards; the function writes its files atomically.

    In a `with` block, which may be inside another, the processes of one map are reused for the next.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Yield results in the order of the shards, as early as possible."""
        ...


_shared: ContextVar[tuple[Any, Runner] | None] = ContextVar("_shared", default=None)
"""The settings and the runner of `share_runner`."""


@contextmanager
def share_runner(config: Any) -> Iterator[None]:
    """In this block all stages use one runner: starting its processes takes seconds on a machine with many cores."""
    with open_runner(config) as runner:
        token = _shared.set((config, runner))
        try:
            yield
        finally:
            _shared.reset(token)


def open_runner(config: Any) -> Runner:
    """Open the runner of the `runner` section, `new_runner` in runners/on_KIND.py, or use the shared one."""
    if getattr(current_process(), "_inheriting", False):
        raise TextmillError(
            "a worker process tried to start workers while importing your script; "
            "put the call under: if __name__ == '__main__':"
        )
    shared = _shared.get()
    if shared is not None and shared[0] == config:
        return shared[1]
    runner: Runner = import_module(f"textmill.runners.on_{config.kind}").new_runner(config)
    return runner
