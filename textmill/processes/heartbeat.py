"""Watch: a thread beside training that tells the other processes where this one is, and ends the job when one is gone or stuck."""

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
PULSE = 1.0
"""Seconds between two signs of life."""
GRACE = 3
"""Pulses for the others to tell where they are before the job ends."""
LEAVE = 10
"""Pulses that the first process, which may keep the board, waits for the others to be done."""
PATIENCE = 8
"""Pulses without a sign before a process counts as silent."""
START = 60.0
"""Seconds that a process has at least before its first step, where it loads more than it talks."""


class Board(Protocol):
    """Where the processes leave notes for one another; torch's stores are such."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Sign:
    """The last that was heard of a process."""

    pulse: int
    place: str
    """What it is at, such as step 12."""
    waits: str | None
    """The collective that its main thread waits in."""
    still: float
    """Seconds since it last moved."""


class Watch:
    """Ends this process with the stack of each thread when no process moves for `timeout` seconds, or when another process ends the job.

    `leave` is called with the verdict before that.
    """

    def __init__(self, rank: int, world: int, board: Board, timeout: float) -> None:
        self.rank, self.world, self.board, self.timeout = rank, world, board, timeout
        self.leave: Callable[[str], None] = lambda _: None
        self._place, self._since, self._pulse = "the start", time.monotonic(), 0
        self._limit = max(timeout, START)
        self._reason: str | None = None
        self._closed = threading.Event()
        self._main = threading.main_thread()
        self._beat()
        threading.Thread(target=self._watched, name="watch", daemon=True).start()

    def moved(self, place: str | None = None) -> None:
        """This process goes on; the step that its main thread is at now."""
        if place is not None:
            self._place, self._limit = place, self.timeout
        self._since = time.monotonic()

    def end(self, reason: str) -> None:
        """End the job from the main thread, which cannot go on, by what was just raised; never returns."""
        self._reason = reason
        # A launcher that sees one process die asks the others to go: first they say which one it was.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        while True:
            time.sleep(1)

    def close(self) -> None:
        """Nothing to watch any more; who may keep the board for all is the last to go."""
        try:
            self.board.set(f"done/{self.rank}", "")
            until = time.monotonic() + LEAVE * PULSE
            while (
                self.rank == 0
                and time.monotonic() < until
                and not self.board.check([f"done/{rank}" for rank in range(self.world)])
            ):
                time.sleep(PULSE / 20)
        except RuntimeError:
            pass  # the board has gone
        finally:
            self._closed.set()

    def _watched(self) -> None:
        """Look until it is closed, and take back the watchdog that each look sets; a watch that fails ends the job, which waits for it."""
        try:
            self._look()
        except Exception as error:
            self._finish(f"its own watch failed ({type(error).__name__}: {_first_line(error)})")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._closed.wait(PULSE):
            # Where even this thread cannot run, the interpreter's own watchdog speaks.
            faulthandler.dump_traceback_later(2 * self._limit + 10 * PULSE, exit=True, file=STDERR)
            try:
                self._beat()
                said = self.board.get("over").decode() if self.board.check(["over"]) else None
            except RuntimeError as error:
                if self._closed.wait(GRACE * PULSE):  # rank 0 was the first to be done
                    return
                self._finish(
                    f"the place where the processes meet is gone ({_first_line(error)}): rank 0 or its launcher has ended"
                )
                return
            if said or self._reason:
                self._finish(said or self._verdict())
                return
            if self._still() > self._limit and (verdict := self._verdict(moving=True)):
                self._reason = self._reason or f"nothing moved for {self._still():.0f} s"
                self._finish(verdict)
                return

    def _still(self) -> float:
        return time.monotonic() - self._since

    def _beat(self) -> None:
        self._pulse += 1
        self.board.set(f"sign/{self.rank}", json.dumps([self._pulse, self._place, waits_in(self._main), self._still()]))

    def _sign_of(self, rank: int) -> Sign | None:
        key = f"sign/{rank}"
        return Sign(*json.loads(self.board.get(key))) if self.board.check([key]) else None

    def _verdict(self, moving: bool = False) -> str:
        """Who is to blame, from two looks at every process; nobody, if it matters whether one is still `moving`, as one that saves is."""
        try:
            before = [self._sign_of(rank) for rank in range(self.world)]
            for _ in range(PATIENCE):
                time.sleep(PULSE)
                self._beat()
                now = [self._sign_of(rank) for rank in range(self.world)]
                if moving and any_moves(before, now, self._limit):
                    return ""
                if not silent_in(before, now):
                    break
            return verdict_of(before, now)
        except RuntimeError as error:
            return f"rank 0 or its launcher has ended ({_first_line(error)})"

    def _finish(self, verdict: str) -> None:
        """Say where this process is, let the others do so, and end."""
        try:
            waits, reason = waits_in(self._main), self._reason or "another process ends the job"
            where = f"{self._place}, waiting in {waits}" if waits else self._place
            print(f"textmill: rank {self.rank}: in {where}: {reason}; {verdict}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            self.leave(verdict)
            self.board.set("over", verdict)
            time.sleep(GRACE * PULSE)
        finally:
            os._exit(EXIT_STOPPED)


def silent_in(before: list[Sign | None], now: list[Sign | None]) -> dict[int, Sign | None]:
    """The processes that gave no sign between two looks."""
    pairs = enumerate(zip(before, now, strict=True))
    return {rank: new for rank, (old, new) in pairs if new is None or (old is not None and old.pulse == new.pulse)}


def any_moves(before: list[Sign | None], now: list[Sign | None], limit: float) -> bool:
    """Whether a process that gave a sign between two looks has moved within so many seconds."""
    pairs = zip(before, now, strict=True)
    return any(new is not None and new.still < limit and (old is None or old.pulse != new.pulse) for old, new in pairs)


def verdict_of(before: list[Sign | None], now: list[Sign | None]) -> str:
    """Whom the others wait for: those that are silent, else those that take no part in what the others wait in."""
    if silent := silent_in(before, now):
        places = [
            f"rank {rank} ({f'last seen in {sign.place}' if sign else 'never seen'})" for rank, sign in silent.items()
        ]
        return f"silent, so dead, stopped or cut off: {', '.join(places)}"
    idle = [
        f"rank {rank} (in {sign.place})" for rank, sign in enumerate(now) if sign is not None and sign.waits is None
    ]
    if idle and len(idle) < len(now):
        return f"the others wait for {', '.join(idle)}"
    return "all processes wait for one another: a network that is lost, or a collective that not all have come to"


def waits_in(thread: threading.Thread) -> str | None:
    """The collective that a thread waits in, read from its stack."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or -1)
    collective = None
    while frame is not None:
        path, place = Path(frame.f_code.co_filename), f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
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
