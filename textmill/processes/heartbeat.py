"""A watchdog thread in every process of a run: it sends heartbeats and ends the job when a process dies or hangs."""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from textmill.errors import EXIT_STOPPED

STDERR = 2
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
GRACE_BEATS = 3
"""Beats that the other ranks have to print their own report before the job ends."""
EXIT_WAIT_BEATS = 10
"""Beats that rank 0, which may host the status store, waits at the end for the other ranks to finish."""
SILENT_BEATS = 8
"""Beats without a heartbeat after which a process counts as silent."""
START = "the start"
"""The place of a process before its first step."""
START_SECONDS = 60.0
"""Lowest timeout until the first step is done, while some process may still load files and rarely report progress."""


class StatusStore(Protocol):
    """A key-value store that all processes share; torch's distributed stores fit."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Heartbeat:
    """The last status that a process wrote."""

    beat: int
    """Counts up with every heartbeat."""
    place: str
    """Where the process is, such as 'step 12'."""
    collective: str | None
    """The collective that its main thread waits in, if it waits in one."""
    idle_seconds: float
    """Seconds since it last reported progress."""


class Watchdog:
    """Ends this process when no rank makes progress for `timeout` seconds, or when another rank ends the job.

    Before that it prints the stack of each thread and calls `on_end` with the verdict.
    """

    def __init__(self, rank: int, world: int, store: StatusStore, timeout: float) -> None:
        self.rank = rank
        self.world = world
        self.store = store
        self.timeout = timeout
        self.on_end: Callable[[str], None] = lambda _: None
        self._place, self._progress_time, self._beats = START, time.monotonic(), 0
        self._current_timeout = max(timeout, START_SECONDS)
        self._reason: str | None = None
        self._closed = threading.Event()
        self._main_thread = threading.main_thread()
        self._send()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def report_progress(self, place: str | None = None) -> None:
        """Record that this process makes progress and, if given, where it is now."""
        if place is not None:
            if self._place != START:  # a step is done, in which this rank waited for all others to leave the start
                self._current_timeout = self.timeout
            self._place = place
        self._progress_time = time.monotonic()

    def end_job(self, reason: str) -> None:
        """End the job because of the exception just caught in the main thread; never returns."""
        self._reason = reason
        # A launcher that sees one process die sends SIGTERM to the rest: they must still name the rank at fault.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        while True:
            time.sleep(1)

    def close(self) -> None:
        """Stop watching; rank 0 may host the status store, so it waits for the others and exits last."""
        try:
            self.store.set(f"done/{self.rank}", "")
            deadline = time.monotonic() + EXIT_WAIT_BEATS * BEAT_SECONDS
            all_done = [f"done/{rank}" for rank in range(self.world)]
            while self.rank == 0 and time.monotonic() < deadline and not self.store.check(all_done):
                time.sleep(BEAT_SECONDS / 20)
        except RuntimeError:
            pass  # the process that hosts the store has ended
        finally:
            self._closed.set()

    def _run(self) -> None:
        """The watchdog's thread; if the watchdog itself fails, it ends the job, since `end_job` waits for it."""
        try:
            self._watch()
        except Exception as error:
            self._end(f"the watchdog itself failed ({type(error).__name__}: {_first_line(error)})")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            # If even this thread cannot run (the GIL is held), the interpreter's own watchdog ends the process.
            faulthandler.dump_traceback_later(2 * self._current_timeout + 10 * BEAT_SECONDS, exit=True, file=STDERR)
            try:
                self._send()
                verdict = self._read_verdict()
            except RuntimeError as error:
                if self._closed.wait(GRACE_BEATS * BEAT_SECONDS):  # rank 0 finished before this rank did
                    return
                self._end(f"lost the status store ({_first_line(error)}): rank 0 or its launcher has ended")
                return
            if verdict or self._reason:
                self._end(verdict or self._find_verdict())
                return
            if self._idle_seconds() > self._current_timeout and (verdict := self._find_verdict(unless_progress=True)):
                self._reason = self._reason or f"no progress for {self._idle_seconds():.0f} s"
                self._end(verdict)
                return

    def _idle_seconds(self) -> float:
        return time.monotonic() - self._progress_time

    def _send(self) -> None:
        self._beats += 1
        status = [self._beats, self._place, find_collective(self._main_thread), self._idle_seconds()]
        self.store.set(f"heartbeat/{self.rank}", json.dumps(status))

    def _read_heartbeats(self) -> list[Heartbeat | None]:
        keys = [f"heartbeat/{rank}" for rank in range(self.world)]
        return [Heartbeat(*json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _read_verdict(self) -> str:
        """The verdict of another rank that ends the job; empty if there is none."""
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else ""

    def _find_verdict(self, unless_progress: bool = False) -> str:
        """Which rank is at fault, from two reads of all heartbeats.

        With `unless_progress` it is empty when any rank still makes progress, such as one that saves.
        """
        try:
            before = self._read_heartbeats()
            for _ in range(SILENT_BEATS):
                time.sleep(BEAT_SECONDS)
                self._send()
                if verdict := self._read_verdict():  # a rank that ends the job sends no more heartbeats
                    return verdict
                now = self._read_heartbeats()
                if unless_progress and any_progress(before, now, self._current_timeout):
                    return ""
                if not find_silent(before, now):
                    break
            return diagnose(before, now)
        except RuntimeError as error:
            return f"rank 0 or its launcher has ended ({_first_line(error)})"

    def _end(self, verdict: str) -> None:
        """Print where this process is, give the other ranks time to do the same, and exit."""
        try:
            collective = find_collective(self._main_thread)
            reason = self._reason or "another rank ends the job"
            where = f"{self._place}, waiting in {collective}" if collective else self._place
            print(f"textmill: rank {self.rank}: in {where}: {reason}; {verdict}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            self.on_end(verdict)
            self.store.set("verdict", verdict)
            time.sleep(GRACE_BEATS * BEAT_SECONDS)
        finally:
            os._exit(EXIT_STOPPED)


def find_silent(before: list[Heartbeat | None], now: list[Heartbeat | None]) -> dict[int, Heartbeat | None]:
    """The ranks that sent no heartbeat between two reads."""
    pairs = enumerate(zip(before, now, strict=True))
    return {rank: new for rank, (old, new) in pairs if new is None or (old is not None and old.beat == new.beat)}


def any_progress(before: list[Heartbeat | None], now: list[Heartbeat | None], timeout: float) -> bool:
    """Whether any rank that sent a heartbeat between two reads made progress within `timeout` seconds."""
    return any(
        new is not None and new.idle_seconds < timeout and (old is None or old.beat != new.beat)
        for old, new in zip(before, now, strict=True)
    )


def diagnose(before: list[Heartbeat | None], now: list[Heartbeat | None]) -> str:
    """Which ranks block the others: those without a heartbeat, else those that wait in no collective."""
    if silent := find_silent(before, now):
        places = [
            f"rank {rank} ({f'last seen in {last.place}' if last else 'never seen'})" for rank, last in silent.items()
        ]
        return f"no heartbeat (dead, stopped or cut off): {', '.join(places)}"
    missing = [f"rank {rank} (in {one.place})" for rank, one in enumerate(now) if one and one.collective is None]
    if missing and len(missing) < len(now):
        return f"the other ranks wait for {', '.join(missing)}"
    return "deadlock: all ranks wait for one another; the network is down, or not all ranks called the same collective"


def find_collective(thread: threading.Thread) -> str | None:
    """The collective that a thread waits in, read from its stack."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or -1)
    collective = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        place = f"{path.name}:{frame.f_lineno}"
        if path.parts[-3:-1] == ("torch", "distributed"):
            collective = frame.f_code.co_name if path.name == "distributed_c10d.py" else collective
        elif collective:
            return f"{collective} ({place})"
        elif ".wait()" in (line := linecache.getline(str(path), frame.f_lineno or 0)):
            return f"{line.strip()} ({place})"
        frame = frame.f_back
    return collective


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
