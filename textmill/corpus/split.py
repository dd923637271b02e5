"""Assign each document to train, valid or test by a hash of its text, so that new sources never move it."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.source import ONE_TEXT_FORMATS, SourceChunk
from textmill.errors import TextmillError

DIGEST_BYTES = 16
SECTION = ", section "
"""In the place of a record's section: `line 3, section 2`."""
GAP = 0.01
GAP_CHARACTERS = 100_000
"""The gaps before valid and after test as a fraction of a record: each at least a document, both together at most so
many characters."""
FEW_RECORDS = 20
"""Fewer records are too few for a hash to decide where each is as a whole."""
SPLIT_WORDS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
    "evaluation": "valid",
    "test": "test",
    "testing": "test",
}
"""Words in the names of files, folders and splits of datasets."""
_SPLIT_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))})(?![a-z])")
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
    return np.searchsorted(_split_bounds(ratios), _heads(digests), side="right").astype(np.int8)


def assign_groups(digests: NDArray[np.uint8], ratios: Sequence[float]) -> NDArray[np.int8]:
    """The same where each digest is that of a group of documents.

    Of few groups none may fall into a split: it then gets the last group of train in the order of their hashes, as long
    as train keeps one.
    """
    groups, group_of_row = np.unique(_heads(digests), return_inverse=True)
    splits = np.searchsorted(_split_bounds(ratios), groups, side="right").astype(np.int8)
    for split in range(1, len(ratios)):
        train = np.flatnonzero(splits == 0)
        if ratios[split] and ratios[0] and len(train) > 1 and split not in splits:
            splits[train[-1]] = split
    found: NDArray[np.int8] = splits[group_of_row]
    return found


