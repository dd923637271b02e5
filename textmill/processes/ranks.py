"""The ranks of a run: which one this process is, and how they exchange values and fail together."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

from textmill.errors import EXIT_BUG, EXIT_STOPPED, AlreadyReported, TextmillError

T = TypeVar("T")


class Ranks:
    """The processes of a run: here a single one, so that every exchange returns its own value; `TorchRanks` are
    several. All of them call each method in the same order; only `matmul_rate` waits for a GPU."""

    rank = 0
    world = 1

    @property
    def first(self) -> bool:
        """True on rank 0, which prints, locks the run folder and commits checkpoints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return self.all_reduce([int(flag)])[0] > 0

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Each number summed over all ranks, in double precision."""
        return list(values)

    def all_gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in order of rank."""
        return [value]

    def matmul_rate(self, seconds: float) -> float:
        """Matmuls per second on this process's device, measured for so long: how fast the device is now, next to those
        of other ranks."""
        return 0.0

    def new_group(self) -> Ranks:
        """The same ranks over a separate process group, for use in another thread."""
        return self

    def report_progress(self, place: str | None = None) -> None:
        """Report progress to the watchdog and, if given, where this process is, such as 'step 12'."""

    def under_watchdog(self, on_end: Callable[[str], None]) -> AbstractContextManager[None]:
        """While open, a rank that dies or hangs ends all; each prints its stack and calls `on_end` with the reason."""
        return nullcontext()

    def close(self) -> None:
        """Leave the process group."""


SINGLE_PROCESS = Ranks()


def run_on_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on one, it fails on all, and only one rank raises the error.

    `work` may call `gather_results`, which raises an error on its rank and AlreadyReported on the others. Only rank 0
    prints. An unexpected exception gets a note with the rank that it came from.
    """
    value = None
    failure = None
    try:
        with ExitStack() as silenced:
            if not ranks.first:
                silenced.enter_context(redirect_stdout(io.StringIO()))
                silenced.enter_context(redirect_stderr(io.StringIO()))
            value = work()
    except Exception as error:
        failure = error
        if ranks.world > 1 and not isinstance(error, TextmillError):
            error.add_note(f"textmill: this was rank {ranks.rank} of {ranks.world}; it ends the other ranks too")
    codes = ranks.all_gather(None if failure is None else getattr(failure, "exit_code", EXIT_BUG))
    knows = ranks.all_gather(failure is not None and not isinstance(failure, AlreadyReported))
    failed = [rank for rank, code in enumerate(codes) if code is not None]
    reporter = next((rank for rank in failed if knows[rank]), failed[0] if failed else None)
    if failure is not None and reporter == ranks.rank:
        raise failure
    if reporter is not None:
        raise AlreadyReported(codes[reporter])
    return value  # type: ignore[return-value]


def report_each(ranks: Ranks, items: Iterable[T]) -> Iterator[T]:
    """Yield the items and report progress at each, so that the watchdog does not take long work for a hang."""
    for item in items:
        ranks.report_progress()
        yield item


def gather_results(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank and return all results, in order of rank; if it fails on one, it fails on all."""
    value = None
    failure = None
    try:
        value = work()
    except BaseException as error:
        failure = error
    results = ranks.all_gather([value, failure is not None])
    if failure is not None:
        raise failure
    if any(failed for _, failed in results):
        raise AlreadyReported(EXIT_STOPPED)
    return [value for value, _ in results]
