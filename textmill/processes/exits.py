"""Exit a process with its own exit code, even if library threads are still running."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from textmill.errors import EXIT_BUG


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Run `work` and exit with the code that it returns; an unexpected exception prints its traceback.

    Exit handlers run and output is flushed, but the interpreter is not finalized: then a gloo thread that still
    holds a tensor would abort the process, and other threads could keep it from ending.
    """
    code = EXIT_BUG
    try:
        code = work()
    except Exception:
        sys.excepthook(*sys.exc_info())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process is ending already
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
