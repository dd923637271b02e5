"""metrics.jsonl: one line per logged step, with exact numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from textmill.storage.files import write_bytes

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends lines to a JSON Lines file; each line is flushed at once."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write one line, `step` first; floats are written with the digits that give back the same float.

        JSON has no NaN and no infinity: they are written as null.
        """
        finite = {name: None if _is_not_finite(value) else value for name, value in values.items()}
        self._stream.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._stream.flush()

    def mark(self, step: int, text: str) -> None:
        """Write a line with the settings that change after this step."""
        self._stream.write(json.dumps({"step": step, "change": text}, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def truncate_after(path: Path, step: int) -> None:
    """Keep the complete lines up to a step; later steps run again, and a killed run may leave an incomplete line.

    A change after this step is dropped too: it was not saved, and the run marks it again if it still holds.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    lines = [
        line
        for line in before.split(b"\n")
        if (found := _read_step(line)) is not None and (found < step or (found == step and b'"change": ' not in line))
    ]
    after = b"".join(line + b"\n" for line in lines)
    if after != before:
        write_bytes(path, [after])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics.jsonl, in order; none without the file. An incomplete last line is skipped."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [json.loads(line) for line in lines if _read_step(line) is not None]


def _read_step(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
