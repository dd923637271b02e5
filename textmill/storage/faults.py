"""Faults on purpose: TEXTMILL_FAULT says what is to break and where, so that a promise is tried on the product itself.

    kill@disk:7        die as by SIGKILL before the 7th write, fsync, rename or removal
    full@disk:7        from the 7th on, what is written or synced finds the disk full
    slow@disk:7        from the 7th on, each takes a tenth of a second more
    kill@step:5:1      rank 1 dies before step 5; stop: it is stopped as by SIGSTOP; hang: it waits for ever
    hang@start:1       rank 1 waits for ever before it has looked at the data; kill, stop: as at a step
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
SPELLING = re.compile(
    r"(?P<disk>kill|full|slow)@disk:(?P<number>\d+)|(?P<start>kill|stop|hang)@start(?::(?P<first>\d+))?"
    r"|(?P<step>kill|stop|hang|spike|nan|flip)@step:(?P<at>\d+)(?::(?P<rank>\d+))?"
)
SLOW = 0.1


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
        where = next(name for name in ("disk", "start", "step") if match[name])
        number, rank = match["number"] or match["at"] or 0, match["rank"] or match["first"] or 0
        faults.append(Fault(match[where], where, int(number), int(rank)))
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
        if fault.what == "slow" and fault.number <= number:
            time.sleep(SLOW)
        if fault.what == "full" and fault.number <= number and kind == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin_step(step: int | Literal["start"]) -> None:
    """Called before a step, and before all of them: here a process dies, is stopped, or waits for ever."""
    if hits("kill", step):
        _die()
    if hits("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    while hits("hang", step):
        time.sleep(1)


def hits(what: str, step: int | Literal["start"]) -> bool:
    """Whether this process is to break so in this step, or at the start."""
    if not _armed:
        return False
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    return (Fault(what, "start", 0, rank) if step == "start" else Fault(what, "step", step, rank)) in _armed


def armed(*kinds: str) -> list[str]:
    """Which of these are to happen at some step of some process."""
    return [fault.what for fault in _armed if fault.what in kinds]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
