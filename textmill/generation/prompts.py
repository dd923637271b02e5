"""Finds the prompts of the generate command: from the settings, a file, or standard input."""

from __future__ import annotations

import json
from pathlib import Path

from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation.text_lines import read_file_lines, read_piped_lines


def find_prompts(sample: SampleConfig) -> list[str]:
    """Return the texts to continue: `sample.prompts_file`, `sample.prompt`, lines of a pipe, or one empty text."""
    if sample.prompts_file is not None:
        return _read_file(Path(sample.prompts_file), sample)
    if sample.prompt is not None:
        return [sample.prompt]
    return [line for line, _ in read_piped_lines("prompts")] or [""]


def _read_file(path: Path, sample: SampleConfig) -> list[str]:
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
        return [_parse_prompt(line, place) for line, place in lines]
    return [line for line, _ in lines]


def _parse_prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TextmillError(f'{where}: is not a prompt; write each line as {{"prompt": "TEXT"}}')
    prompt: str = record["prompt"]
    return prompt
