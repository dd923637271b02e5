"""Short sketches of shingle sets whose bands agree with a known chance, so that near-duplicates meet without all pairs being tried."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.shingles import Hashes
from textmill.counters import mix

RECALL = 0.995
"""The chance that two documents exactly at the threshold agree in a band; those above it have a better one."""
VALUES = 256
"""At most so many values in a sketch: more rows a band mean fewer candidates that are none."""
TURNS = 16
"""Turns in which every shingle is thrown into one place; what is empty then is filled place by place."""
EMPTY = np.uint64(2**64 - 1)
_STEP = 0x9E3779B97F4A7C15
_AT_ONCE = 1 << 20


def bands_for(threshold: float) -> tuple[int, int]:
    """Bands and rows in a band: as many rows as RECALL at this Jaccard similarity allows within VALUES."""
    for rows in range(VALUES, 1, -1):
        miss = 1 - threshold**rows
        bands = 1 if miss <= 0 else math.ceil(math.log(1 - RECALL) / math.log(miss)) if miss < 1 else VALUES
        if rows * bands <= VALUES:
            return bands, rows
    return math.ceil(math.log(1 - RECALL) / math.log(1 - threshold)), 1


def recall_at(similarity: float, bands: int, rows: int) -> float:
    """The chance that two sets of this Jaccard similarity agree in at least one band."""
    return float(1 - (1 - similarity**rows) ** bands)


def band_hashes(hashes: Hashes, counts: NDArray[np.int64], bands: int, rows: int) -> Hashes:
    """A row of hashes, one a band, for each document; its shingles stand in `hashes`, `counts` of them."""
    values = sketch(hashes, counts, bands * rows).reshape(len(counts), bands, rows)
    folded = np.zeros((len(counts), bands), dtype=np.uint64)
    for row in range(rows):
        folded = mix(folded + values[:, :, row])
    return folded


def sketch(hashes: Hashes, counts: NDArray[np.int64], size: int) -> Hashes:
    """For each document `size` values, each equal between two documents with their Jaccard similarity as its chance.

    Fast similarity sketching (Dahlgaard, Knudsen, Thorup 2017): each turn throws every shingle into one of `size` places and
    the least value of a place stays, unless an earlier turn filled it. A long text needs one turn, that is one hash a shingle.
    """
    values = np.full((len(counts), size), EMPTY)
    rows = np.arange(len(counts))
    for turn in range(TURNS):
        thrown = mix(hashes + np.uint64(turn * _STEP % 2**64)) if turn else hashes
        place = ((thrown >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        place += np.repeat(np.arange(0, len(rows) * size, size), counts)
        fresh = np.full(len(rows) * size, EMPTY)
        np.minimum.at(fresh, place, thrown)
        here = values[rows]
        here = np.where(here == EMPTY, fresh.reshape(here.shape), here)
        values[rows] = here
        wanting = (here == EMPTY).any(axis=1)
        hashes, rows, counts = hashes[np.repeat(wanting, counts)], rows[wanting], counts[wanting]
        if not len(rows):
            return values
    values[rows] = _fill(values[rows], hashes, counts)
    return values


def _fill(values: Hashes, hashes: Hashes, counts: NDArray[np.int64]) -> Hashes:
    """Every place that is still empty takes the least of all shingles, hashed anew for that place."""
    starts = np.cumsum(counts) - counts
    documents, places = np.nonzero(values == EMPTY)
    work = np.cumsum(counts[documents])
    for part in np.split(np.arange(len(documents)), np.flatnonzero(np.diff(work // _AT_ONCE)) + 1):
        lengths = counts[documents[part]]
        first = np.cumsum(lengths) - lengths
        index = np.repeat(starts[documents[part]] - first, lengths) + np.arange(int(lengths.sum()))
        salts = mix((places[part] + TURNS).astype(np.uint64) * np.uint64(_STEP))
        mixed = mix(hashes[index] ^ np.repeat(salts, lengths))
        values[documents[part], places[part]] = np.minimum.reduceat(mixed, first)
    return values
