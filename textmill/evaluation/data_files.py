"""Files of evaluation data on this machine: checked, hashed, and read record by record."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.task import TaskEntry
from textmill.storage.files import hash_file

T = TypeVar("T")
Record = dict[str, Any]
SAMPLE_SEED = 1234
"""The seed of the examples or windows that `evaluate.sample` chooses."""
FORMATS = ".jsonl, .ndjson, .json, .tsv, .csv or .parquet"


def name_of_texts(files: Sequence[str]) -> str:
    """A name for the result of these files: that of the first, and a checksum of all paths, so that files of the same
    name in other folders have results of their own."""
    paths = "\n".join(str(Path(file).resolve()) for file in files)
    return f"{slug(Path(files[0]).stem)}-{hashlib.sha256(paths.encode()).hexdigest()[:8]}"


def slug(text: str) -> str:
    """A text as a part of a file name."""
    return re.sub(r"[^\w.-]+", "_", text)


@dataclass(frozen=True)
class DataFile:
    """A file of evaluation data."""

    path: Path
    sha256: str

    @property
    def card(self) -> dict[str, Any]:
        """What the protocol card says about it."""
        return {"file": str(self.path), "sha256": self.sha256}


@dataclass(frozen=True)
class Published:
    """A published file: what it was when it was published."""

    name: str
    bytes: int
    sha256: str


def open_data_file(entry: TaskEntry, published: Sequence[Published] = ()) -> DataFile:
    """Check a task's file: it exists, and has the checksum that the user or FILE.sha256 gives.

    A file as long as a published one, but with another checksum, is damaged or edited.
    """
    path = entry.file
    if path is None:
        raise TextmillError(f"evaluate.tasks: {entry.name} needs a file; write {entry.name}:FILE")
    if not path.is_file():
        raise TextmillError(f"{path}: no such file; evaluate.tasks names it for the task {entry.name}")
    actual = hash_file(path)
    expected = {"the task": entry.sha256} if entry.sha256 else {}
    checksum_file = path.with_name(f"{path.name}.sha256")
    if checksum_file.is_file():
        words = checksum_file.read_text(encoding="utf-8", errors="replace").split()
        if words:
            expected[str(checksum_file)] = words[0]
    for original in published:
        if original.bytes == path.stat().st_size:
            expected[f"the published {original.name}"] = original.sha256
    for origin, sha256 in expected.items():
        if sha256.lower() != actual:
            raise TextmillError(
                f"{path}: its SHA-256 is {actual[:12]}..., {origin} has {sha256[:12]}...; the file is damaged or was "
                "edited; get it again"
            )
    return DataFile(path, actual)


def read_items(path: Path) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with its place: `file:line`."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_records(path)
    elif kind == ".json":
        yield from _json_records(path)
    elif kind in (".jsonl", ".ndjson"):
        yield from _line_records(path)
    elif kind in (".tsv", ".csv"):
        yield from _table_records(path, "\t" if kind == ".tsv" else ",")
    else:
        raise TextmillError(f"{path}: found a '{path.suffix}' file; evaluation data is {FORMATS}")


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file without their ends, each with its place."""
    return ((place, line.rstrip("\r\n")) for place, line in _lines(path))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield f"{path}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TextmillError(
                    f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x}); "
                    "the file is damaged, or has another encoding"
                ) from None


def _line_records(path: Path) -> Iterator[tuple[str, Record]]:
    for place, line in _lines(path):
        if line.strip():
            yield place, _as_record(_parse(line, place), place)


def _json_records(path: Path) -> Iterator[tuple[str, Record]]:
    values = _parse("".join(line for _, line in _lines(path)), str(path))
    for number, value in enumerate(values if isinstance(values, list) else [values], 1):
        yield f"{path}, item {number}", _as_record(value, f"{path}, item {number}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise TextmillError(f"{place}: not JSON: {reason}; the file is damaged, or not JSON lines") from None


def _as_record(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise TextmillError(f"{place}: found a {type(value).__name__}; a record is an object with named fields")
    return value


def _table_records(path: Path, delimiter: str) -> Iterator[tuple[str, Record]]:
    lines = (line for _, line in _lines(path))
    rows = csv.DictReader(lines, delimiter=delimiter)
    try:
        for row in rows:
            if None in row or None in row.values():
                raise TextmillError(f"{path}:{rows.line_num}: has another number of columns than the first line")
            yield f"{path}:{rows.line_num}", dict(row)
    except csv.Error as error:
        raise TextmillError(f"{path}:{rows.line_num}: not readable as a table ({error})") from None


def _parquet_records(path: Path) -> Iterator[tuple[str, Record]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise TextmillError(f"{path}: not readable as Parquet ({error}); the file is damaged") from None


def text_of(record: Record, key: str, place: str) -> str:
    """A field that must be text."""
    value = record.get(key)
    if not isinstance(value, str):
        problem = (
            f"the field '{key}' is {value!r}" if key in record else f"no field '{key}'; it has {', '.join(record)}"
        )
        raise TextmillError(f"{place}: {problem}; this task reads text from '{key}'")
    return value


def sample(items: list[T], config: EvaluateConfig) -> list[T]:
    """All items, or a random sample of `evaluate.sample` of them in their order."""
    if config.sample is None or config.sample >= len(items):
        return items
    chosen = np.sort(np.random.default_rng(SAMPLE_SEED).choice(len(items), config.sample, replace=False))
    return [items[number] for number in chosen]


def sample_card(count: int, total: int) -> dict[str, Any]:
    """What the protocol card says about the number of examples."""
    return {"examples": count, **({"of": total, "seed": SAMPLE_SEED} if count < total else {})}
