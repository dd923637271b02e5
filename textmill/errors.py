"""The one exception that a user is meant to read, and the exit codes of the command."""

from __future__ import annotations

import sys

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_STOPPED = 75


class TextmillError(Exception):
    """What is wrong; what was found; what to do. Printed as one line, without a traceback."""

    exit_code = EXIT_USER


class Stopped(TextmillError):
    """The work was asked to stop, is saved, and may be started again as it was."""

    exit_code = EXIT_STOPPED


class Told(TextmillError):
    """Another process of the run told the user already; only the exit code is left to give."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def warn(message: str) -> None:
    """Say something on stderr that a person should know and that does not stop the work."""
    print(f"textmill: {message}", file=sys.stderr, flush=True)
