"""Running sums over documents: in memory when they are few, else in a file that is made once and mapped by every process."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.storage.files import file_lock, hash_json
from textmill.tokens.mmap_advice import expect
from textmill.tokens.store import TokenStore

FEW = 1 << 20
"""Sums held in memory: 8 MiB of them."""
BLOCK = 1 << 18
"""Documents at a time."""

Amounts = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def running_sums(count: int, amounts: Callable[[], Amounts], path: Path | None) -> NDArray[np.int64]:
    """The sum of the amounts of places 0 to i, for every i; `amounts()` is called only when they must be made."""
    if count <= FEW or path is None:
        sums = np.empty(count, np.int64)
        _fill(sums, amounts())
        return sums
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name("lock"), None):
        if not path.exists():
            temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            made = np.memmap(temporary, np.int64, "w+", shape=(count,))
            _fill(made, amounts())
            made.flush()
            os.replace(temporary, path)
            _prune(path)
    sums = np.memmap(path, np.int64, "r", shape=(count,))
    expect(sums, scattered=True)
    return sums


def _fill(sums: NDArray[np.int64], amounts: Amounts) -> None:
    before = 0
    for start in range(0, len(sums), BLOCK):
        block = sums[start : start + BLOCK]
        np.cumsum(amounts(np.arange(start, start + len(block), dtype=np.int64)), out=block)
        block += before
        before = int(block[-1])


def _prune(path: Path) -> None:
    """Epochs go by in order: those before the last one are done with. Whoever still maps one keeps it until he lets go."""
    name, _, epoch = path.stem.rpartition("-")
    for old in path.parent.glob(f"{glob.escape(name)}-*{path.suffix}"):
        if int(old.stem.rpartition("-")[2]) < int(epoch) - 1:
            old.unlink(missing_ok=True)


def sums_path(folder: Path | None, store: TokenStore, epoch: int, *numbers: int | str) -> Path | None:
    """A file's name that says what its sums are of; another store, part of it, epoch or set of numbers has another."""
    if folder is None:
        return None
    stat = store.index.path.stat()
    facts = [str(store.prefix.resolve()), stat.st_size, stat.st_mtime_ns, store.first, store.count, *numbers]
    return folder / f"{store.prefix.name}-{hash_json(facts)[:20]}-{epoch}.sums"
