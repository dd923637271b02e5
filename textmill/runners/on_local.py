"""Run shards in local processes; a killed worker is replaced, and no worker outlives its parent."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import connection, get_context
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, Self

from textmill.errors import TextmillError
from textmill.runners import Result, Shard

if TYPE_CHECKING:  # each worker imports this file, and the config takes longer than all the rest
    from textmill.config import LocalRunner

POLL_SECONDS = 1.0
"""The main thread receives signals only between waits, so it never waits longer than this."""
SHARDS_PER_WORKER = 4
"""Shards in flight per worker: enough to keep all workers busy, few enough for any number of shards."""
MAX_CRASHES = 2
"""Crashes of one shard on its own before the map fails."""


def new_runner(config: LocalRunner) -> ProcessRunner:
    """The runner of `runner.kind: local`."""
    return ProcessRunner(usable_cores() if config.workers == "auto" else config.workers)


def usable_cores() -> int:
    """The number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class ProcessRunner:
    """Maps over shards with `workers` processes.

    With one worker, or a single shard and no running pool, the work is done in this process.
    """

    workers: int
    _idle_pool: _Pool | None = field(default=None, init=False, repr=False)
    """The pool that waits for the next map."""
    _blocks: int = field(default=0, init=False, repr=False)
    """`with` blocks that are open, one inside another."""

    def __enter__(self) -> Self:
        """Keep the processes of one map for the next: starting one takes a second."""
        self._blocks += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._blocks -= 1
        if self._idle_pool and not self._blocks:
            self._idle_pool.stop()
            self._idle_pool = None

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Yield results in the order of the shards, as early as possible."""
        stream = iter(shards)
        first = list(islice(stream, min(self.workers, 2)))
        if not first or (len(first) == 1 and not self._idle_pool):
            yield from map(function, chain(first, stream))
            return
        pool = self._idle_pool or _Pool(self.workers)
        self._idle_pool = None
        shard_map = _ShardMap(function, self.workers, pool)
        yield from shard_map.results(chain(first, stream))
        if self._blocks and not self._idle_pool:
            self._idle_pool = shard_map.pool
        else:
            shard_map.pool.finish()


class _ShardMap(Generic[Shard, Result]):
    """One map: the shards in flight, and recovery when a worker dies; the caller owns the pool afterwards."""

    def __init__(self, function: Callable[[Shard], Result], workers: int, pool: _Pool) -> None:
        self.function = function
        self.workers = workers
        self.in_flight: deque[tuple[Shard, Future[Result]]] = deque()
        self.pool = pool

    def results(self, shards: Iterator[Shard]) -> Iterator[Result]:
        try:
            while self._fill(shards):
                shard, future = self.in_flight.popleft()
                try:
                    result = _wait_for_result(future)
                except (BrokenProcessPool, CancelledError):
                    self.pool.stop()
                    result = self._run_alone(shard)
                yield result
        except BaseException:  # also when the caller stops iterating
            self.pool.stop()
            raise

    def _fill(self, shards: Iterator[Shard]) -> bool:
        """Submit shards; after a crash only when no shard of before is left, in a new pool."""
        if self.pool.is_stopped and not self.in_flight:
            self.pool = _Pool(self.workers)
        if not self.pool.is_stopped:
            for shard in islice(shards, SHARDS_PER_WORKER * self.workers - len(self.in_flight)):
                self.in_flight.append((shard, self.pool.submit(self.function, shard)))
        return bool(self.in_flight)

    def _run_alone(self, shard: Shard) -> Result:
        """The result of a shard that was in flight when a worker died, which may have killed it."""
        for _ in range(MAX_CRASHES):
            pool = _Pool(1)
            try:
                result: Result = _wait_for_result(pool.submit(self.function, shard))
                return result
            except BrokenProcessPool:
                continue
            finally:
                pool.stop()
        raise TextmillError(
            f"runner: the worker died on {shard!r}, even when it ran alone (killed, or out of memory?); "
            "use a machine with more memory, or remove that input"
        )


def _wait_for_result(future: Future[Result]) -> Result:
    """Wait for a result in short steps: Ctrl-C may be delivered to another thread, which does not wake this one."""
    while not future.done():
        wait([future], timeout=POLL_SECONDS)
    return future.result()


class _Pool:
    """A pool of worker processes, started on demand.

    The workers exit when this process closes its end of a pipe, or exits itself.
    """

    def __init__(self, workers: int) -> None:
        context = get_context("spawn")  # fork copies locks that another thread may hold
        self._reader, self._writer = context.Pipe(duplex=False)
        self.is_stopped = False
        self._executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(self._reader,))

    def submit(self, function: Callable[[Any], Any], shard: Any) -> Future[Any]:
        try:
            return self._executor.submit(function, shard)
        except BrokenProcessPool as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def finish(self) -> None:
        """Stop the workers after they finish their work."""
        self._executor.shutdown(wait=True)
        self.stop()

    def stop(self) -> None:
        """Stop the workers immediately."""
        self.is_stopped = True
        self._writer.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


def _start_worker(reader: connection.Connection) -> None:
    # Ctrl-C and the end of a terminal reach all processes of the group; only the parent handles them.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=end_with_parent, args=(reader,), daemon=True).start()


def end_with_parent(reader: connection.Connection) -> None:
    """Exit when the parent closes its end of the pipe, or exits itself."""
    connection.wait([reader])  # nothing is ever sent; wait returns when the other end is closed
    os._exit(1)
