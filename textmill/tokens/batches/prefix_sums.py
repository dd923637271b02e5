"""Prefix sums over documents: in memory for small stores, else in a cache file that every process memory-maps."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.storage.files import file_lock, hash_json
from textmill.tokens.mmap_advice import advise
from textmill.tokens.store import TokenStore

MAX_IN_MEMORY = 1 << 20
"""Most prefix sums held in memory (8 MiB)."""
BLOCK = 1 << 18
"""Documents processed at a time."""

CountAt = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Maps positions to the number that each position adds to the sum."""


def prefix_sums(count: int, build_counts: Callable[[], CountAt], path: Path | None) -> NDArray[np.int64]:
    """For each i the sum over positions 0 to i: counts 4, 3, 5 -> [4, 7, 12].

    The counts come from the function that `build_counts` returns; it is called only if `path` does not exist yet.
    """
    if count <= MAX_IN_MEMORY or path is None:
        sums = np.empty(count, np.int64)
        _fill(sums, build_counts())
        return sums
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name("lock"), None):
        if not path.exists():
            temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            written = np.memmap(temporary, np.int64, "w+", shape=(count,))
            _fill(written, build_counts())
            written.flush()
            os.replace(temporary, path)
            _delete_old_epochs(path)
    sums = np.memmap(path, np.int64, "r", shape=(count,))
    advise(sums, random=True)
    return sums


def _fill(sums: NDArray[np.int64], count_at: CountAt) -> None:
    before = 0
    for start in range(0, len(sums), BLOCK):
        block = sums[start : start + BLOCK]
        np.cumsum(count_at(np.arange(start, start + len(block), dtype=np.int64)), out=block)
        block += before
        before = int(block[-1])


def _delete_old_epochs(path: Path) -> None:
    """Delete files of epochs before the previous one; a process that still maps such a file can go on using it."""
    name, _, epoch = path.stem.rpartition("-")
    for old in path.parent.glob(f"{glob.escape(name)}-*{path.suffix}"):
        if int(old.stem.rpartition("-")[2]) < int(epoch) - 1:
            old.unlink(missing_ok=True)


def prefix_sums_path(folder: Path | None, store: TokenStore, epoch: int, *settings: int | str) -> Path | None:
    """The cache file; its name depends on the store, the documents of it, the epoch and the settings."""
    if folder is None:
        return None
    stat = store.index.path.stat()
    documents = [store.first_document, store.document_count]
    key = hash_json([str(store.prefix.resolve()), stat.st_size, stat.st_mtime_ns, *documents, *settings])
    return folder / f"{store.prefix.name}-{key[:20]}-{epoch}.sums"
