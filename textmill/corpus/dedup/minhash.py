"""Shingles, MinHash sketches and LSH bands, which find similar documents without comparing all pairs.

A shingle is a hash of a run of n characters or n words. With n = 2 words, "The mill turns. The mill" has the shingles
"the mill", "mill turns.", "turns. the" and "the mill" again. The Jaccard similarity of two texts is the number of
shingles that both have, divided by that of all.

A sketch is a row of numbers per document; in each place two documents agree with a probability equal to their Jaccard
similarity s. The row is divided into bands of r numbers. Documents that agree in a complete band are candidates: a band
agrees with probability s^r, at least one of b bands with 1 - (1 - s^r)^b. With the 29 bands of 8 rows that
`choose_bands` finds for a threshold of 0.8, documents with a similarity of 0.8 become candidates with a probability of
99.5%, those of 0.5 with 11%, those of 0.3 with 0.2%.

Libraries such as rensa and datasketch hash the shingles that they are given, one document at a time, and keep their
index in memory: splitting texts into shingles, sorting on disk and the true similarity would remain to be written.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from textmill.counters import mix
from textmill.ranges import expand_ranges

Unit = Literal["characters", "words"]
Hashes = NDArray[np.uint64]
SEGMENT_CHARACTERS = 1 << 20
"""A longer document is shingled in segments; the n-1 shingles across each boundary are left out."""
BASE = np.uint64(0xD6E8FEB86659FD93)
"""The factor of polynomial hashes."""
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


def shingle(texts: Sequence[str], unit: Unit, n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The shingle hashes of all texts, in order and with repeats, and the number per text (at least 1).

    Texts are normalised first: NFC, case-folded, each run of white space one space. A text shorter than n is one
    shingle.
    """
    points, lengths = _normalise(texts)
    if unit == "words":
        units, lengths = _words(points, lengths)
    else:
        units = points.astype(np.uint64)
    units, lengths = _pad(units, lengths, n)
    ends = np.cumsum(lengths)
    is_inside = np.ones(len(units), dtype=np.bool_)
    for distance in range(1, n):
        is_inside[ends - distance] = False
    return mix(hash_windows(units, n)[is_inside[: len(units) - n + 1]]), lengths - (n - 1)


def shingle_set(text: str, unit: Unit, n: int) -> Hashes:
    """The distinct shingles of one text, sorted; a long text is processed in segments."""
    parts = [text[start : start + SEGMENT_CHARACTERS] for start in range(0, max(len(text), 1), SEGMENT_CHARACTERS)]
    if len(parts) == 1:
        return distinct(shingle(parts, unit, n)[0])
    return distinct(np.concatenate([distinct(shingle([part], unit, n)[0]) for part in parts]))


def distinct(hashes: Hashes) -> Hashes:
    """The distinct values, sorted."""
    hashes = np.sort(hashes)
    first = np.ones(len(hashes), dtype=np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=first[1:])
    return hashes[first]


def jaccard(first_set: Hashes, second_set: Hashes) -> float:
    """The Jaccard similarity of two shingle sets: shared shingles divided by all shingles."""
    merged = np.concatenate((first_set, second_set))
    merged.sort(kind="stable")  # a merge of two sorted runs
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return common / (len(merged) - common)


def _normalise(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The concatenated code points of all normalised texts, and the length of each."""
    folded = [" ".join(_fold(text).split()) for text in texts]
    points = np.frombuffer("".join(folded).encode("utf-32-le", "surrogatepass"), np.uint32)
    return points, np.array([len(text) for text in folded], dtype=np.int64)


def _fold(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text).casefold()


def _words(points: NDArray[np.uint32], lengths: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """A hash of each word (a run without spaces), and the number of words per text."""
    ends = np.cumsum(lengths)
    is_letter = points != 32
    first = np.zeros(len(points), dtype=np.bool_)
    first[1:] = ~is_letter[:-1]
    first[(ends - lengths)[lengths > 0]] = True
    words_before = np.concatenate(([0], np.cumsum(first)))
    points = points[is_letter]
    starts = np.flatnonzero(first[is_letter])
    position = np.arange(1, len(points) + 1) - np.repeat(starts, np.diff(np.append(starts, len(points))))
    hashes = mix(points.astype(np.uint64) + (position.astype(np.uint64) << np.uint64(32)))
    return np.add.reduceat(hashes, starts) if len(starts) else hashes, words_before[ends] - words_before[ends - lengths]


def _pad(units: Hashes, lengths: NDArray[np.int64], n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Pad texts shorter than n with zeros to length n."""
    missing = np.maximum(n - lengths, 0)
    if missing.any():
        units = np.insert(units, np.repeat(np.cumsum(lengths), missing), np.uint64(0))
    return units, lengths + missing


def hash_windows(units: Hashes, n: int) -> Hashes:
    """A polynomial hash of the n units that start at each position."""
    windows = units
    for width in range(1, n):
        windows = windows[:-1] * BASE + units[width:]
    return windows


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
