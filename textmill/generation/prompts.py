"""Finds the prompts of the generate command: from the settings, a file, or standard input."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

from textmill.config import SampleConfig
from textmill.errors import TextmillError


def find_prompts(sample: SampleConfig) -> list[str]:
    """Return the texts to continue: `sample.prompts_file`, `sample.prompt`, lines of a pipe, or one empty text."""
    if sample.prompts_file is not None:
        return _read_file(Path(sample.prompts_file), sample)
    if sample.prompt is not None:
        return [sample.prompt]
    return _read_piped_lines() or [""]


def _read_piped_lines() -> list[str]:
    """Return the lines of standard input if it is a pipe or a file; it is not read if it is a device or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by another object
        return []
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return []
    print("reading prompts from standard input, one per line", file=sys.stderr, flush=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextmillError(
            f"standard input: cannot be read as UTF-8 text ({error}); give one prompt per line"
        ) from None


def _read_file(path: Path, sample: SampleConfig) -> list[str]:
    """Read prompts from a file: one per line, or one JSON object per line in a .jsonl file."""
    if sample.prompt:
        raise TextmillError("sample.prompts_file: sample.prompt is set too; set one of them")
    if not path.exists():
        raise TextmillError(f"sample.prompts_file: {path}: no such file; name a file with a prompt per line")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextmillError(f"sample.prompts_file: {path}: cannot be read as UTF-8 text ({error})") from None
    if not lines:
        raise TextmillError(f"sample.prompts_file: {path}: is empty; write one prompt per line")
    return (
        [_parse_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if path.suffix == ".jsonl"
        else lines
    )


def _parse_prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TextmillError(f'{where}: is not a prompt; write each line as {{"prompt": "TEXT"}}')
    prompt: str = record["prompt"]
    return prompt
