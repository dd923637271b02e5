"""MinHash sketches and LSH bands, which find similar documents without comparing all pairs.

A sketch is a row of numbers per document; in each place two documents agree with a probability equal to their Jaccard
similarity s. The row is divided into bands of r numbers. Documents that agree in a complete band are candidates: a band
agrees with probability s^r, at least one of b bands with 1 - (1 - s^r)^b. With the 29 bands of 8 rows that
`choose_bands` finds for a threshold of 0.8, documents with a similarity of 0.8 become candidates with a probability of
99.5%, those of 0.5 with 11%, those of 0.3 with 0.2%.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.shingles import Hashes
from textmill.counters import mix
from textmill.ranges import expand_ranges

MIN_RECALL = 0.995
"""Two documents with a similarity equal to the threshold share a band with at least this probability."""
MAX_SKETCH_SIZE = 256
"""Most values in a sketch, which is bands x rows per band. More rows give fewer false candidates."""
MAX_ROUNDS = 16
"""Rounds that hash every shingle into a slot; slots that are empty after them are filled one by one."""
EMPTY = np.uint64(2**64 - 1)
"""The value of a slot that no shingle has been hashed into yet."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Multiplied by the number of a round or slot, this gives the seed of its hash function (as in SplitMix64)."""
_MAX_HASHES_AT_ONCE = 1 << 20


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return the number of bands, and the most rows per band with which MIN_RECALL holds at this Jaccard similarity."""
    for rows in range(MAX_SKETCH_SIZE, 1, -1):
        miss_probability = 1 - threshold**rows
        if miss_probability <= 0:
            bands = 1
        elif miss_probability < 1:
            bands = math.ceil(math.log(1 - MIN_RECALL) / math.log(miss_probability))
        else:
            bands = MAX_SKETCH_SIZE
        if rows * bands <= MAX_SKETCH_SIZE:
            return bands, rows
    return math.ceil(math.log(1 - MIN_RECALL) / math.log(1 - threshold)), 1


def recall_at(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two sets of this Jaccard similarity have at least one equal band."""
    return float(1 - (1 - similarity**rows) ** bands)


def band_hashes(hashes: Hashes, counts: NDArray[np.int64], bands: int, rows: int) -> Hashes:
    """Return the band hashes [documents, bands]; the first `counts[0]` of the shingle `hashes` belong to document 0."""
    values = sketch(hashes, counts, bands * rows).reshape(len(counts), bands, rows)
    combined = np.zeros((len(counts), bands), dtype=np.uint64)
    for row in range(rows):
        combined = mix(combined + values[:, :, row])
    return combined


def sketch(hashes: Hashes, counts: NDArray[np.int64], size: int) -> Hashes:
    """Return a sketch [documents, size]; two documents have an equal value with a probability of their similarity.

    Fast similarity sketching (Dahlgaard, Knudsen, Thorup 2017): each round hashes every shingle into one of `size`
    slots. The first round that fills a slot decides its value: the smallest hash of that round. A long text fills all
    slots in one round, so it needs one hash per shingle.
    """
    values = np.full((len(counts), size), EMPTY)
    rows = np.arange(len(counts))
    for round_number in range(MAX_ROUNDS):
        hashed = mix(hashes + np.uint64(round_number * _SEED_STEP % 2**64)) if round_number else hashes
        slot_indices = ((hashed >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        slot_indices += np.repeat(np.arange(0, len(rows) * size, size), counts)
        minima = np.full(len(rows) * size, EMPTY)
        np.minimum.at(minima, slot_indices, hashed)
        current = values[rows]
        current = np.where(current == EMPTY, minima.reshape(current.shape), current)
        values[rows] = current
        is_unfinished = (current == EMPTY).any(axis=1)
        hashes = hashes[np.repeat(is_unfinished, counts)]
        rows = rows[is_unfinished]
        counts = counts[is_unfinished]
        if not len(rows):
            return values
    values[rows] = _fill_empty(values[rows], hashes, counts)
    return values


def _fill_empty(values: Hashes, hashes: Hashes, counts: NDArray[np.int64]) -> Hashes:
    """Fill each empty slot with the smallest hash of all shingles, under a hash function of this slot."""
    starts = np.cumsum(counts) - counts
    documents, slots = np.nonzero(values == EMPTY)
    total_hashes = np.cumsum(counts[documents])
    for batch in np.split(np.arange(len(documents)), np.flatnonzero(np.diff(total_hashes // _MAX_HASHES_AT_ONCE)) + 1):
        lengths = counts[documents[batch]]
        first = np.cumsum(lengths) - lengths
        index = expand_ranges(starts[documents[batch]], lengths)
        salts = mix((slots[batch] + MAX_ROUNDS).astype(np.uint64) * np.uint64(_SEED_STEP))
        rehashed = mix(hashes[index] ^ np.repeat(salts, lengths))
        values[documents[batch], slots[batch]] = np.minimum.reduceat(rehashed, first)
    return values
