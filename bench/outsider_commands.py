"""Run a command for bench/outsiders.py in a forked process, under a condition, and judge how it ended."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

SECONDS = 120.0
"""A command that takes longer than this is stopped with SIGTERM; training may, any other command must not."""
MEMORY = 12 << 30
DONE, USER, STOPPED, PIPE = 0, 2, 75, 141


@dataclass
class Outcome:
    """How a command ended."""

    arguments: list[str]
    code: int
    """The exit code; negative: the signal that ended it."""
    errors: str
    """What it wrote to stderr."""
    hung: bool = False

    def defect(self, allowed: tuple[int, ...]) -> str | None:
        """What is wrong with it, if anything."""
        last = (self.errors.strip().splitlines() or [""])[-1]
        if "Traceback (most recent call last)" in self.errors:
            return "traceback"
        if self.hung:
            return "hang"
        if self.code not in allowed:
            return f"exit code {self.code}, wanted one of {allowed}"
        if self.code == USER and not (last.startswith("textmill: ") and len(last) > 30):
            return "exit code 2 without a useful message"
        if self.code == USER and "No space left on device" in last:
            return "a full disk with exit code 2"
        return None


def run(arguments: list[str], folder: Path, condition: str = "plain", dice: random.Random | None = None) -> Outcome:
    """Run a command line in a forked process, under a condition that the process itself can be given."""
    dice, errors = dice or random.Random(0), folder.with_name(folder.name + ".err")
    fault = f"full@disk:{dice.choice([1, 2, 3, 5, 8, 13, 21, 34])}" if condition == "full disk" else ""
    closed = dice.choice(["pipe", "closed"]) if condition == "closed output" else ""
    process = os.fork()
    if process == 0:
        _become_command(arguments, folder, errors, fault, closed)
    started, hung, signalled = time.monotonic(), False, condition != "SIGHUP"
    hang_up = started + dice.uniform(0.1, 2.0)
    while (status := os.waitpid(process, os.WNOHANG))[0] == 0:
        now = time.monotonic()
        if not signalled and now > hang_up and _handles_hangup(process):
            signalled = True
            os.kill(process, signal.SIGHUP)
        if now > started + 2 * SECONDS:
            os.kill(process, signal.SIGKILL)
            hung = True
        elif now > started + SECONDS:
            hung = hung or arguments[:1] not in (["train"], ["run"])
            os.kill(process, signal.SIGTERM)
            time.sleep(5)
        time.sleep(0.01)
    return Outcome(arguments, os.waitstatus_to_exitcode(status[1]), errors.read_text(errors="replace"), hung)


def _handles_hangup(process: int) -> bool:
    """Whether the program has begun and not ended: before and after it, a hang-up ends the process as any other."""
    mask = Path(f"/proc/{process}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(mask, 16) & 1 << (signal.SIGHUP - 1))


def _become_command(arguments: list[str], folder: Path, errors: Path, fault: str, closed: str) -> NoReturn:
    """Run the program `textmill` in this process."""
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(folder)
        os.environ.update(HOME=str(folder), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(null, 1)
        sys.stdin = open(0, closefd=False)
        sys.stdout, sys.stderr = (open(number, "w", errors="backslashreplace", closefd=False) for number in (1, 2))
        if closed == "pipe":
            read_end, write_end = os.pipe()
            os.dup2(write_end, 1)
            os.close(read_end)
            os.close(write_end)
        elif closed:
            os.close(1)
            sys.stdout = None  # type: ignore[assignment]
        from textmill.cli import command
        from textmill.storage import faults

        faults.arm(fault)
        sys.argv = ["textmill", *arguments]
        command()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(1)


class ReadOnly:
    """A folder that cannot be written while the context lasts; root needs a mount for that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mounted = folder, False

    def __enter__(self) -> ReadOnly:
        if os.geteuid():
            self.folder.chmod(0o555)
            return self
        made = subprocess.run(["mount", "--bind", self.folder, self.folder], capture_output=True).returncode == 0
        self.mounted = made
        subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        if os.geteuid():
            self.folder.chmod(0o755)
        elif self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=True)
