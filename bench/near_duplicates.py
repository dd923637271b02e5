"""Measure precision and recall of near-duplicate removal against brute force.

    python bench/near_duplicates.py [documents] [threshold]

Duplicates are planted in English, Korean, Turkish and Chinese text of ../shared/data. What `prepare` keeps is compared
with the Jaccard similarity of every pair.
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
from pathlib import Path

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.dedup.near_duplicates import Clusters
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LANGUAGES = ("en", "ko", "tr", "zh")


def real_texts(folder: Path, language: str, count: int, rng: random.Random) -> list[str]:
    """Segments of real text, 40 to 3,000 characters long."""
    found: list[str] = []
    for text in read_documents(folder, language):
        start = 0
        while start < min(len(text), 40_000) and len(found) < count:
            length = int(40 * 75 ** rng.random())
            if len(part := text[start : start + length].strip()) >= 40:
                found.append(part)
            start += length
        if len(found) == count:
            break
    return found


def read_documents(folder: Path, language: str) -> Iterator[str]:
    """Yield the documents of a language."""
    with lzma.open(folder / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def edit(text: str, fraction: float, rng: random.Random) -> str:
    """The text with about this fraction of its characters replaced, deleted or doubled."""
    characters = list(text)
    for position in rng.sample(range(len(characters)), max(1, round(fraction * len(characters)))):
        characters[position] = rng.choice(["", characters[position] * 2, rng.choice(text)])
    return "".join(characters)


def truth_set(folder: Path, documents: int, seed: int) -> list[str]:
    """Texts in four languages, a quarter of them duplicates: unchanged, with other case and spacing, or edited."""
    rng = random.Random(seed)
    texts: list[str] = []
    for language in LANGUAGES:
        originals = real_texts(folder, language, documents * 3 // 16, rng)
        texts += originals
        for text in rng.choices(originals, k=documents // 16):
            kind = rng.randrange(8)
            texts.append(
                text
                if kind == 0
                else text.upper().replace(" ", "  ")
                if kind == 1
                else edit(text, 0.06 * rng.random() ** 2, rng)
            )
    rng.shuffle(texts)
    return texts


def brute_force(texts: list[str], threshold: float, n: int = 5) -> set[tuple[int, int]]:
    """All pairs with at least this Jaccard similarity, by counting the shingles each text shares with earlier ones."""
    names: dict[str, int] = {}
    sets = []
    for text in texts:
        folded = " ".join(unicodedata.normalize("NFC", text).casefold().split())
        shingles_of_text = {folded[start : start + n] for start in range(max(1, len(folded) - n + 1))}
        sets.append(np.array([names.setdefault(shingle, len(names)) for shingle in shingles_of_text]))
    sizes = np.array([len(shingle_set) for shingle_set in sets])
    owners, shingles = np.repeat(np.arange(len(sets)), sizes), np.concatenate(sets)
    owners = owners[np.argsort(shingles, kind="stable")]
    starts = np.concatenate(([0], np.cumsum(np.bincount(shingles))))
    pairs = set()
    for number, shingle_set in enumerate(sets):
        lengths = starts[shingle_set + 1] - starts[shingle_set]
        index = np.repeat(starts[shingle_set] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        common = np.bincount(owners[index], minlength=len(sets))[:number]
        similar = np.flatnonzero(common / (sizes[:number] + len(shingle_set) - common) >= threshold)
        pairs |= {(int(other), number) for other in similar}
    return pairs


@dataclass(frozen=True)
class DedupQuality:
    """The dropped documents compared with the expected ones: all but one of each cluster."""

    expected: int
    dropped: int
    correct: int

    @property
    def precision(self) -> float:
        """The fraction of dropped documents that duplicate a kept one."""
        return self.correct / self.dropped

    @property
    def recall(self) -> float:
        """The fraction of duplicates that were dropped."""
        return self.correct / self.expected


def measure(texts: list[str], kept: Iterable[str], threshold: float) -> DedupQuality:
    """Compare with brute force: each cluster must keep exactly one document."""
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        numbers.setdefault(text, []).append(number)
    pairs = brute_force(texts, threshold)
    clusters = Clusters()
    for pair in pairs:
        clusters.join(*pair)
    members = set().union(*pairs)
    sizes: dict[int, int] = {}
    for number in members:
        sizes[clusters.find(number)] = sizes.get(clusters.find(number), 0) + 1
    kept_per_cluster: dict[int, int] = {}
    total = 0
    for text in kept:
        root = clusters.find(numbers[text][0])
        kept_per_cluster[root] = kept_per_cluster.get(root, 0) + 1
        total += 1
    correct = sum(min(size - kept_per_cluster.get(root, 0), size - 1) for root, size in sizes.items())
    return DedupQuality(len(members) - len(sizes), len(texts) - total, correct)


def prepare_corpus(sources: Path, folder: Path, workers: int, **corpus: object) -> Path:
    """Run prepare with near-duplicate removal."""
    settings = {"sources": [str(sources)], "dedup": "near", "rules": [], **corpus}
    return prepare(
        RunConfig.model_validate({"folder": str(folder), "corpus": settings, "runner": {"workers": workers}})
    )


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Write texts as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(
            json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n"
            for number, text in enumerate(texts)
        )


def measure_planted(documents: int = 10_000, threshold: float = 0.8) -> None:
    """Measure precision and recall on planted duplicates."""
    texts = truth_set(DATA, documents, seed=1)
    with tempfile.TemporaryDirectory() as position:
        write_lines(Path(position, "texts", "all.jsonl"), texts)
        start = time.perf_counter()
        folder = prepare_corpus(Path(position, "texts"), Path(position), 2, dedup_threshold=threshold)
        seconds = time.perf_counter() - start
        found = measure(texts, (document.text for document in open_corpus(folder)), threshold)
    print(f"{len(texts):,} documents, threshold {threshold}: {found.expected:,} duplicates, {found.dropped:,} dropped")
    print(f"precision {found.precision:.4f}, recall {found.recall:.4f}, {len(texts) / seconds:,.0f} documents/s")
    assert min(found.precision, found.recall) >= 0.98


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure_planted(*(kind(argument) for kind, argument in zip((int, float), sys.argv[1:], strict=False)))
