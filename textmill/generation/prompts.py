"""Where the commands get their texts: from the settings, a file, a pipe, or lines typed at the terminal.

Only a newline ends a line: other separators, such as U+2028, may be part of a text, and of a string in JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from textmill.config import SampleConfig
from textmill.errors import TextmillError


def find_prompts(sample: SampleConfig) -> list[tuple[str, str]]:
    """Return the texts to continue: `sample.prompts_file`, `sample.prompt`, lines of a pipe, or one empty text.

    Each comes with its place for error messages, such as "prompts.txt:2".
    """
    if sample.prompts_file is not None:
        return _read_file(Path(sample.prompts_file), sample)
    if sample.prompt is not None:
        return [(sample.prompt, "sample.prompt")]
    return list(read_piped_lines("prompts")) or [("", "sample.prompt")]


def _read_file(path: Path, sample: SampleConfig) -> list[tuple[str, str]]:
    """Read prompts from a file: one per line, or one JSON object per line in a .jsonl file."""
    if sample.prompt:
        raise TextmillError("sample.prompts_file: sample.prompt is set too; set one of them")
    if not path.exists():
        raise TextmillError(f"sample.prompts_file: {path}: no such file; name a file with a prompt per line")
    try:
        lines = list(read_file_lines(path))
    except OSError as error:
        raise TextmillError(f"sample.prompts_file: {path}: cannot be read ({error.strerror}); name a file") from None
    if not lines:
        raise TextmillError(f"sample.prompts_file: {path}: is empty; write one prompt per line")
    if path.suffix == ".jsonl":
        return [(parse_json_line(line, "prompt", place), place) for line, place in lines]
    return lines


def parse_json_line(line: str, key: str, place: str) -> str:
    """The text under a key of a JSON line."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise TextmillError(f'{place}: is not a {key}; write each line as {{"{key}": "TEXT"}}')
    return text


def check_unicode(text: str, place: str) -> str:
    """A text without lone surrogates, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextmillError(f"{place}: has a lone surrogate (half of a character); give it as UTF-8 text") from None
    return text


def read_file_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a file, and its place, such as "prompts.txt:2"."""
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


T = TypeVar("T")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; None is a stream that was closed before the program started."""
    return stream is not None and stream.isatty()


class Terminal:
    """Handles ctrl-C while it is open.

    KeyboardInterrupt is raised only inside `run_interruptible`, and only once, so that a second ctrl-C cannot interrupt
    the handling of the first. SIGTERM and SIGHUP end the program at once: there is nothing to save.
    """

    def __init__(self) -> None:
        self._interruptible = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            handlers: dict[signal.Signals, Any] = {
                signal.SIGINT: self._on_interrupt,
                signal.SIGTERM: signal.SIG_DFL,
                signal.SIGHUP: signal.SIG_DFL,
            }
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_interrupt(self, *_: Any) -> None:
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def run_interruptible(self, work: Callable[[], T]) -> T | None:
        """Run `work` and return its result; None if ctrl-C interrupted it."""
        try:
            try:
                self._interruptible = True
                return work()
            finally:
                self._interruptible = False
        except KeyboardInterrupt:
            return None

    def lines(self) -> Iterator[str]:
        """Yield each line typed at a prompt, or read from a pipe, until the input ends."""
        if sys.stdin is None:
            return
        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            with suppress(ImportError):
                import_module("readline")  # arrow keys bring back earlier lines
        while True:
            try:
                line = self.run_interruptible(lambda: input(prompt))
            except EOFError:
                print()
                return
            if line is None:
                print("\nctrl-D ends", flush=True)
            else:
                yield line
