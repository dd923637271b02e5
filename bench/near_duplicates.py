"""Near-duplicates: precision and recall against brute force on real text with planted copies.

    python bench/near_duplicates.py [documents] [threshold]

Copies are planted in English, Korean, Turkish and Chinese text of ../shared/data, and what `prepare` keeps is held against the
Jaccard similarity of every pair.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.dedup.clusters import Clusters
from textmill.corpus.document import SPLITS
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import list_shards, read_texts

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LANGUAGES = ("en", "ko", "tr", "zh")


def real_texts(folder: Path, language: str, count: int, dice: random.Random) -> list[str]:
    """Stretches of real text, 40 to 3,000 characters long."""
    found: list[str] = []
    for text in documents_of(folder, language):
        start = 0
        while start < min(len(text), 40_000) and len(found) < count:
            length = int(40 * 75 ** dice.random())
            if len(part := text[start : start + length].strip()) >= 40:
                found.append(part)
            start += length
        if len(found) == count:
            break
    return found


def documents_of(folder: Path, language: str) -> Iterator[str]:
    """The documents of a language, one by one."""
    with lzma.open(folder / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def edited(text: str, share: float, dice: random.Random) -> str:
    """The text with about this share of its characters replaced, lost or doubled."""
    letters = list(text)
    for place in dice.sample(range(len(letters)), max(1, round(share * len(letters)))):
        letters[place] = dice.choice(["", letters[place] * 2, dice.choice(text)])
    return "".join(letters)


def truth_set(folder: Path, documents: int, seed: int) -> list[str]:
    """Texts in four languages, a quarter of them copies: as they are, in other case and spacing, or edited little and much."""
    dice = random.Random(seed)
    texts: list[str] = []
    for language in LANGUAGES:
        originals = real_texts(folder, language, documents * 3 // 16, dice)
        texts += originals
        for text in dice.choices(originals, k=documents // 16):
            kind = dice.randrange(8)
            texts.append(
                text
                if kind == 0
                else text.upper().replace(" ", "  ")
                if kind == 1
                else edited(text, 0.06 * dice.random() ** 2, dice)
            )
    dice.shuffle(texts)
    return texts


def brute_force(texts: list[str], threshold: float, n: int = 5) -> set[tuple[int, int]]:
    """Every pair at or above the threshold, by counting for each text the shingles it has in common with all before it."""
    names: dict[str, int] = {}
    sets = []
    for text in texts:
        folded = " ".join(unicodedata.normalize("NFC", text).casefold().split())
        pieces = {folded[start : start + n] for start in range(max(1, len(folded) - n + 1))}
        sets.append(np.array([names.setdefault(piece, len(names)) for piece in pieces]))
    sizes = np.array([len(one) for one in sets])
    owners, shingles = np.repeat(np.arange(len(sets)), sizes), np.concatenate(sets)
    owners = owners[np.argsort(shingles, kind="stable")]
    starts = np.concatenate(([0], np.cumsum(np.bincount(shingles))))
    pairs = set()
    for number, one in enumerate(sets):
        lengths = starts[one + 1] - starts[one]
        index = np.repeat(starts[one] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        common = np.bincount(owners[index], minlength=len(sets))[:number]
        similar = np.flatnonzero(common / (sizes[:number] + len(one) - common) >= threshold)
        pairs |= {(int(other), number) for other in similar}
    return pairs


@dataclass(frozen=True)
class Measured:
    """What was dropped against what should be: of each cluster of copies all but one."""

    wanted: int
    dropped: int
    right: int

    @property
    def precision(self) -> float:
        """The share of the dropped that were copies of something kept."""
        return self.right / self.dropped

    @property
    def recall(self) -> float:
        """The share of the copies that were dropped."""
        return self.right / self.wanted


def measure(texts: list[str], kept: Iterable[str], threshold: float) -> Measured:
    """A drop is right as long as its cluster, by brute force, keeps a member; a copy is missed for each kept one too many."""
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        numbers.setdefault(text, []).append(number)
    clusters = Clusters(brute_force(texts, threshold))
    members = clusters.members()
    sizes: dict[int, int] = {}
    for number in members:
        sizes[clusters.find(number)] = sizes.get(clusters.find(number), 0) + 1
    stayed: dict[int, int] = {}
    total = 0
    for text in kept:
        root = clusters.find(numbers[text][0])
        stayed[root] = stayed.get(root, 0) + 1
        total += 1
    right = sum(min(size - stayed.get(root, 0), size - 1) for root, size in sizes.items())
    return Measured(len(members) - len(sizes), len(texts) - total, right)


def prepared(sources: Path, folder: Path, workers: int, **corpus: object) -> Path:
    """The corpus without near-duplicates."""
    settings = {"sources": [str(sources)], "dedup": "near", "rules": [], **corpus}
    return prepare(
        RunConfig.model_validate({"folder": str(folder), "corpus": settings, "runner": {"workers": workers}})
    )


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(
            json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n"
            for number, text in enumerate(texts)
        )


def truth(documents: int = 10_000, threshold: float = 0.8) -> None:
    """Precision and recall on planted copies."""
    texts = truth_set(DATA, documents, seed=1)
    with tempfile.TemporaryDirectory() as place:
        write_lines(Path(place, "texts", "all.jsonl"), texts)
        start = time.perf_counter()
        folder = prepared(Path(place, "texts"), Path(place), 2, dedup_threshold=threshold)
        seconds = time.perf_counter() - start
        shards = [shard for split in SPLITS for shard in list_shards(folder, split)]
        kept = chain.from_iterable(batch for shard in shards for batch in read_texts(shard))
        found = measure(texts, kept, threshold)
    print(f"{len(texts):,} documents, threshold {threshold}: {found.wanted:,} copies, {found.dropped:,} dropped")
    print(f"precision {found.precision:.4f}, recall {found.recall:.4f}, {len(texts) / seconds:,.0f} documents/s")
    assert min(found.precision, found.recall) >= 0.98


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    truth(*(kind(word) for kind, word in zip((int, float), sys.argv[1:], strict=False)))
