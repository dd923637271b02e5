"""Measure what filters check: words, symbols, digits and repetition."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

NGRAM_WORDS = 10
"""Length of the word n-grams that are checked for repetition."""

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Kana and Han are written without spaces; each character counts as a word."""
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_SPACE_BYTES, _DIGIT_BYTES, _SYMBOL_BYTES = (
    characters.encode() for characters in (string.whitespace, string.digits, string.punctuation)
)
_BLANK, _DIGIT, _SYMBOL = 1, 2, 3
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LAST_COUNTED = 0x20000
"""Characters above this are Han, which are neither symbols nor digits."""


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
        digits, symbols = (
            len(data) - len(data.translate(None, _DIGIT_BYTES)),
            len(data) - len(data.translate(None, _SYMBOL_BYTES)),
        )
    else:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        counts = np.bincount(_character_kinds()[np.minimum(codes, _LAST_COUNTED)], minlength=4)
        total, digits, symbols = len(codes) - int(counts[_BLANK]), int(counts[_DIGIT]), int(counts[_SYMBOL])
    return CharacterFractions(symbols / max(total, 1), digits / max(total, 1))


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """A table from code point to kind: blank, digit, symbol or other."""
    kinds = np.zeros(_LAST_COUNTED + 1, np.uint8)
    for code in range(_LAST_COUNTED):
        character = chr(code)
        category = unicodedata.category(character)
        if character.isspace():
            kinds[code] = _BLANK
        elif category == "Nd":
            kinds[code] = _DIGIT
        elif category[0] in "PS":
            kinds[code] = _SYMBOL
    return kinds


def split_words(text: str) -> list[str]:
    """Split at white space; in scripts without spaces, into characters."""
    if text.isascii() or not _HAS_UNSPACED.search(text):
        return text.split()
    return _WORD.findall(text)


def repeated_line_fraction(text: str) -> float:
    """The fraction of characters in lines that occur earlier in the text."""
    lines = text.split("\n")
    total = sum(map(len, lines))
    return 1 - sum(map(len, set(lines))) / total if total else 0.0


def repeated_ngram_fraction(words: list[str]) -> float:
    """The fraction of characters in ten-word n-grams that occur earlier in the text."""
    if len(words) <= NGRAM_WORDS:
        return 0.0
    numbers: defaultdict[str, int] = defaultdict(count(1).__next__)
    ids = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    ngrams = np.zeros(len(words) - NGRAM_WORDS + 1, np.uint64)
    for position in range(NGRAM_WORDS):  # a polynomial hash of the word numbers, modulo 2**64
        ngrams *= _HASH_FACTOR
        ngrams += ids[position : position + len(ngrams)]
    ordered = np.sort(ngrams)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return 0.0
    positions = np.flatnonzero(repeated[np.minimum(np.searchsorted(repeated, ngrams), len(repeated) - 1)] == ngrams)
    _, first = np.unique(ngrams[positions], return_index=True)
    is_repeat = np.zeros(len(ngrams), np.int64)
    is_repeat[np.delete(positions, first)] = 1
    is_covered = np.convolve(is_repeat, np.ones(NGRAM_WORDS, np.int64)) > 0
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return float(lengths[is_covered].sum() / lengths.sum())
