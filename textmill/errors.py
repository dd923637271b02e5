"""The exception that carries a message for the user, and the exit codes of the program."""

from __future__ import annotations

import sys

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_STOPPED = 75


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


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"textmill: {message}", file=sys.stderr, flush=True)
