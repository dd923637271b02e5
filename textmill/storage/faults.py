"""Fault injection for tests: TEXTMILL_FAULT names what fails and when, so that recovery is tested on the real program.

    kill@disk:7        SIGKILL before the 7th write, fsync, rename or removal
    full@disk:7        from the 7th on, every write or fsync fails with "no space left on device"
    slow@disk:7        from the 7th on, each takes 0.1 seconds longer
    kill@step:5:1      rank 1 gets SIGKILL before step 5; stop: SIGSTOP; hang: it sleeps forever
    hang@start:1       rank 1 sleeps forever before it opens the data; kill and stop work here too
    nan@step:5:1       one gradient of rank 1 is NaN in step 5 (torch engine only)
    flip@step:5:1      one bit of a weight flips on rank 1 before step 5 (torch engine only)
    fail@kernel        the kernel that `textmill doctor` runs cannot be launched

Separate several faults by commas. Steps count from 0. The default rank is 0. Without the variable nothing is checked.
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

from textmill.errors import TextmillError, rank_of_launcher

VARIABLE = "TEXTMILL_FAULT"
PATTERN = re.compile(
    r"(?P<disk>kill|full|slow)@disk:(?P<number>\d+)|(?P<start>kill|stop|hang)@start(?::(?P<first>\d+))?"
    r"|(?P<step>kill|stop|hang|nan|flip)@step:(?P<at>\d+)(?::(?P<rank>\d+))?"
    r"|(?P<kernel>fail)@kernel"
)
SLOW_SECONDS = 0.1


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    action: str
    """kill, full, slow, stop, hang, nan, flip or fail."""
    place: str
    """disk, start, step or kernel."""
    number: int
    """Which disk access or which step."""
    rank: int


def parse(text: str) -> list[Fault]:
    """The faults listed in a text such as 'kill@disk:7,nan@step:5:1'."""
    faults = []
    for part in filter(None, text.split(",")):
        if (match := PATTERN.fullmatch(part)) is None:
            raise TextmillError(
                f"{VARIABLE}: found '{part}'; write for example kill@disk:7 or nan@step:5:1 (step 5, rank 1)"
            )
        place = next(name for name in ("disk", "start", "step", "kernel") if match[name])
        number = match["number"] or match["at"] or 0
        rank = match["rank"] or match["first"] or 0
        faults.append(Fault(match[place], place, int(number), int(rank)))
    return faults


_armed: list[Fault] = []
_disk_accesses = itertools.count(1)


def arm(text: str) -> None:
    """Inject these faults in this process from now on; disk accesses are counted from 1 again."""
    global _disk_accesses
    _disk_accesses = itertools.count(1)
    _armed[:] = parse(text)


def on_disk_access(kind: Literal["write", "name"] = "name") -> None:
    """Called before each write or fsync (kind `write`), rename or removal (kind `name`)."""
    if not _armed:
        return
    number = next(_disk_accesses)
    for fault in _armed:
        if fault.place != "disk":
            continue
        if fault.action == "kill" and fault.number == number:
            _kill_self()
        if fault.action == "slow" and fault.number <= number:
            time.sleep(SLOW_SECONDS)
        if fault.action == "full" and fault.number <= number and kind == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def break_process(step: int | Literal["start"]) -> None:
    """Called at the start and before each step: kill, stop or hang this process if such a fault is due."""
    if is_due("kill", step):
        _kill_self()
    if is_due("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    while is_due("hang", step):
        time.sleep(1)


def is_due(action: str, step: int | Literal["start"]) -> bool:
    """Whether this fault is due on this rank in this step, or at the start."""
    if not _armed:
        return False
    rank = rank_of_launcher()
    return (Fault(action, "start", 0, rank) if step == "start" else Fault(action, "step", step, rank)) in _armed


def break_kernel() -> None:
    """Called before a kernel is launched: fail as CUDA does if such a fault is armed."""
    if any(fault.place == "kernel" for fault in _armed):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def armed_actions(*actions: str) -> list[str]:
    """Which of these actions are planned at all, on any rank."""
    return [fault.action for fault in _armed if fault.action in actions]


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE, ""))