def _heads(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """63 bits of each digest, so that the upper end of a range fits 64 bits."""
    head = np.ascontiguousarray(digests[:, :8]).view(">u8").reshape(-1) >> 1
    return head.astype(np.uint64)


def field_digest(meta: str | None, split_by: str) -> bytes | None:
    """A hash of the value that `corpus.split_by=field:NAME` names; None if the record has none."""
    value = json.loads(meta).get(split_by.partition(":")[2]) if meta else None
    return None if value is None else text_digest(value if isinstance(value, str) else json.dumps(value))


def file_digest(name: str) -> bytes:
    """A hash of a file's name and the folder it is in: what `corpus.split_by=file` decides by."""
    return text_digest("/".join(name.split("/")[-2:]))


def is_new_record(chunk: SourceChunk, place: str, before: str, is_first: bool) -> bool:
    """Whether a document begins a record: a file that is one text, else a line or row, which may be cut into sections.

    `before`: the place of the document before it; `is_first`: it is the first of its chunk.
    """
    if chunk.source.format in ONE_TEXT_FORMATS:
        return is_first and chunk.start == 0
    return is_first or place.partition(SECTION)[0] != before.partition(SECTION)[0]


def split_records(
    cuts: NDArray[np.int64], digests: NDArray[np.uint8], ratios: Sequence[float]
) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """The split of each document by its position in its record, and whether it is in a gap.

    The middle of a record is valid, then test, and train is on both sides: what changes from the beginning of a text to
    its end is then in train, too. The documents of train next to another split are the gaps. A record that is too short
    for this is in one split: by a hash of its first document, or train if there are few records. `cuts`: the lengths of
    the documents, negative for the first of a record.
    """
    splits = np.zeros(len(cuts), np.int8)
    is_gap = np.zeros(len(cuts), np.bool_)
    lengths = np.abs(cuts)
    begins = cuts < 0
    if len(cuts):
        begins[0] = True
    starts = np.flatnonzero(begins)
    shares = np.array(ratios) / sum(ratios)
    bounds = np.cumsum([shares[0] / 2, *shares[1:]])
    split_of_part = np.array([*range(len(shares)), 0])
    if not any(ratios[1:]):
        return splits, is_gap
    few = len(starts) < FEW_RECORDS and ratios[0] > 0
    whole = np.zeros(len(starts), np.int8) if few else assign_splits(digests[starts], ratios)
    for start, stop, split in zip(starts.tolist(), [*starts[1:].tolist(), len(cuts)], whole.tolist(), strict=True):
        ends = np.cumsum(lengths[start:stop])
        offsets = ends - lengths[start:stop]
        parts = np.searchsorted(bounds, (ends + offsets) / 2 / ends[-1], side="right")
        found = split_of_part[parts]
        gap = min(GAP * ends[-1], GAP_CHARACTERS) / 2
        before, after = parts == 0, parts == len(shares)
        is_near = before & (ends > bounds[0] * ends[-1] - gap) | after & (offsets < bounds[-1] * ends[-1] + gap)
        is_near[np.flatnonzero(before)[-1:]] = True
        is_near[np.flatnonzero(after)[:1]] = True
        is_complete = all((found == index).any() for index, share in enumerate(shares) if share)
        if is_complete and not is_near[found == 0].all():
            splits[start:stop] = found
            is_gap[start:stop] = is_near
        else:
            splits[start:stop] = split
    return splits, is_gap


def assign_split(digest: bytes, ratios: Sequence[float]) -> Split:
    """The split of one document."""
    return SPLITS[int(assign_splits(np.frombuffer(digest, np.uint8).reshape(1, DIGEST_BYTES), ratios)[0])]


@dataclass(frozen=True)
class SourceSplits:
    """How the documents of each source are split."""

    ratios: list[tuple[float, ...]]
    """For each source the ratio of train, valid and test."""
    names: dict[str, Split]
    """The sources that belong to a split, declared or of their own, by name."""
    notes: list[str]
    """The lines to print before the work."""


def split_sources(names: Sequence[str], relative: Sequence[str], config: CorpusConfig) -> SourceSplits:
    """How each source is split: by `corpus.source_splits`, else by its own name if one of them is train, else by
    `corpus.split`.

    `relative`: their names without the folders that all have in common. If no source is the valid split, it is taken
    out of train.
    """
    declared = declared_splits(names, config.source_splits)
    own: list[Split | None] = [None] * len(names)
    if config.own_splits and _SPLIT_WORD.search("\n".join(relative).lower()):
        own = [_own_split(name) for name in relative]
    train, valid, test = config.split
    found: list[Split | None]
    notes = []
    if "train" in (*declared, *own):
        found = [one or other for one, other in zip(declared, own, strict=True)]
        of_train = (train, 0.0, 0.0) if "valid" in found else (train, valid, 0.0)
    else:
        found = declared
        of_train = (train, valid, test)
        for name, one, other in zip(names, declared, own, strict=True):
            if other and not one:
                notes.append(
                    f"{name} is named after the {other} split, but no source is the train split, so corpus.split "
                    f"decides; to keep it out of training: corpus.source_splits={PurePath(name).name}:{other}"
                )
    ratios_of: dict[Split | None, tuple[float, ...]] = {
        split: tuple(float(split == one) for one in SPLITS) for split in SPLITS
    }
    ratios_of |= {None: tuple(config.split), "train": of_train}
    ratios = [ratios_of[split] for split in found]
    return SourceSplits(ratios, {name: one for name, one in zip(names, found, strict=True) if one}, notes)


def _own_split(name: str) -> Split | None:
    """The split that a source is named after, or that a dataset gives it: hf:NAME:CONFIG:SPLIT."""
    if name.startswith("hf:"):
        return split_from_name(name.split(":")[3])
    if "://" in name:
        return split_from_path(name.split("/")[-2:])
    return split_from_path(name.removeprefix("mongo:").split("/"))


def declared_splits(names: Sequence[str], declarations: Mapping[str, Split]) -> list[Split | None]:
    """The split that `corpus.source_splits` declares for each source, by name, folder or pattern; None if it declares
    none."""
    for pattern in declarations:
        if not any(_matches(name, pattern) for name in names):
            raise TextmillError(f"corpus.source_splits: no source matches '{pattern}'; found {list(names)[:5]}")
    splits: list[Split | None] = []
    for name in names if declarations else ():
        declared = {split: pattern for pattern, split in declarations.items() if _matches(name, pattern)}
        if len(declared) > 1:
            raise TextmillError(
                f"corpus.source_splits: '{name}' has two splits: "
                f"{' and '.join(f'{split} by {pattern!r}' for split, pattern in declared.items())}; keep one"
            )
        splits.append(next(iter(declared), None))
    return splits or [None] * len(names)


@lru_cache(maxsize=1024)  # the folders of many files
def split_from_name(name: str) -> Split | None:
    """The split that a file or folder is named after: `wikitext.test-00000` -> test; None if none, or several."""
    found = {SPLIT_WORDS[word] for word in _SPLIT_WORD.findall(name.lower())}
    return found.pop() if len(found) == 1 else None


def split_from_path(parts: Sequence[str]) -> Split | None:
    """The split that a file, or else the nearest folder above it, is named after."""
    return next((split for split in map(split_from_name, reversed(parts)) if split), None)


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
