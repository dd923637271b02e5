"""The texts of the embed command: given as arguments, lines of a file, or lines of standard input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from textmill.errors import TextmillError, warn
from textmill.generation.text_lines import read_file_lines, read_piped_lines

FILE_ENDINGS = (".txt", ".jsonl")
NO_TEXT = "no text; write: textmill embed MODEL 'a text', name a file of texts, or pipe lines in"


def read_texts(arguments: list[str]) -> Iterator[str]:
    """The texts; a single argument that names a file stands for its lines. Raises if there is none."""
    file = _file_of(arguments)
    _check_names(arguments, file)
    if file:
        texts = _read_lines(file)
    elif arguments:
        texts = (_check_text(text, f"text {number}") for number, text in enumerate(arguments, 1))
    else:
        texts = (line for line, _ in read_piped_lines("texts"))
    first = next(texts, None)
    if first is None:
        raise TextmillError(f"embed: {f'{file} is empty' if file else NO_TEXT}")
    return chain([first], texts)


def count_texts(arguments: list[str]) -> int | None:
    """How many texts there are, if that is known before they are read."""
    file = _file_of(arguments)
    if file is None:
        return len(arguments) or None
    if file.is_fifo():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def are_texts(arguments: list[str]) -> bool:
    """Whether the arguments are the texts, and so few that all fit into memory."""
    return bool(arguments) and _file_of(arguments) is None


def _file_of(arguments: list[str]) -> Path | None:
    return Path(arguments[0]) if len(arguments) == 1 and _is_file(arguments[0]) else None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file() or Path(text).is_fifo()
    except (OSError, ValueError):  # a text that cannot be a path
        return False


def _check_names(arguments: list[str], file: Path | None) -> None:
    """Refuse the name of a file that does not exist; warn about several names, which are embedded as texts."""
    if len(arguments) == 1:
        text = arguments[0]
        if file is None and text.endswith(FILE_ENDINGS) and len(text.split()) == 1:
            raise TextmillError(f"embed: {text}: no such file; name one, or write a text of several words")
        return
    for text in arguments:
        if _is_file(text):
            warn(f"{text}: is embedded as a text, though a file has this name; to embed its lines, name only this file")


def _read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, or the key "text" of JSON lines."""
    for line, place in read_file_lines(path):
        yield _parse(line, place) if path.suffix == ".jsonl" else line


def _parse(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise TextmillError(f'{where}: is not a text; write each line as {{"text": "TEXT"}}')
    return _check_text(text, where)


def _check_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextmillError(f"{where}: has a lone surrogate (half of a character); give it as UTF-8 text") from None
    return text
