"""Datasets of token ids that others made: a column `input_ids` in Parquet files, or in the Arrow files of `datasets.save_to_disk`."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import read_json

DICT, STATE = "dataset_dict.json", "state.json"
"""What `save_to_disk` writes beside a DatasetDict's folders, and into a Dataset's."""
SIDES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
NAMED = re.compile(rf"({'|'.join(sorted(SIDES, key=len, reverse=True))})(?![a-z])")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
ROWS = 1024
"""Rows that are read at a time."""
IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"


@dataclass(frozen=True)
class Table:
    """Rows of one or more files, one file after the other."""

    files: tuple[Path, ...]
    first: int
    """The first row of these, counted over all files."""
    count: int

    def columns(self, *names: str) -> Iterator[tuple[Path, int, dict[str, Ragged]]]:
        """(file, number of the first row, columns) for a batch of rows at a time; a mask that is not there is left out."""
        before = 0
        for path in self.files:
            for batch in batches_of(path, names):
                begin, end = max(self.first - before, 0), min(self.first + self.count - before, batch.num_rows)
                if begin < end:
                    rows = batch.slice(begin, end - begin)
                    found = {name: ragged(rows.column(name), path, name) for name in names if name in rows.schema.names}
                    yield path, before + begin - self.first, found
                before += batch.num_rows
                if before >= self.first + self.count:
                    return


@dataclass(frozen=True)
class Ragged:
    """Rows of a column of lists."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]


def is_dataset(path: Path) -> bool:
    """Whether `datasets.save_to_disk` made the folder."""
    return (path / DICT).is_file() or (path / STATE).is_file()


def find_tables(where: Path) -> list[Path]:
    """The Parquet files that a file, a folder or a glob names; those of Apache Beam have no ending."""
    if where.is_file():
        return [where]
    if where.is_dir():
        found = sorted(
            path
            for path in where.rglob("*")
            if path.is_file() and (path.suffix == ".parquet" or SHARD.search(path.name))
        )
    else:
        found = sorted(path for path in map(Path, glob.glob(str(where), recursive=True)) if path.is_file())
    return found


def open_tables(where: Path, edges_of: Callable[[int], list[int]]) -> dict[str, Table]:
    """The rows of each split: by the splits' own names, or, without names, cut by `edges_of(rows)`."""
    named = _saved(where) if is_dataset(where) else _by_name(where, find_tables(where))
    if None in named:
        files = named[None]
        edges = edges_of(sum(map(rows_of, files)))
        return {
            split: Table(files, edges[number], edges[number + 1] - edges[number]) for number, split in enumerate(SPLITS)
        }
    return {split: Table(files := named.get(split, ()), 0, sum(map(rows_of, files))) for split in SPLITS}


def files_in(where: Path) -> list[Path]:
    """Every file of a dataset's rows, in their order."""
    named = _saved(where) if is_dataset(where) else {None: tuple(find_tables(where))}
    return [path for files in named.values() for path in files]


def named_files(where: Path) -> dict[str, Path]:
    """The files of a dataset by their places in it, so that two of one name are two."""
    files = files_in(where)
    if where.is_dir():
        return {path.relative_to(where).as_posix() if path.is_relative_to(where) else path.name: path for path in files}
    return {f"{number} {path.name}": path for number, path in enumerate(files)}


def _saved(folder: Path) -> dict[str | None, tuple[Path, ...]]:
    if not (folder / DICT).is_file():
        return {None: _arrow_files(folder)}
    sides: dict[str | None, tuple[Path, ...]] = {}
    for name in read_json(folder / DICT)["splits"]:
        if name not in SIDES:
            raise TextmillError(
                f"{folder}: has a split '{name}'; train, validation and test are known; name the folder of one: {folder / name}"
            )
        sides[SIDES[name]] = sides.get(SIDES[name], ()) + _arrow_files(folder / name)
    return sides


def _arrow_files(folder: Path) -> tuple[Path, ...]:
    state = read_json(folder / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise TextmillError(
            f"{folder}: holds a selection over other rows; save it anew with dataset.flatten_indices().save_to_disk(...)"
        )
    return tuple(folder / file["filename"] for file in state["_data_files"])


def _by_name(where: Path, files: Sequence[Path]) -> dict[str | None, tuple[Path, ...]]:
    """Files whose names, or whose folders' names, begin with a split's are of that split."""
    sides: dict[str | None, tuple[Path, ...]] = {}
    for path in files:
        inside = path.relative_to(where).parts if where.is_dir() else (path.name,)
        match = next((found for part in inside if (found := NAMED.match(part.lower()))), None)
        side = SIDES[match[1]] if match else None
        sides[side] = (*sides.get(side, ()), path)
    if None in sides and len(sides) > 1:
        raise TextmillError(
            f"{where}: {sides[None][0].name} belongs to no split, others do by their names; "
            f"name all files train-*, validation-* or test-*, or none"
        )
    return sides


def rows_of(path: Path) -> int:
    """Rows in a file; of an Arrow stream the heads of all batches are looked at."""
    with _opened(path) as (file, kind):
        return int(file.metadata.num_rows) if kind == "parquet" else sum(batch.num_rows for batch in file)


def batches_of(path: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a file with those of the named columns that it has; one without `input_ids` is refused."""
    with _opened(path) as (file, kind):
        schema = file.schema_arrow if kind == "parquet" else file.schema
        if missing := [name for name in names if name not in schema.names and name != MASK]:
            raise TextmillError(f"{path}: no column '{missing[0]}'; found {schema.names[:12]}")
        wanted = [name for name in names if name in schema.names]
        if kind == "parquet":
            yield from file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False)
        else:
            for batch in file:
                yield from (batch.slice(start, ROWS).select(wanted) for start in range(0, batch.num_rows, ROWS))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, str]]:
    """A Parquet file, or an Arrow stream over mapped memory; whatever is wrong with it names the file."""
    try:
        with pa.memory_map(str(path)) as stream:
            if stream.size() >= 4 and stream.read(4) == b"PAR1":
                with pq.ParquetFile(path) as file:
                    yield file, "parquet"
            else:
                stream.seek(0)
                with pa.ipc.open_stream(stream) as batches:
                    yield batches, "arrow"
    except FileNotFoundError:
        raise TextmillError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TextmillError(f"{path}: neither Parquet nor an Arrow stream, or only a part of one ({first})") from None


def ragged(column: pa.Array, path: Path, name: str) -> Ragged:
    """A column of lists as one array and the lists' lengths; nothing is copied."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise TextmillError(f"{path}: its column '{name}' holds {kind}; a row's token ids are a list of whole numbers")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise TextmillError(
            f"{path}: its column '{name}' has empty cells (null); a row's token ids are a list of whole numbers"
        )
    if name != MASK and not pa.types.is_integer(values.type):
        raise TextmillError(f"{path}: its column '{name}' holds lists of {values.type}; token ids are whole numbers")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return Ragged(values.to_numpy(zero_copy_only=False), lengths)


def unpadded(ids: Ragged, mask: Ragged) -> Ragged:
    """Rows without the positions at their ends that the mask leaves out; those between tokens stay."""
    ends = np.cumsum(ids.lengths)
    starts = ends - ids.lengths
    seen = np.flatnonzero(mask.values)
    rows = np.searchsorted(ends, seen, side="right")
    first, last = starts.copy(), starts.copy()
    first[rows[::-1]] = seen[::-1]  # of equal rows the last assignment stands
    last[rows] = seen + 1
    lengths = last - first
    places = np.arange(int(lengths.sum())) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    return Ragged(ids.values[places], lengths)
