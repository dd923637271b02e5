"""Measure what filters check: words, symbols, digits, repetition, and the URL of a web page."""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

NGRAM_WORDS = 10
"""Length of the word n-grams that are checked for repetition."""

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Kana and Han are written without spaces; each character counts as a word."""
_SPACE_BYTES, _DIGIT_BYTES, _SYMBOL_BYTES = (
    characters.encode() for characters in (string.whitespace, string.digits, string.punctuation)
)
_BLANK = 1
_DIGIT = 2
_SYMBOL = 4
_OWN_WORD = 8
"""Bits of the kind of a character; one that is a word of its own may be a symbol too."""
_FACTOR = 0x9E3779B97F4A7C15
_MIXER = 0xD1342543DE82EF95
"""Odd numbers: the factor of polynomial hashes, and one that mixes the bits of a hash."""
_CACHED_POWERS = 1 << 19
"""Texts of fewer characters share tables of powers."""
_LAST_COUNTED = 0x20000
"""Characters above this are no symbols, digits or white space."""


@dataclass(frozen=True, slots=True)
class CharacterFractions:
    """The fractions of symbols (with punctuation) and of digits among the characters that are not white space."""

    symbols: float
    digits: float


def character_fractions(text: str) -> CharacterFractions:
    """The fractions of symbols and digits in a text of any script."""
    if text.isascii():
        data = text.encode()
        total = len(data.translate(None, _SPACE_BYTES))
        digits = len(data) - len(data.translate(None, _DIGIT_BYTES))
        symbols = len(data) - len(data.translate(None, _SYMBOL_BYTES))
    else:
        kinds = _character_kinds()[codes_of(text)]
        blanks, digits, symbols = (int(np.count_nonzero(kinds & kind)) for kind in (_BLANK, _DIGIT, _SYMBOL))
        total = len(kinds) - blanks
    return CharacterFractions(symbols / max(total, 1), digits / max(total, 1))


def unspaced_ranges() -> list[tuple[int, int]]:
    """The first and last code points of scripts that are written without spaces."""
    return [(ord(first), ord(last)) for first, last in re.findall("(.)-(.)", _UNSPACED)]


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """A table from code point to kind: blank, digit, symbol, a word of its own, or other."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for first, last in unspaced_ranges():
        kinds[first : last + 1] = _OWN_WORD
    for code in range(_LAST_COUNTED):
        character = chr(code)
        category = unicodedata.category(character)
        if character.isspace():
            kinds[code] |= _BLANK
        elif category == "Nd":
            kinds[code] |= _DIGIT
        elif category[0] in "PS":
            kinds[code] |= _SYMBOL
    return kinds


