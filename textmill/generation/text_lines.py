"""Lines of a file or of standard input, decoded one by one; each comes with its place, such as "prompts.txt:2".

Only a newline ends a line: other separators, such as U+2028, may be part of a text, and of a string in JSON lines.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from textmill.errors import TextmillError


def read_file_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a file, and its place."""
    with path.open("rb") as stream:
        yield from _decode_lines(stream, str(path))


def read_piped_lines(kind: str) -> Iterator[tuple[str, str]]:
    """Yield each line of standard input and its place, if it is a pipe or a file; a device is not read.

    `kind` says what the lines are, for the message that tells a user why the program waits.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by another object
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return
    print(f"reading {kind} from standard input, one per line", file=sys.stderr, flush=True)
    yield from _decode_lines(sys.stdin.buffer, "standard input")


def _decode_lines(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        place = f"{name}:{number}"
        try:
            yield line.decode("utf-8-sig").rstrip("\r\n"), place
        except UnicodeDecodeError as error:
            raise TextmillError(
                f"{place}: is not UTF-8 text ({error.reason}), so it cannot be read; convert it"
            ) from None
