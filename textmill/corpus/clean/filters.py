"""What a document is judged by: its length, its symbols and digits, and how much it repeats itself."""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

GRAM = 10
"""Words of a run that counts as repeated."""

_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""Kana and Han: scripts without spaces, in which each character counts as a word."""
_HAS_ALONE = re.compile(f"[{_ALONE}]")
_WORD = re.compile(f"[{_ALONE}]|[^\\s{_ALONE}]+")
_SPACES, _DIGITS, _SYMBOLS = (signs.encode() for signs in (string.whitespace, string.digits, string.punctuation))
_BLANK, _DIGIT, _SYMBOL = 1, 2, 3
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LAST = 0x20000
"""Above it stand Han characters and nothing that is counted."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the characters that are not white space, which part is symbols (punctuation too) and which is digits."""

    symbols: float
    digits: float


def shares_of(text: str) -> Shares:
    """The shares of symbols and digits in a text of any script."""
    if text.isascii():
        data = text.encode()
        whole = len(data.translate(None, _SPACES))
        digits, symbols = (
            len(data) - len(data.translate(None, _DIGITS)),
            len(data) - len(data.translate(None, _SYMBOLS)),
        )
    else:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        counts = np.bincount(_kinds()[np.minimum(codes, _LAST)], minlength=4)
        whole, digits, symbols = len(codes) - int(counts[_BLANK]), int(counts[_DIGIT]), int(counts[_SYMBOL])
    return Shares(symbols / max(whole, 1), digits / max(whole, 1))


@cache
def _kinds() -> NDArray[np.uint8]:
    """For each character what it is counted as."""
    kinds = np.zeros(_LAST + 1, np.uint8)
    for code in range(_LAST):
        letter = chr(code)
        category = unicodedata.category(letter)
        if letter.isspace():
            kinds[code] = _BLANK
        elif category == "Nd":
            kinds[code] = _DIGIT
        elif category[0] in "PS":
            kinds[code] = _SYMBOL
    return kinds


def words_of(text: str) -> list[str]:
    """What stands between white space; in scripts without it each character."""
    if text.isascii() or not _HAS_ALONE.search(text):
        return text.split()
    return _WORD.findall(text)


def repeated_lines(text: str) -> float:
    """The share of characters in lines that stand earlier in the text."""
    lines = text.split("\n")
    whole = sum(map(len, lines))
    return 1 - sum(map(len, set(lines))) / whole if whole else 0.0


def repeated_grams(words: list[str]) -> float:
    """The share of characters in runs of ten words that stand earlier in the text."""
    if len(words) <= GRAM:
        return 0.0
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words), 1)}
    ids = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    grams = np.zeros(len(words) - GRAM + 1, np.uint64)
    for place in range(GRAM):  # a polynomial of the words' numbers; overflow is its modulus
        grams *= _FACTOR
        grams += ids[place : place + len(grams)]
    ordered = np.sort(grams)
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(again):
        return 0.0
    places = np.flatnonzero(again[np.minimum(np.searchsorted(again, grams), len(again) - 1)] == grams)
    _, first = np.unique(grams[places], return_index=True)
    seen = np.zeros(len(grams), np.int64)
    seen[np.delete(places, first)] = 1
    covered = np.convolve(seen, np.ones(GRAM, np.int64)) > 0
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return float(lengths[covered].sum() / lengths.sum())
