"""Which side a document stands on: decided by a hash of its own text, so it never moves when sources grow."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.document import SPLITS, Split
from textmill.errors import TextmillError

DIGEST = 16
_TO_SPACE = bytes.maketrans(b"\t\n\r\x0b\x0c", b" " * 5)


def digest_of(text: str, *, composed: bool = False) -> bytes:
    """128 bits of the normalised text: NFC (`composed`: it is that already), every run of ASCII white space one space, none at the ends."""
    if not composed and not text.isascii():
        text = unicodedata.normalize("NFC", text)
    data = text.encode().translate(_TO_SPACE)
    if b"  " in data:
        parts = [part.strip() for part in data.split(b"  ")]
        data = b" ".join([part for part in parts if part])
    return hashlib.blake2b(data.strip(), digest_size=DIGEST).digest()


def sides_of(digests: NDArray[np.uint8], shares: Sequence[float]) -> NDArray[np.int8]:
    """For each row of 16 bytes its place in SPLITS."""
    head = np.ascontiguousarray(digests[:, :8]).view(">u8").reshape(-1) >> 1
    return np.searchsorted(_bounds(shares), head.astype(np.uint64), side="right").astype(np.int8)


def side_of(digest: bytes, shares: Sequence[float]) -> Split:
    """The split of one document."""
    return SPLITS[int(sides_of(np.frombuffer(digest, np.uint8).reshape(1, DIGEST), shares)[0])]


def declared_sides(names: Sequence[str], sides: Mapping[str, Split]) -> list[Split | None]:
    """The side on which each source stands as a whole, where `corpus.sides` says so by its name, its folder or a pattern."""
    for word in sides:
        if not any(_named_by(name, word) for name in names):
            raise TextmillError(f"corpus.sides: no source is '{word}' or matches it; found {list(names)[:5]}")
    found: list[Split | None] = []
    for name in names:
        declared = {side: word for word, side in sides.items() if _named_by(name, word)}
        if len(declared) > 1:
            raise TextmillError(
                f"corpus.sides: '{name}' is declared {' and '.join(f'{side} by {word!r}' for side, word in declared.items())}"
            )
        found.append(next(iter(declared), None))
    return found


def _named_by(name: str, word: str) -> bool:
    """Held against the end of the name, or of a folder above: the file that says `sides` may stand elsewhere than the user."""
    path = PurePath(name)
    return bool(PurePath(word).name) and any(one.match(word) for one in (path, *path.parents))


def _bounds(shares: Sequence[float]) -> NDArray[np.uint64]:
    """Where valid and test begin among 63-bit numbers; 63, so that 'all of it' still fits 64."""
    whole = sum(map(Fraction, shares), Fraction(0))
    bounds, total = [], Fraction(0)
    for share in shares[:-1]:
        total += Fraction(share)
        bounds.append(int(total / whole * 2**63))
    return np.array(bounds, dtype=np.uint64)
