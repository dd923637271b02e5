"""The end of a process: with its own exit code, whatever the threads of libraries are still at."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from textmill.errors import EXIT_BUG


def leave_after(work: Callable[[], int]) -> NoReturn:
    """Do all that a process is there for, and end it with the code that this returns; a bug is told as ever.

    What the interpreter does at its end is done too, but for taking itself apart: a thread of gloo's that still has a tensor to give back
    then aborts the process, as it finds no interpreter to give it to, and other threads keep it from ending at all.
    """
    code = EXIT_BUG
    try:
        code = work()
    except Exception:
        sys.excepthook(*sys.exc_info())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
