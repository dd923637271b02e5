"""Ranks: the processes of one run, which of them this is, and what they agree on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, Protocol, TypeVar

from textmill.errors import EXIT_BUG, EXIT_STOPPED, AlreadyReported, TextmillError

T = TypeVar("T")


class Ranks(Protocol):
    """All processes call each method together, in the same order; none of them waits for a device."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        """Whether this is the one that prints, locks and commits."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any process."""
        ...

    def sums(self, values: Sequence[float]) -> list[float]:
        """Numbers, each summed over all processes in double precision."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The small JSON value of every process, by rank."""
        ...

    def barrier(self) -> None:
        """Wait for all."""
        ...

    def again(self) -> Ranks:
        """The same processes over a group of its own, for a thread of its own."""
        ...

    def at(self, place: str | None = None) -> None:
        """Say that this process moves, and the step that it is at, for the others to know if it never comes back."""
        ...

    def watched(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """While open, one that dies or hangs ends them all, with its rank and every other's stack; `leave` is told why before that."""
        ...

    def close(self) -> None:
        """Leave the others."""
        ...


class Alone:
    """One process, which agrees with itself."""

    rank, world, first = 0, 1, True

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag

    def sums(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        """The value."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def again(self) -> Alone:
        """Itself."""
        return self

    def at(self, place: str | None = None) -> None:
        """Nobody asks."""

    def watched(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Nobody to watch."""
        return nullcontext()

    def close(self) -> None:
        """Nobody to leave."""


ALONE = Alone()


def agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """What every process does, or none: an error of one ends all of them and is told once, as is all they say.

    One that nobody foresaw names the process it came from.
    """
    value, fault = None, None
    try:
        with ExitStack() as silent:
            if not ranks.first:
                silent.enter_context(redirect_stdout(io.StringIO()))
                silent.enter_context(redirect_stderr(io.StringIO()))
            value = work()
    except Exception as error:
        fault = error
        if ranks.world > 1 and not isinstance(error, TextmillError):
            error.add_note(f"textmill: this was rank {ranks.rank} of {ranks.world}, which ends the others")
    codes = ranks.gather(None if fault is None else getattr(fault, "exit_code", EXIT_BUG))
    teller = next((rank for rank, code in enumerate(codes) if code is not None), None)
    if fault is not None and teller == ranks.rank:
        raise fault
    if teller is not None:
        raise AlreadyReported(codes[teller])
    return value  # type: ignore[return-value]


def moving(ranks: Ranks, things: Iterable[T]) -> Iterator[T]:
    """The things, each of which is a move: long work is not a hang while they come."""
    for thing in things:
        ranks.at()
        yield thing


def together(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """What the work of each process gave, by rank; where one fails, all do, the others without a word of their own."""
    value, fault = None, None
    try:
        value = work()
    except BaseException as error:
        fault = error
    found = ranks.gather([value, fault is not None])
    if fault is not None:
        raise fault
    if any(failed for _, failed in found):
        raise AlreadyReported(EXIT_STOPPED)
    return [value for value, _ in found]