def codes_of(text: str) -> NDArray[np.uint8] | NDArray[np.uint32]:
    """The code points of a text."""
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@dataclass(frozen=True, slots=True)
class Words:
    """Where the words of a text are: what is between white space; in scripts without spaces, each character."""

    codes: NDArray[np.uint8] | NDArray[np.uint32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def hashes(self) -> NDArray[np.uint64]:
        """A 64-bit hash of each word: a polynomial of its characters, mixed."""
        hashes = _hash_ranges(self.codes.astype(np.uint64) + np.uint64(1), self.starts, self.starts + self.lengths)
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(_MIXER)
        return hashes ^ (hashes >> np.uint64(29))


def find_words(text: str) -> Words:
    """Find the words of a text, without making a string of each."""
    codes = codes_of(text)
    kinds = _character_kinds()[codes]
    return find_runs(codes, (kinds & _BLANK) == 0, (kinds & _OWN_WORD) != 0)


def find_runs(
    codes: NDArray[np.uint8] | NDArray[np.uint32], inside: NDArray[np.bool_], alone: NDArray[np.bool_]
) -> Words:
    """The words: runs of characters that are `inside` a word; each one that is `alone` is a word of its own."""
    begins = inside.copy()
    ends = inside.copy()
    outside = ~inside
    begins[1:] &= outside[:-1] | alone[:-1] | alone[1:]
    ends[:-1] &= outside[1:] | begins[1:]
    starts = np.flatnonzero(begins)
    return Words(codes, starts, np.flatnonzero(ends) + 1 - starts)


def _hash_ranges(values: NDArray[np.uint64], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A polynomial hash, modulo 2**64, of each range of values, from the sums of all values before it."""
    size = len(values)
    powers, inverses = _powers(1 << max(12, size.bit_length())) if size < _CACHED_POWERS else _new_powers(size + 1)
    sums = np.zeros(size + 1, np.uint64)
    np.cumsum(values * powers[:size], out=sums[1:])
    return (sums[stops] - sums[starts]) * inverses[starts]


def _new_powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The powers of the hash's odd factor and of its inverse modulo 2**64."""
    factors = np.full((2, count), [[_FACTOR], [pow(_FACTOR, -1, 1 << 64)]], np.uint64)
    factors[:, 0] = 1
    powers = np.multiply.accumulate(factors, axis=1)
    return powers[0], powers[1]


_powers = cache(_new_powers)


def repeated_line_fraction(text: str) -> float:
    """The fraction of characters in lines that occur earlier in the text."""
    lines = text.split("\n")
    total = sum(map(len, lines))
    return 1 - sum(map(len, set(lines))) / total if total else 0.0


def _equal_candidates(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The positions of the hashes whose highest bits another one has too: all equal ones, and few others."""
    bits = len(hashes).bit_length() + 2
    buckets = (hashes >> np.uint64(64 - bits)).astype(np.int64)
    return np.flatnonzero((np.bincount(buckets, minlength=1 << bits) > 1)[buckets])


def repeated_ngram_fraction(words: Words) -> float:
    """The fraction of characters in ten-word n-grams that occur earlier in the text."""
    if len(words) <= NGRAM_WORDS:
        return 0.0
    starts = np.arange(len(words) - NGRAM_WORDS + 1)
    ngrams = _hash_ranges(words.hashes(), starts, starts + NGRAM_WORDS)
    candidates = _equal_candidates(ngrams)  # the others need no sorting
    ordered = np.sort(ngrams[candidates])
    if not (ordered[1:] == ordered[:-1]).any():
        return 0.0
    _, first = np.unique(ngrams[candidates], return_index=True)
    is_repeat = np.zeros(len(ngrams), np.int64)
    is_repeat[np.delete(candidates, first)] = 1
    is_covered = np.convolve(is_repeat, np.ones(NGRAM_WORDS, np.int64)) > 0
    return float(words.lengths[is_covered].sum() / words.lengths.sum())


_ADDRESS = re.compile(
    r"https?://(?:[^\s/?#@]*@)?([^\s/?#:@]+\.[^\s/?#:@.]+|\[[0-9a-f:.]+\])\.?(?::\d+)?(/[^\s?#]*)?(?:[?#]\S*)?",
    re.IGNORECASE,
)
_IP = re.compile(r"[\d.]+")
_SECOND_LEVEL = frozenset("ac co com edu gen go gob gov gouv gv k12 mil ne net nom or org re".split())


def is_blocked(url: str, blocked: Collection[str]) -> bool:
    """True if the URL is not http(s), or its site or ending is blocked.

    An entry `.pdf` blocks all addresses that end so, `example.com` that host and its subdomains, and `example` the
    registered name under any top-level domain: example.org, www.example.co.uk.
    """
    found = _ADDRESS.fullmatch(url.strip())
    if not found:
        return True
    host = found[1].lower()
    path = (found[2] or "").lower()
    if path.endswith(tuple(entry for entry in blocked if entry.startswith("."))):
        return True
    if registered_name(host) in blocked:
        return True
    labels = host.split(".")
    return any(".".join(labels[start:]) in blocked for start in range(len(labels) - 1))


def registered_name(host: str) -> str:
    """The label before the public suffix: `bbc` for www.bbc.co.uk; '' for an IP address."""
    if _IP.fullmatch(host) or host.startswith("["):
        return ""
    labels = host.split(".")
    ending = 2 if len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in _SECOND_LEVEL else 1
    return labels[-1 - ending] if len(labels) > ending else ""
