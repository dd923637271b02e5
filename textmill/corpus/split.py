"""Assign each document to train, valid or test by a hash of its text, so that new sources never move it."""

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

DIGEST_BYTES = 16
_TO_SPACE = bytes.maketrans(b"\t\n\r\x0b\x0c", b" " * 5)


def text_digest(text: str, *, is_nfc: bool = False) -> bytes:
    """A 128-bit hash of the normalised text.

    Normalised: NFC, each run of ASCII white space one space, none at the ends. `is_nfc`: the text is in NFC form
    already.
    """
    if not is_nfc and not text.isascii():
        text = unicodedata.normalize("NFC", text)
    data = text.encode().translate(_TO_SPACE)
    if b"  " in data:
        parts = [part.strip() for part in data.split(b"  ")]
        data = b" ".join([part for part in parts if part])
    return hashlib.blake2b(data.strip(), digest_size=DIGEST_BYTES).digest()


def assign_splits(digests: NDArray[np.uint8], ratios: Sequence[float]) -> NDArray[np.int8]:
    """The split of each digest, as an index into SPLITS."""
    head = np.ascontiguousarray(digests[:, :8]).view(">u8").reshape(-1) >> 1
    return np.searchsorted(_split_bounds(ratios), head.astype(np.uint64), side="right").astype(np.int8)


def assign_split(digest: bytes, ratios: Sequence[float]) -> Split:
    """The split of one document."""
    return SPLITS[int(assign_splits(np.frombuffer(digest, np.uint8).reshape(1, DIGEST_BYTES), ratios)[0])]


def declared_splits(names: Sequence[str], declarations: Mapping[str, Split]) -> list[Split | None]:
    """The split that `corpus.source_splits` declares for each source, by name, folder or pattern; None if it declares
    none."""
    for pattern in declarations:
        if not any(_matches(name, pattern) for name in names):
            raise TextmillError(f"corpus.source_splits: no source matches '{pattern}'; found {list(names)[:5]}")
    splits: list[Split | None] = []
    for name in names:
        declared = {split: pattern for pattern, split in declarations.items() if _matches(name, pattern)}
        if len(declared) > 1:
            raise TextmillError(
                f"corpus.source_splits: '{name}' has two splits: "
                f"{' and '.join(f'{split} by {pattern!r}' for split, pattern in declared.items())}; keep one"
            )
        splits.append(next(iter(declared), None))
    return splits


def _matches(name: str, pattern: str) -> bool:
    """Match a pattern against the end of a source's path, or of one of its parent folders.

    Only the end counts, because the config file and the user may be in different folders.
    """
    path = PurePath(name)
    return bool(PurePath(pattern).name) and any(candidate.match(pattern) for candidate in (path, *path.parents))


def _split_bounds(ratios: Sequence[float]) -> NDArray[np.uint64]:
    """The hash values at which valid and test start; hashes are 63-bit, so that the upper end fits 64 bits."""
    total_ratio = sum(map(Fraction, ratios), Fraction(0))
    bounds = []
    running_total = Fraction(0)
    for ratio in ratios[:-1]:
        running_total += Fraction(ratio)
        bounds.append(int(running_total / total_ratio * 2**63))
    return np.array(bounds, dtype=np.uint64)
