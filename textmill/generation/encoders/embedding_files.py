"""The texts of the embed command: given as arguments, lines of a file, or lines of standard input."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from textmill.errors import TextmillError, warn

FILE_ENDINGS = (".txt", ".jsonl")
NO_TEXT = "no text; write: textmill embed MODEL 'a text', name a file of texts, or pipe lines in"


def read_texts(given: list[str]) -> Iterator[str]:
    """The texts; a single argument that names a file stands for its lines. Raises if there is none."""
    file = _file_of(given)
    _check_names(given, file)
    listed = (_check(text, f"text {number}") for number, text in enumerate(given, 1))
    texts = _read_lines(file) if file else listed if given else _read_piped()
    first = next(texts, None)
    if first is None:
        raise TextmillError(f"embed: {f'{file} is empty' if file else NO_TEXT}")
    return _checked(first, texts)


def count_texts(given: list[str]) -> int | None:
    """How many texts there are, if that is known before they are read."""
    file = _file_of(given)
    if file is None:
        return len(given) or None
    if file.is_fifo():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def is_listed(given: list[str]) -> bool:
    """Whether the texts are arguments, and so few that all fit into memory."""
    return bool(given) and _file_of(given) is None


def _file_of(given: list[str]) -> Path | None:
    return Path(given[0]) if len(given) == 1 and _is_file(given[0]) else None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file() or Path(text).is_fifo()
    except (OSError, ValueError):  # a text that cannot be a path
        return False


def _check_names(given: list[str], file: Path | None) -> None:
    """Refuse the name of a file that does not exist; warn about several names, which are embedded as texts."""
    if len(given) == 1 and file is None and given[0].endswith(FILE_ENDINGS) and len(given[0].split()) == 1:
        raise TextmillError(f"embed: {given[0]}: no such file; name one, or write a text of several words")
    for text in given if len(given) > 1 else ():
        if _is_file(text):
            warn(f"{text}: is embedded as a text, though a file has this name; to embed its lines, name only this file")


def _checked(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, or the key "text" of JSON lines."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = _decode(line, f"{path}:{number}")
            yield _parse(text, f"{path}:{number}") if path.suffix == ".jsonl" else text


def _read_piped() -> Iterator[str]:
    """The lines of standard input if it is a pipe or a file."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by another object
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return
    print("reading texts from standard input, one per line", file=sys.stderr, flush=True)
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield _decode(line, f"standard input:{number}")


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise TextmillError(f"{where}: is not UTF-8 text ({error.reason}); convert the file") from None


def _parse(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise TextmillError(f'{where}: is not a text; write each line as {{"text": "TEXT"}}')
    return _check(text, where)


def _check(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextmillError(f"{where}: has a lone surrogate (half of a character); give it as UTF-8 text") from None
    return text
