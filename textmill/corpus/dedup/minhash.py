"""Short sketches of shingle sets whose bands agree with a known chance, so that near-duplicates meet without all pairs being tried."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.shingles import Hashes
from textmill.counters import mix

MIN_RECALL = 0.995
"""The chance that two documents exactly at the threshold agree in a band; those above it have a better one."""
MAX_SKETCH_SIZE = 256
"""At most so many values in a sketch: more rows a band mean fewer candidates that are none."""
MAX_ROUNDS = 16
"""Turns in which every shingle is thrown into one place; what is empty then is filled place by place."""
EMPTY = np.uint64(2**64 - 1)
_STEP = 0x9E3779B97F4A7C15
_MAX_HASHES_AT_ONCE = 1 << 20


def choose_bands(threshold: float) -> tuple[int, int]:
    """Bands and rows in a band: as many rows as RECALL at this Jaccard similarity allows within VALUES."""
    for rows in range(MAX_SKETCH_SIZE, 1, -1):
        miss_probability = 1 - threshold**rows
        bands = (
            1
            if miss_probability <= 0
            else math.ceil(math.log(1 - MIN_RECALL) / math.log(miss_probability))
            if miss_probability < 1
            else MAX_SKETCH_SIZE
        )
        if rows * bands <= MAX_SKETCH_SIZE:
            return bands, rows
    return math.ceil(math.log(1 - MIN_RECALL) / math.log(1 - threshold)), 1


def recall_at(similarity: float, bands: int, rows: int) -> float:
    """The chance that two sets of this Jaccard similarity agree in at least one band."""
    return float(1 - (1 - similarity**rows) ** bands)


def band_hashes(hashes: Hashes, counts: NDArray[np.int64], bands: int, rows: int) -> Hashes:
    """A row of hashes, one a band, for each document; its shingles stand in `hashes`, `counts` of them."""
    values = sketch(hashes, counts, bands * rows).reshape(len(counts), bands, rows)
    combined = np.zeros((len(counts), bands), dtype=np.uint64)
    for row in range(rows):
        combined = mix(combined + values[:, :, row])
    return combined


def sketch(hashes: Hashes, counts: NDArray[np.int64], size: int) -> Hashes:
    """For each document `size` values, each equal between two documents with their Jaccard similarity as its chance.

    Fast similarity sketching (Dahlgaard, Knudsen, Thorup 2017): each turn throws every shingle into one of `size` places and
    the least value of a place stays, unless an earlier turn filled it. A long text needs one turn, that is one hash a shingle.
    """
    values = np.full((len(counts), size), EMPTY)
    rows = np.arange(len(counts))
    for round_number in range(MAX_ROUNDS):
        hashed = mix(hashes + np.uint64(round_number * _STEP % 2**64)) if round_number else hashes
        slot = ((hashed >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        slot += np.repeat(np.arange(0, len(rows) * size, size), counts)
        minima = np.full(len(rows) * size, EMPTY)
        np.minimum.at(minima, slot, hashed)
        current = values[rows]
        current = np.where(current == EMPTY, minima.reshape(current.shape), current)
        values[rows] = current
        is_unfinished = (current == EMPTY).any(axis=1)
        hashes, rows, counts = hashes[np.repeat(is_unfinished, counts)], rows[is_unfinished], counts[is_unfinished]
        if not len(rows):
            return values
    values[rows] = _fill_empty(values[rows], hashes, counts)
    return values


def _fill_empty(values: Hashes, hashes: Hashes, counts: NDArray[np.int64]) -> Hashes:
    """Every place that is still empty takes the least of all shingles, hashed anew for that place."""
    starts = np.cumsum(counts) - counts
    documents, slots = np.nonzero(values == EMPTY)
    task = np.cumsum(counts[documents])
    for batch in np.split(np.arange(len(documents)), np.flatnonzero(np.diff(task // _MAX_HASHES_AT_ONCE)) + 1):
        lengths = counts[documents[batch]]
        first = np.cumsum(lengths) - lengths
        index = np.repeat(starts[documents[batch]] - first, lengths) + np.arange(int(lengths.sum()))
        salts = mix((slots[batch] + MAX_ROUNDS).astype(np.uint64) * np.uint64(_STEP))
        rehashed = mix(hashes[index] ^ np.repeat(salts, lengths))
        values[documents[batch], slots[batch]] = np.minimum.reduceat(rehashed, first)
    return values
