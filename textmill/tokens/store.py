"""The token store: Megatron's memory-mapped .bin/.idx pair, written as a stream and read in place."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
COPY_BLOCK = 1 << 24


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The dtype Megatron chooses for a vocabulary."""
    return np.dtype(np.uint16 if vocab < 65500 else np.int32)


@dataclass(frozen=True)
class TokenStore:
    """One split: memory-mapped ids and where each sequence and document ends."""

    prefix: Path
    ids: NDArray[Any]
    """All token ids, one sequence after the other."""
    lengths: NDArray[np.int32]
    """Tokens in each sequence."""
    documents: NDArray[np.int64]
    """Sequences before each document, and their number at the end."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Token ids in the store."""
        return len(self.ids)


def open_store(prefix: Path) -> TokenStore:
    """Map a store, after checking that the index and the ids fit together."""
    index_path, ids_path = _paths(prefix)
    for path in (index_path, ids_path):
        if not path.is_file():
            raise TextmillError(f"{path}: no such file; a token store is a pair of .bin and .idx")
    size = index_path.stat().st_size
    with open(index_path, "rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise TextmillError(f"{index_path}: not a token index (it begins with {head[:9]!r}, not {MAGIC!r})")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise TextmillError(f"{index_path}: version {version} with dtype code {code}; version 1 and codes {sorted(DTYPES)} are read")
    whole = HEADER.size + 12 * sequences + 8 * entries
    if size not in (whole, whole + sequences):  # later Megatron files end with a mode byte a sequence
        raise TextmillError(f"{index_path}: {size:,} bytes instead of {whole:,} for {sequences:,} sequences; the file is cut or damaged")
    lengths = np.memmap(index_path, np.int32, "r", HEADER.size, (sequences,)) if sequences else np.zeros(0, np.int32)
    documents = np.memmap(index_path, np.int64, "r", HEADER.size + 12 * sequences, (entries,)) if entries else np.zeros(1, np.int64)
    dtype = np.dtype(DTYPES[code])
    tokens = int(lengths.sum(dtype=np.int64))
    if ids_path.stat().st_size != tokens * dtype.itemsize:
        found, wanted = ids_path.stat().st_size, tokens * dtype.itemsize
        raise TextmillError(f"{ids_path}: {found:,} bytes instead of {wanted:,}; it is not the index's pair")
    ids = np.memmap(ids_path, dtype, "r") if tokens else np.zeros(0, dtype)
    return TokenStore(prefix, ids, lengths, documents)


class StoreWriter:
    """Writes a store as a stream; the pair appears under its name only when closed without an error."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        if self.dtype not in CODES:
            raise TextmillError(f"{prefix}: token ids of dtype {dtype} have no code in the store's format")
        self.largest = int(np.iinfo(self.dtype).max)
        self.lengths: list[NDArray[np.int32]] = []
        self.documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self.sequences = 0
        self._ids: BinaryIO = open(self._temporary(".bin"), "wb")

    def add(self, sequences: Sequence[Any]) -> None:
        """Add documents of one sequence each."""
        if not len(sequences):
            return
        lengths = np.fromiter((len(sequence) for sequence in sequences), np.int64, len(sequences))
        flat = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
        self.add_flat(flat, lengths)

    def add_flat(self, ids: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Add documents of one sequence each, given as one array of ids and their lengths."""
        if len(ids) and (int(ids.max()) > self.largest or int(ids.min()) < 0):
            worst = int(ids.max()) if int(ids.max()) > self.largest else int(ids.min())
            raise TextmillError(f"{self.prefix}: token id {worst} does not fit {self.dtype}; the store was made for a smaller vocabulary")
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise TextmillError(f"{self.prefix}: a document of {int(np.max(lengths)):,} tokens; the format holds 2,147,483,647 at most")
        self._ids.write(ids.astype(self.dtype, copy=False).tobytes())
        self.lengths.append(np.asarray(lengths, np.int32))
        self.documents.append(np.arange(self.sequences + 1, self.sequences + len(lengths) + 1, dtype=np.int64))
        self.sequences += len(lengths)

    def add_store(self, store: TokenStore) -> None:
        """Add another store as it is, in blocks."""
        if store.ids.dtype != self.dtype:
            raise TextmillError(f"{store.prefix}: {store.ids.dtype}, {self.prefix}: {self.dtype}; only stores of one dtype can be joined")
        step = max(1, COPY_BLOCK // self.dtype.itemsize)
        for start in range(0, store.tokens, step):
            self._ids.write(store.ids[start : start + step].tobytes())
        self.lengths.append(np.array(store.lengths))
        self.documents.append(np.array(store.documents[1:]) + self.sequences)
        self.sequences += len(store)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._ids.flush()
            os.fsync(self._ids.fileno())
        finally:
            self._ids.close()
        if kind is not None:
            self._temporary(".bin").unlink()
            return
        with open(self._temporary(".idx"), "wb") as index:
            index.writelines(self._index())
            index.flush()
            os.fsync(index.fileno())
        index_path, ids_path = _paths(self.prefix)
        # The ids first: a pair with an index is a whole pair.
        os.replace(self._temporary(".bin"), ids_path)
        os.replace(self._temporary(".idx"), index_path)

    def _index(self) -> Iterable[bytes]:
        lengths = np.concatenate([*self.lengths, np.zeros(0, np.int32)])
        documents = np.concatenate(self.documents)
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
        yield HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(documents))
        yield lengths.astype("<i4").tobytes()
        yield (offsets * self.dtype.itemsize).astype("<i8").tobytes()
        yield documents.astype("<i8").tobytes()

    def _temporary(self, ending: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.tmp-{os.getpid()}{ending}")


def _paths(prefix: Path) -> tuple[Path, Path]:
    """The index and the ids of a prefix; a name may hold dots, so no suffix is replaced."""
    return prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
