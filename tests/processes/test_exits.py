"""A process exits with its own code and all its output, even if threads are still running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys, threading
from textmill.processes.signals import run_and_exit

def work():
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(print, "then what was promised for the end")
    print("work")
    {last}

run_and_exit(work)
"""


def ended(last: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last)], cwd=root, capture_output=True, text=True, timeout=300
    )


def test_an_endless_thread_does_not_keep_the_process_alive(root: Path) -> None:
    done = ended("return 75", root)
    assert (done.returncode, done.stdout, done.stderr) == (75, "work\nthen what was promised for the end\n", "")


def test_sigterm_during_exit_does_not_change_the_exit_code(root: Path) -> None:
    done = ended("import os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM); return 3", root)
    assert (done.returncode, done.stdout, done.stderr) == (3, "work\nthen what was promised for the end\n", "")


def test_a_bug_keeps_its_traceback(root: Path) -> None:
    done = ended("raise KeyError('a bug')", root)
    assert (done.returncode, done.stdout) == (1, "work\nthen what was promised for the end\n")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("KeyError: 'a bug'\n")
