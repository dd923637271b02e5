"""metrics.jsonl: one line a log, every number exactly as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from textmill.storage.files import write_bytes

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends to metrics.jsonl; each line is in the file before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8")

    def log(self, step: int, values: dict[str, float]) -> None:
        """One line, `step` first; Python writes the shortest digits that read back as the same float."""
        self._stream.write(json.dumps({"step": step, **values}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def truncate_after(path: Path, step: int) -> None:
    """Keep the whole lines up to a step: what comes after is done again, and a killed run may leave half a line."""
    if not path.exists():
        return
    before = path.read_bytes()
    lines = [line for line in before.split(b"\n") if (found := _step_of(line)) is not None and found <= step]
    after = b"".join(line + b"\n" for line in lines)
    if after != before:
        write_bytes(path, [after])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl, in order; half a line at the end is passed over."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if _step_of(line) is not None]


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
