"""Functions for worker processes, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from textmill.errors import TextmillError


def double(shard: int) -> int:
    return 2 * shard


def double_slowest_first(shard: int) -> int:
    time.sleep(0.2 if shard == 0 else 0)
    return 2 * shard


def process_of(shard: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def process_of_each(shard: tuple[int, str]) -> int:
    """Waits for the other of two shards, so that each runs in its own process."""
    number, folder = shard
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / str(number)).touch()
    end = time.monotonic() + 120
    while not (Path(folder) / str(1 - number)).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return os.getpid()


def refuse_three(shard: int) -> int:
    if shard == 3:
        raise TextmillError("shard 3: found nothing; look again")
    return shard


def die_once(shard: tuple[int, str]) -> int:
    """Kills its own process on the first call for shard 2."""
    number, folder = shard
    mark = Path(folder) / f"died-{number}"
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_always(shard: int) -> int:
    if shard == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def sleep_long(shard: tuple[int, str]) -> int:
    number, folder = shard
    (Path(folder) / f"pid-{number}-{os.getpid()}").touch()
    if number:
        time.sleep(600)
        (Path(folder) / f"slept-{number}").touch()
    return number


def break_once(shard: tuple[int, str]) -> int:
    """Fails like a lost disk on the first call for shard 2, and records every call."""
    number, folder = shard
    calls = Path(folder) / f"calls-{number}"
    before = len(calls.read_text()) if calls.exists() else 0
    calls.write_text("x" * (before + 1))
    if number == 2 and not before:
        raise OSError("shard 2: the disk went away")
    return number


class DieOnArrival:
    """A function that kills the first Beam worker that receives it, before the worker starts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        mark = Path(self.folder) / "died-on-arrival"
        if "sdk_worker_main" in sys.argv[0] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, shard: int) -> int:
        return 2 * shard
