"""Files of evaluation data on this machine: checked, hashed, and read record by record."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from textmill.config import EvaluateConfig
from textmill.corpus.source import COMPRESSIONS
from textmill.corpus.streams import BrokenStream, open_decompressed
from textmill.errors import TextmillError
from textmill.evaluation.task import TaskEntry
from textmill.storage.files import hash_file

T = TypeVar("T")
Record = dict[str, Any]
SAMPLE_SEED = 1234
"""The seed of the examples or windows that `evaluate.sample` chooses."""
KINDS = (".jsonl", ".ndjson", ".json", ".tsv", ".csv", ".parquet")
FORMATS = ".jsonl, .ndjson, .json, .tsv or .csv, also compressed (.gz, .bz2, .xz, .zst), or .parquet"


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
    """What a task measures: a file, or all files of a folder or a pattern."""

    path: Path
    """As the user named it."""
    files: tuple[Path, ...]
    sha256: str
    """Of the file; of several, the hash of all their hashes."""

    @property
    def card(self) -> dict[str, Any]:
        """What the protocol card says about it."""
        count = {"files": len(self.files)} if len(self.files) > 1 else {}
        return {"file": str(self.path), "sha256": self.sha256, **count}


def find_data_files(entry: TaskEntry) -> tuple[Path, ...]:
    """The files of a task, which must exist."""
    path = entry.file
    if path is None:
        raise TextmillError(f"evaluate.tasks: {entry.name} needs a file; write {entry.name}:FILE")
    files = _find_files(path)
    if not files:
        what = "has no file of evaluation data" if path.is_dir() else "no such file"
        raise TextmillError(f"{path}: {what}; evaluate.tasks names it for the task {entry.name}")
    return files


def open_data_file(entry: TaskEntry) -> DataFile:
    """A task's files, which must exist and have the checksum that the user gives."""
    files = find_data_files(entry)
    assert entry.file is not None
    hashes = [hash_file(file) for file in files]
    sha256 = hashes[0] if len(files) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    if entry.sha256 and entry.sha256.lower() != sha256:
        raise TextmillError(
            f"{entry.file}: its SHA-256 is {sha256[:12]}..., the task has {entry.sha256[:12]}...; the file is damaged "
            "or was edited; get it again"
        )
    return DataFile(entry.file, files, sha256)


def _find_files(path: Path) -> tuple[Path, ...]:
    """The file, or those below a folder or of a pattern, sorted; files of other formats in a folder do not count."""
    if path.is_file():
        return (path,)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and kind_of(file) in (*KINDS, ".txt")]
        return tuple(sorted(file for file in found if not file.name.startswith(".")))
    return tuple(sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file()))


def kind_of(path: Path) -> str:
    """The ending of a file's name in lower case, without that of its compression: data.JSONL.xz -> .jsonl."""
    return _without_compression(path).suffix.lower()


def stem_of(path: Path) -> str:
    """The name of a file without its endings: data.jsonl.xz -> data."""
    return _without_compression(path).stem


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.name.lower().endswith(COMPRESSIONS) else path


def read_items(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with its place: `file:line`; `columns` names those of a table without titles."""
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _parquet_records(path)
    elif kind == ".json":
        yield from _json_records(path)
    elif kind in (".jsonl", ".ndjson"):
        yield from _line_records(path)
    elif kind in (".tsv", ".csv"):
        yield from _table_records(path, "\t" if kind == ".tsv" else ",", columns)
    else:
        raise TextmillError(f"{path}: found a '{path.suffix}' file; evaluation data is {FORMATS}")


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file with their ends, each with its place."""
    try:
        with open_decompressed(str(path)) as stream:
            yield from _decode_lines(stream, path)
    except BrokenStream as error:
        raise TextmillError(f"{path}: {error}; get it again") from None


def _decode_lines(stream: Iterable[bytes], path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(stream, 1):
        try:
            yield f"{path}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise TextmillError(
                f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x}); "
                "the file is damaged, or has another encoding"
            ) from None


def _line_records(path: Path) -> Iterator[tuple[str, Record]]:
    for place, line in read_lines(path):
        if line.strip():
            yield place, _as_record(_parse(line, place), place)


def _json_records(path: Path) -> Iterator[tuple[str, Record]]:
    values = _parse("".join(line for _, line in read_lines(path)), str(path))
    for number, value in enumerate(values if isinstance(values, list) else [values], 1):
        yield f"{path}, item {number}", _as_record(value, f"{path}, item {number}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg.removesuffix(' at')} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise TextmillError(f"{place}: not JSON: {reason}; the file is damaged, or not JSON lines") from None


def _as_record(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise TextmillError(f"{place}: found a {type(value).__name__}; a record is an object with named fields")
    return value


def _table_records(path: Path, delimiter: str, columns: Sequence[str]) -> Iterator[tuple[str, Record]]:
    lines = (line for _, line in read_lines(path))
    rows = csv.DictReader(lines, delimiter=delimiter, fieldnames=columns or None)
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
