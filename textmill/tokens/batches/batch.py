"""Batch: the numpy arrays that every layout builds and every engine consumes; and what the layouts share.

How some layouts turn the documents [1 2 3 0] and [4 5 0] into samples of 4 tokens, or 8 (- is -100, p is padding):

    packed (packed.py)   inputs [1 2 3 0] [4 5 0 ...]        labels [2 3 0 4] [5 0 ...]
    padded (padded.py)   inputs [1 2 3 0] [4 5 0 p]          labels [2 3 0 -] [5 0 - -]
    masked (masked.py)   inputs [CLS 1 MASK 3 SEP p p p]     labels [- - 2 - - - - -]

The chat, features and labelled layouts have files of their own too; loader.py chooses one by `train.layout`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.counters import hash_numbers
from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer, file_lock, hash_json
from textmill.tokens.store import TokenStore, advise

Numbers = NDArray[np.int64]
IGNORED = -100
"""The label of a position without loss (PyTorch's `ignore_index`)."""
OPTIONAL_FIELDS = ("documents", "types", "pair_labels")
"""Fields of a Batch that only some layouts fill; a model family declares those that it uses as BATCH_FIELDS."""
SHUFFLE_ROUNDS = 6
MAX_IN_MEMORY = 1 << 20
"""Most prefix sums held in memory (8 MiB)."""
BLOCK = 1 << 18
"""Documents whose prefix sums are computed at a time."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step."""

    inputs: NDArray[np.int32]
    """[samples, length]: token ids."""
    labels: NDArray[np.int32]
    """[samples, length]: the token to predict at each position; -100: no loss.

    next_token: already shifted, so labels[t] is the token after inputs[t]. masked: at a masked position, the token that
    was there."""
    samples: Numbers
    """[samples]: the number of each sample, counted from the start of the run; used for dropout and lineage."""
    documents: NDArray[np.int32] | None = None
    """[samples, length]: which document, or which of several packed sentence pairs, a position belongs to: 1, 2 ...;
    0 is padding."""
    types: NDArray[np.int32] | None = None
    """[samples, length]: the segment of a sentence pair, 0 or 1."""
    pair_labels: NDArray[np.int32] | None = None
    """[samples, length]: at the first position of each packed pair its class (next sentence, order); -100 elsewhere."""


class Layout(Protocol):
    """Turns the documents of one store into samples; a sample is a pure function of store, settings and its number."""

    store: TokenStore
    """Its files are checked before each batch: one that is truncated while it is mapped would kill the process."""
    samples_per_epoch: int

    def build_samples(self, samples: Numbers) -> Batch:
        """The samples with these numbers; number `samples_per_epoch` is the first of the second epoch."""
        ...

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) for every document in these samples: its place among them, and its number in the store."""
        ...


def objectives_of(layout: str) -> tuple[str, ...]:
    """What a net can learn from the labels of a layout: next_token, masked or labels."""
    return {"masked": ("masked",), "labelled": ("labels",)}.get(layout, ("next_token",))


def gather_ranges(ids: NDArray[Any], starts: Numbers, counts: Numbers) -> NDArray[np.int32]:
    """Concatenate the ranges ids[start : start + count]."""
    gathered: NDArray[np.int32] = ids[expand_ranges(starts, counts)].astype(np.int32)
    return gathered


def check_ids(ids: NDArray[np.int32], vocab: int | None, where: object) -> None:
    """Raise an error if an id is outside the vocabulary, before it reaches an engine."""
    if vocab is not None and len(ids) and (int(ids.max()) >= vocab or int(ids.min()) < 0):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise TextmillError(
            f"{where}: contains token id {wrong}, but the tokenizer's vocabulary has {vocab:,} tokens; "
            f"set the tokenizer that made these ids: tokenizer.use=FOLDER"
        )


def number_spans(rows: Numbers) -> NDArray[np.int32]:
    """Number the spans of each row 1, 2, 3 ...; `rows` is the row of each span, in ascending order.

    [0 0 1 1 1] -> [1 2 1 2 3]
    """
    first = np.searchsorted(rows, rows, side="left")
    return (np.arange(len(rows)) - first + 1).astype(np.int32)


def shuffle_in_epoch(samples: Numbers, count: int, seed: int | None, *key: int) -> Numbers:
    """The item of each sample in its epoch of `count` items; each epoch has its own order. No seed: not shuffled."""
    positions = samples % count
    epochs = samples // count
    if seed is not None:
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            positions[rows] = permute(count, positions[rows], seed, *key, epoch)
    return positions


def permute(count: int, positions: Numbers, *key: int) -> Numbers:
    """The items at these positions in a random permutation of range(count), which is never held in memory.

    The key selects the permutation. `permute(5, np.arange(5), seed)` has each of 0 to 4 once;
    `permute(5, np.array([2]), seed)` is its third number.
    """
    bits = max(1, (count - 1).bit_length())
    keys = _round_keys(*key)
    items = _mix(positions.astype(np.uint64), bits, keys)
    # _mix permutes a power of two (cycle walking): a result outside the range is mixed again until it is inside.
    outside = np.flatnonzero(items >= count)
    while len(outside):
        items[outside] = _mix(items[outside], bits, keys)
        outside = outside[items[outside] >= count]
    return items.astype(np.int64)


@lru_cache(maxsize=64)
def _round_keys(*key: int) -> list[int]:
    return [hash_numbers(*key, number) for number in range(SHUFFLE_ROUNDS)]


def _mix(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A bijection on numbers of `bits` bits: each round multiplies by an odd number, adds, and XORs the high half."""
    mask = np.uint64((1 << bits) - 1)
    half = np.uint64((bits + 1) // 2)
    for key in keys:
        values = values * np.uint64(key | 1)
        values += np.uint64(key >> 7)
        values &= mask
        values ^= values >> half
    return values


def prefix_sums(
    store: TokenStore,
    count_at: Callable[[NDArray[Any], Numbers], Numbers],
    folder: Path | None,
    epoch: int,
    *settings: int | str,
) -> Numbers:
    """For each i the sum of `count_at(document lengths, positions)` over the positions 0 to i: 4, 3, 5 -> [4, 7, 12].

    The sums of many documents are a cache file in `folder`; `settings` are all that the counts depend on.
    """

    def blocks() -> Iterator[Numbers]:
        lengths = store.document_lengths()
        before = 0
        for start in range(0, len(store), BLOCK):
            positions = np.arange(start, min(start + BLOCK, len(store)), dtype=np.int64)
            sums = before + np.cumsum(count_at(lengths, positions), dtype=np.int64)
            before = int(sums[-1])
            yield sums

    if folder is None or len(store) <= MAX_IN_MEMORY:
        return cached_array(None, np.int64, blocks)
    name = f"{store.prefix.name}-{cache_key(store, *settings)}"
    sums = cached_array(folder / f"{name}-{epoch}.sums", np.int64, blocks)
    for old in folder.glob(f"{glob.escape(name)}-*.sums"):
        if int(old.stem.rpartition("-")[2]) < epoch - 1:  # a process that still maps it can go on using it
            old.unlink(missing_ok=True)
    advise(sums, random=True)
    return sums


def cache_key(store: TokenStore, *settings: object) -> str:
    """A hash of a store, the documents of it, and settings."""
    stat = store.index.path.stat()
    documents = [store.first_document, store.document_count]
    return hash_json([str(store.prefix.resolve()), stat.st_size, stat.st_mtime_ns, *documents, *settings])[:20]


def cached_array(path: Path | None, dtype: Any, blocks: Callable[[], Iterable[NDArray[Any]]]) -> NDArray[Any]:
    """The blocks as one flat array: in memory, or memory-mapped from a file that one process writes and all share."""
    if path is None:
        return np.concatenate([np.zeros(0, dtype), *(block.ravel() for block in blocks())])
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name("lock"), None):
        if not path.exists():
            with atomic_writer(path) as stream:
                for block in blocks():
                    stream.write(np.ascontiguousarray(block, dtype).data)
    return np.memmap(path, dtype, "r")
