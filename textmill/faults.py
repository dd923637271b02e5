"""Faults on purpose: TEXTMILL_FAULT says what is to break and where, so that a promise is tried on the product itself.

    kill@disk:7        die as by SIGKILL before the 7th write, fsync, rename or removal
    full@disk:7        from the 7th on, what is written or synced finds the disk full
    kill@step:5:1      rank 1 dies before step 5; stop: it is stopped as by SIGSTOP; hang: it waits for ever
    spike@step:5:1     the labels of rank 1 are garbage in step 5
    nan@step:5:1       a gradient of rank 1 is not a number in step 5, on the torch engine
    flip@step:5:1      one bit of a weight flips on rank 1 before step 5, on the torch engine

Several are parted by commas; steps count from 0, and a rank that is not said is 0. Without the variable nothing is looked at.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Literal

from textmill.errors import TextmillError

VARIABLE = "TEXTMILL_FAULT"
SPELLING = re.compile(r"(kill|full)@(disk):(\d+)|(kill|stop|hang|spike|nan|flip)@(step):(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class Fault:
    """One thing that breaks."""

    what: str
    where: str
    number: int
    rank: int


def parse(text: str) -> list[Fault]:
    """The faults that a text names."""
    faults = []
    for word in filter(None, text.split(",")):
        if (match := SPELLING.fullmatch(word)) is None:
            raise TextmillError(f"{VARIABLE}: found '{word}'; say such as kill@disk:7 or nan@step:5:1 (step 5, rank 1)")
        what, where, number = match.groups()[:3] if match[1] else match.groups()[3:6]
        faults.append(Fault(what, where, int(number), int(match[7] or 0)))
    return faults


_armed: list[Fault] = []
_touches = itertools.count(1)


def arm(text: str) -> None:
    """Make these faults happen in this process from now on, counting touches of the disk anew."""
    global _touches
    _touches = itertools.count(1)
    _armed[:] = parse(text)


def touch(kind: Literal["write", "name"] = "name") -> None:
    """Called before a file is written or synced, and before a name is given or taken away."""
    if not _armed:
        return
    number = next(_touches)
    for fault in _armed:
        if fault.where != "disk":
            continue
        if fault.what == "kill" and fault.number == number:
            _die()
        if fault.what == "full" and fault.number <= number and kind == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin_step(step: int) -> None:
    """Called before a step: here a process dies, is stopped, or waits for ever."""
    if hits("kill", step):
        _die()
    if hits("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    while hits("hang", step):
        time.sleep(1)


def hits(what: str, step: int) -> bool:
    """Whether this process is to break so in this step."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0
    return bool(_armed) and Fault(what, "step", step, int(rank)) in _armed


def armed(*kinds: str) -> list[str]:
    """Which of these are to happen at some step of some process."""
    return [fault.what for fault in _armed if fault.what in kinds]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
