"""N-grams of words as 64-bit hashes, and an index that finds those of evaluation data in documents.

A word is a run of letters, digits and underscores in lower case, as in Megatron-LM; in scripts without spaces (kana,
Han) it is one character. A key is the hash of an n-gram. With n = 3, "The mill stands still." has the keys of "the mill
stands" and "mill stands still"; a text of fewer than n words is one key, if it has enough words to be recognised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.clean.filters import Words, unspaced_ranges
from textmill.corpus.dedup.shingles import BASE, hash_windows

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
GROUP_CHARACTERS = 1 << 18
"""Texts are hashed in groups of about this many characters, whose arrays fit into a CPU's cache."""
MIN_BITS = 16
MAX_BITS = 27
SPARSE_BITS = 5
"""A table of `NgramIndex` has 2 to the power of so many bytes: so many bits more than the number of its keys."""
_LETTER = 1
_OWN_WORD = 2


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, Numbers]:
    """A hash of each word of all texts, in order, and the number of words of each text."""
    lowered = [text.lower() for text in texts]
    joined = "\n".join(lowered)
    if joined.isascii():
        codes: NDArray[np.uint8] | NDArray[np.uint32] = np.frombuffer(joined.encode(), np.uint8)
        inside = _ascii_letters()[codes]
        begins = inside.copy()
        ends = inside.copy()
        begins[1:] &= ~inside[:-1]
        ends[:-1] &= ~inside[1:]
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        kinds = _character_kinds()[codes]
        inside = kinds != 0
        alone = kinds == _OWN_WORD
        begins = inside.copy()
        ends = inside.copy()
        begins[1:] &= ~inside[:-1] | alone[:-1] | alone[1:]
        ends[:-1] &= ~inside[1:] | begins[1:]
    starts = np.flatnonzero(begins)
    words = Words(codes, starts, np.flatnonzero(ends) + 1 - starts)
    bounds = np.cumsum([0, *(len(text) + 1 for text in lowered)])
    return words.hashes(), np.diff(np.searchsorted(starts, bounds))


@cache
def _ascii_letters() -> NDArray[np.bool_]:
    return np.array([chr(code).isalnum() or chr(code) == "_" for code in range(128)])


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """A table from code point to kind: a letter or digit, a word of its own, or other."""
    kinds = np.fromiter((chr(code).isalnum() for code in range(sys.maxunicode + 1)), np.uint8, sys.maxunicode + 1)
    kinds[ord("_")] = _LETTER
    for first, last in unspaced_ranges():
        kinds[first : last + 1] *= _OWN_WORD
    return kinds


def windows_of(hashes: Hashes, lengths: Sequence[int]) -> Iterator[tuple[int, Hashes]]:
    """For each length, in ascending order: a hash of every run of so many words, also across the ends of texts."""
    shortest = min(lengths, default=0)
    windows = hash_windows(hashes, shortest) if shortest else hashes
    for length in range(shortest, max(lengths, default=0) + 1):
        if length > len(hashes):
            return
        if length > shortest:  # one word more
            windows = windows[:-1] * BASE + hashes[length - 1 :]
        if length in lengths:
            yield length, windows


def text_keys(texts: Sequence[str], n: int, least: int) -> Iterator[tuple[int, Hashes, Numbers]]:
    """The keys of evaluation texts by their length in words, with the number of the text of each: all n-grams; a text
    of fewer words, but at least `least`, is one key."""
    hashes, counts = word_hashes(texts)
    text_of_word = np.repeat(np.arange(len(counts)), counts)
    for length, windows in windows_of(hashes, range(min(least, n), n + 1)):
        text_of_window = text_of_word[: len(windows)]
        is_key = text_of_window == text_of_word[length - 1 :]  # the window ends in the text in which it begins
        if length < n:
            is_key &= counts[text_of_window] == length
        yield length, windows[is_key], text_of_window[is_key]


@dataclass(frozen=True)
class NgramIndex:
    """The keys of evaluation data, sorted, and the length of each in words."""

    keys: Hashes
    lengths: NDArray[np.uint8]

    @cached_property
    def _tables(self) -> dict[int, tuple[int, NDArray[np.bool_]]]:
        """By length: a number of bits, and whether any key starts with these bits; so most n-grams need no search."""
        tables = {}
        for length in np.unique(self.lengths).tolist():
            keys = self.keys[self.lengths == length]
            shift = 64 - min(MAX_BITS, max(MIN_BITS, len(keys).bit_length() + SPARSE_BITS))
            table = np.zeros(1 << (64 - shift), np.bool_)
            table[(keys >> np.uint64(shift)).view(np.int64)] = True
            tables[length] = shift, table
        return tables

    def find(self, texts: Sequence[str]) -> tuple[Numbers, Numbers]:
        """The pairs of a text and a key that it contains, without repeats: numbers of texts, numbers of keys."""
        blocks = [np.zeros((0, 2), np.int64)]
        for first_text, group in _groups(texts):
            hashes, counts = word_hashes(group)
            text_ends = np.cumsum(counts)
            for length, windows in windows_of(hashes, list(self._tables)):
                shift, table = self._tables[length]
                starts = np.flatnonzero(table[(windows >> np.uint64(shift)).view(np.int64)])  # of possible hits
                keys = np.minimum(np.searchsorted(self.keys, windows[starts]), len(self.keys) - 1)
                text_numbers = np.searchsorted(text_ends, starts, "right")
                is_inside_text = starts + length <= text_ends[text_numbers]
                is_hit = (self.keys[keys] == windows[starts]) & is_inside_text
                blocks.append(np.stack([text_numbers[is_hit] + first_text, keys[is_hit]], axis=1))
        pairs = np.unique(np.concatenate(blocks), axis=0)
        return pairs[:, 0], pairs[:, 1]


def _groups(texts: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """The texts in groups of about GROUP_CHARACTERS, each with the number of its first text."""
    start = characters = 0
    for number, text in enumerate(texts):
        characters += len(text)
        if characters >= GROUP_CHARACTERS:
            yield start, texts[start : number + 1]
            start = number + 1
            characters = 0
    if start < len(texts):
        yield start, texts[start:]
