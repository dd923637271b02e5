"""Standard output and error that can be lost (closed pipe, closed terminal, full disk) without ending the work."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from textmill.errors import EXIT_DONE, EXIT_PIPE, EXIT_USER, warn

STDIN = 0
STDOUT = 1
STDERR = 2


class OutputLost(OSError):
    """Standard output cannot be written any more, and the command's result is what it prints."""


class LosableFile(io.FileIO):
    """A file descriptor that becomes /dev/null at the first failed write; with `fatal`, that write raises
    OutputLost."""

    def __init__(self, descriptor: int, *, fatal: bool = False) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.fatal = fatal
        self.error: OSError | None = None
        """Why the descriptor was lost."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            first = self.error is None
            self.lose(error)
            if self.fatal and first:
                raise OutputLost(error.errno, error.strerror) from None
            return memoryview(data).nbytes

    def lose(self, error: OSError) -> None:
        """Send all further output, also that of libraries and child processes, to /dev/null."""
        self.error = self.error or error
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.fileno())
        os.close(null)


def protect_output(*, result_is_output: bool) -> LosableFile:
    """Replace sys.stdout and sys.stderr by streams that survive the loss of their reader; return that of stdout.

    With `result_is_output`, the loss of stdout raises OutputLost. The loss of stderr never raises.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is 0
        sys.stdin = open(STDIN, encoding="utf-8", closefd=False)  # open until the process ends
    output = _protect("stdout", STDOUT, fatal=result_is_output)
    _protect("stderr", STDERR, fatal=False)
    return output


def _protect(name: str, descriptor: int, *, fatal: bool) -> LosableFile:
    before = getattr(sys, name)
    if before is None:  # it was closed when the process started; no other file may get its number
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
    file = LosableFile(descriptor, fatal=fatal)
    if before is None:
        file.lose(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    else:
        before.flush()
    stream = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=before.encoding if before else "utf-8",
        errors=before.errors if before else "backslashreplace",
        line_buffering=before.line_buffering if before else False,
        write_through=before.write_through if before else False,
    )
    setattr(sys, name, stream)
    return file


def exit_code_of(code: int, output: LosableFile) -> int:
    """The exit code of a command: not 0 if its result is what it prints and that was lost."""
    if code != EXIT_DONE or output.error is None or not output.fatal:
        return code
    if output.error.errno == errno.EPIPE:
        return EXIT_PIPE
    warn(f"standard output cannot be written ({output.error.strerror}); write it elsewhere")
    return EXIT_USER
