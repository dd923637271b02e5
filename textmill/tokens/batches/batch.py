"""Batch: the numpy arrays that every layout builds and every engine consumes.

How some layouts turn the documents [1 2 3 0] and [4 5 0] into samples of 4 tokens, or 8 (- is -100, p is padding):

    packed (packed.py)   inputs [1 2 3 0] [4 5 0 ...]        labels [2 3 0 4] [5 0 ...]
    padded (padded.py)   inputs [1 2 3 0] [4 5 0 p]          labels [2 3 0 -] [5 0 - -]
    masked (masked.py)   inputs [CLS 1 MASK 3 SEP p p p]     labels [- - 2 - - - - -]

The chat, features and labelled layouts have files of their own too; loader.py chooses one by `train.layout`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.counters import hash_numbers
from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.storage import faults
from textmill.storage.files import file_lock, hash_json
from textmill.tokens.store import TokenStore, advise

IGNORED = -100
"""The label of a position without loss (PyTorch's `ignore_index`)."""
OPTIONAL_FIELDS = ("documents", "types", "pair_labels", "weights")
"""Fields of a Batch that only some layouts fill; a model family declares those that it uses as BATCH_FIELDS."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step."""

    inputs: NDArray[np.int32]
    """[samples, length]: token ids."""
    labels: NDArray[np.int32]
    """[samples, length]: the token to predict at each position; -100: no loss.

    next_token: already shifted, so labels[t] is the token after inputs[t]. masked: at a masked position, the token that
    was there."""
    samples: NDArray[np.int64]
    """[samples]: the number of each sample, counted from the start of the run; used for dropout and lineage."""
    documents: NDArray[np.int32] | None = None
    """[samples, length]: which document, or which of several packed sentence pairs, a position belongs to: 1, 2 ...;
    0 is padding."""
    types: NDArray[np.int32] | None = None
    """[samples, length]: the segment of a sentence pair, 0 or 1."""
    pair_labels: NDArray[np.int32] | None = None
    """[samples, length]: at the first position of each packed pair its class (next sentence, order); -100 elsewhere."""
    weights: NDArray[np.float32] | None = None
    """[samples] or [samples, length]."""
    teacher_ids: NDArray[np.int32] | None = None
    """[samples, length, k]: distillation's most likely tokens, from a cache."""
    teacher_logs: NDArray[np.float32] | None = None
    """[samples, length, k + 1]: their log-probabilities, and that of all other tokens together."""
    multi_token_weight: float | None = None
    """With `train.multi_token`: the weight in this step of predicting also the token after each label."""


def inject_spike(batch: Batch, step: int) -> Batch:
    """The batch of a step, with wrong labels if that fault is due."""
    return corrupt_labels(batch) if faults.is_due("spike", step) else batch


def corrupt_labels(batch: Batch) -> Batch:
    """Replace every loss label by one token id that is wrong everywhere."""
    others = np.setdiff1d(np.arange(batch.labels.max() + 1), batch.labels)
    return replace(
        batch, labels=np.where(batch.labels == IGNORED, IGNORED, others[0] if len(others) else 0).astype(np.int32)
    )


OBJECTIVES = {"masked": ("masked",), "labelled": ("labels",)}
"""What a net can learn from the labels of a layout, by its name; from the others: next_token."""


def objectives_of(layout: str) -> tuple[str, ...]:
    """What a net can learn from the labels of a layout: next_token, masked or labels."""
    return OBJECTIVES.get(layout, ("next_token",))


@dataclass(frozen=True)
class SampleArrays:
    """Samples of one layout, with the arrays of `Batch`."""

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    documents: NDArray[np.int32] | None = None
    types: NDArray[np.int32] | None = None
    pair_labels: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class SampleDocuments:
    """Which documents are in which samples: one (row, document) pair for each."""

    rows: NDArray[np.int64]
    """The position of the sample among the requested ones."""
    documents: NDArray[np.int64]
    """The number of the document in its store."""


class Layout(Protocol):
    """Turns the documents of one store into samples."""

    samples_per_epoch: int

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """The samples with these numbers; number `samples_per_epoch` is the first of the second epoch."""
        ...

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The documents in these samples."""
        ...


def gather_ranges(ids: NDArray[Any], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
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


ROUNDS = 6


def permute(count: int, positions: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
    """The items at these positions in a random permutation of range(count); the key selects the permutation.

    `permute(5, np.arange(5), seed)` has each of 0 to 4 once; `permute(5, np.array([2]), seed)` is its third number.
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


def shuffle_in_epoch(samples: NDArray[np.int64], count: int, seed: int | None, *key: int) -> NDArray[np.int64]:
    """The item of each sample in its epoch of `count` items; each epoch has its own order. No seed: not shuffled."""
    positions = samples % count
    epochs = samples // count
    if seed is not None:
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            positions[rows] = permute(count, positions[rows], seed, *key, epoch)
    return positions


@lru_cache(maxsize=64)
def _round_keys(*key: int) -> list[int]:
    return [hash_numbers(*key, number) for number in range(ROUNDS)]


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
