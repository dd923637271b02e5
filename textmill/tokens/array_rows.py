"""Token ids in numpy's files: .npy with a row per document or one long row, pickled lists of arrays, nanoGPT's .bin.

A pickle may contain code. The reader here creates numpy arrays, numbers, texts and containers only: every other name in
the file is an error. `numpy.load` and `pickle.load` would run what the file says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.errors import TextmillError

SUFFIXES = (".npy", ".pickle", ".pkl")
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64()))])
STREAM_ROW = 1 << 16
"""Ids in a row, if a file is one long row: a store is split by its documents, so one document would be one split."""
BATCH_IDS = 1 << 22
"""About how many ids are read at a time."""
MAKES_ARRAYS = {("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer")}
"""Functions of numpy's core that build arrays and numbers."""


@dataclass(frozen=True)
class ArrayRows:
    """The rows of a file as a table, with the attributes of an Arrow stream."""

    path: Path
    schema: pa.Schema = field(default=SCHEMA, init=False)

    def __len__(self) -> int:
        return _count_rows(self.path, self.path.stat().st_mtime_ns)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows = _open_rows(self.path)
        longest = max((len(row) for row in rows[:64]), default=1)
        step = max(1, BATCH_IDS // max(1, longest))
        for first in range(0, len(rows), step):
            block = [np.asarray(row, np.int64) for row in rows[first : first + step]]
            offsets = np.cumsum([0, *map(len, block)], dtype=np.int64)
            values = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(block)))
            yield pa.RecordBatch.from_arrays([values], names=SCHEMA.names)


def is_array_file(path: Path) -> bool:
    """Whether a file has token ids in one of numpy's formats, by its name."""
    return (path.suffix in SUFFIXES or is_raw_file(path)) and path.is_file()


def is_raw_file(path: Path) -> bool:
    """Whether a file has 16-bit ids and nothing else, as nanoGPT's train.bin: a store has an .idx next to it."""
    return path.suffix == ".bin" and path.is_file() and not path.with_suffix(".idx").is_file()


@lru_cache
def _count_rows(path: Path, mtime: int) -> int:
    """The number of rows: a pickle must be read for it."""
    return len(_open_rows(path))


def _open_rows(path: Path) -> Any:
    """The rows: a matrix that stays on disk, or the list of a pickle, which is read into memory."""
    if is_raw_file(path):
        array: Any = _open_raw(path)
    else:
        with open(path, "rb") as stream:
            array = _open_array(path, stream) if path.suffix == ".npy" else read_numbers(path, stream)
    if isinstance(array, np.ndarray) and array.ndim == 1 and not array.dtype.hasobject:
        array = [array[start : start + STREAM_ROW] for start in range(0, len(array), STREAM_ROW)]
    is_matrix = isinstance(array, np.ndarray) and array.ndim == 2
    is_list = isinstance(array, list | tuple) or (isinstance(array, np.ndarray) and array.ndim == 1)
    if not is_matrix and not is_list:
        raise TextmillError(f"{path}: holds a {_describe(array)}; expected rows of token ids")
    for row in array[:1] if is_matrix else array:
        values = np.asarray(row) if isinstance(row, list | tuple | np.ndarray) else None
        if values is None or values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
            raise TextmillError(f"{path}: has a row that is a {_describe(row)}; expected a list of integers per row")
    return array


def _open_raw(path: Path) -> NDArray[np.uint16]:
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise TextmillError(
            f"{path}: has {size:,} bytes; without an .idx next to it, a .bin is read as nanoGPT's ids of two bytes each"
        )
    return np.memmap(path, np.uint16, "r")


def _open_array(path: Path, stream: IO[bytes]) -> Any:
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0}.get(version, np.lib.format.read_array_header_2_0)
        _, _, dtype = read_header(stream)
        if not dtype.hasobject:
            return np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise TextmillError(f"{path}: not a complete .npy file ({error}); write it again with numpy.save") from None
    return read_numbers(path, stream)


def read_numbers(path: Path, stream: IO[bytes]) -> Any:
    """What a pickle holds, if these are arrays, numbers, texts and containers."""
    try:
        return _Unpickler(stream).load()
    except TextmillError as error:
        raise TextmillError(f"{path}: {error}") from None
    except Exception as error:
        raise TextmillError(f"{path}: not a complete pickle ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The object that a name in the file stands for."""
        package, _, inner = module.rpartition(".")
        if package in ("numpy.core", "numpy._core") and (inner, name) in MAKES_ARRAYS:
            return getattr(import_module(f"numpy._core.{inner}"), name)
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise TextmillError(f"names {module}.{name}; of a pickle only arrays and numbers are read")


def _encode(text: str, encoding: str) -> bytes:
    """The bytes of an array in a pickle of protocol 2."""
    if encoding != "latin1":
        raise TextmillError(f"has bytes as text in {encoding}; of a pickle only arrays and numbers are read")
    return text.encode("latin1")


def read_count_list(path: Path) -> NDArray[np.int64]:
    """The counts of a token_counts.pickle: how often each id occurs, in the order of the ids."""
    counts = read_numbers(path, io.BytesIO(path.read_bytes()))
    values = np.asarray(counts) if isinstance(counts, list | tuple | np.ndarray) else np.zeros(0)
    if values.ndim != 1 or values.dtype.kind not in "iu" or (values.size and values.min() < 0):
        raise TextmillError(f"{path}: holds a {_describe(counts)}; expected a count for each id")
    return values.astype(np.int64)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} with {value.ndim} dimensions"
    return type(value).__name__
