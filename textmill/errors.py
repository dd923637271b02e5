"""The exception that carries a message for the user, warnings, and the exit codes of the program."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_STOPPED = 75
EXIT_PIPE = 141
"""As of a program that SIGPIPE ended: the reader of its output has exited."""
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Set by torchrun, mpirun and srun; mpirun comes before srun, which may have started it."""


class TextmillError(Exception):
    """A user's mistake: what is wrong; what was found; what to do. Printed as one line, without a traceback."""

    exit_code = EXIT_USER


class Interrupted(TextmillError):
    """The work was stopped on request and is saved; the same command resumes it."""

    exit_code = EXIT_STOPPED


class AlreadyReported(TextmillError):
    """Another process of the run has printed the error; only the exit code is left to set."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def explain_os_error(error: OSError) -> TextmillError | None:
    """The message for an error of the machine, such as a full or read-only disk; None for one that may be a bug."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in FULL:
        advice = "free some disk space and run the command again; finished work is kept"
        return Interrupted(f"{where}cannot be written ({error.strerror}); {advice}")
    if error.errno in FORBIDDEN:
        return TextmillError(f"{where}cannot be used ({error.strerror}); change its rights, or set another folder")
    return None


def failed_work(message: str, error: OSError) -> TextmillError:
    """The error of work that the machine interrupted: exit code 75 if its disk is full, else 2."""
    return (Interrupted if error.errno in FULL else TextmillError)(message)


def warn(message: str) -> None:
    """Print a warning on stderr; if that is closed, do nothing."""
    with suppress(OSError, ValueError):
        print(f"textmill: {message}", file=sys.stderr, flush=True)


def rank_of_launcher() -> int:
    """The rank of this process as torchrun, mpirun or srun has set it, before any of them talks to another; else 0."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), 0))
