"""Near-duplicates: against brute force on real text in four languages, and against definitions on synthetic text."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.near_duplicates import measure, truth_set
from tests.support.prepare_job import run_prepare
from textmill.config import RunConfig
from textmill.corpus import find_sources, records
from textmill.corpus.chunk_task import chunk_file
from textmill.corpus.dedup import minhash, near_duplicates
from textmill.corpus.dedup import near_duplicates as near
from textmill.corpus.dedup.decisions import find_kept_equals
from textmill.corpus.dedup.minhash import (
    MAX_SKETCH_SIZE,
    MIN_RECALL,
    band_hashes,
    choose_bands,
    distinct,
    jaccard,
    shingle,
    shingle_set,
    sketch,
)
from textmill.corpus.dedup.near_duplicates import Clusters, find_candidate_pairs
from textmill.corpus.document import Split
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.counters import mix
from textmill.errors import TextmillError

TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs", "Cc"]), st.sampled_from("  \t\nabAB가\u3000İß")), max_size=60
)


def plain_set(text: str, unit: str, n: int) -> set[tuple[str, ...]]:
    folded = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    units = list(folded) if unit == "characters" else folded.split()
    return {tuple(units[start : start + n]) for start in range(max(1, len(units) - n + 1))}


def plain_jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / len(one | other)


@given(st.sampled_from(["characters", "words"]), st.integers(1, 12), st.lists(TEXT, min_size=1, max_size=6))
def test_shingles_against_their_definition(unit: Any, n: int, texts: list[str]) -> None:
    """The same number of distinct and of shared shingles as plain sets; a text without letters is one empty shingle."""
    texts = [text for text in texts if not text.isspace()] or ["x"]
    hashes, counts = shingle(texts, unit, n)
    parts = np.split(hashes, np.cumsum(counts)[:-1])
    sets = [plain_set(text, unit, n) for text in texts]
    for text, part, plain in zip(texts, parts, sets, strict=True):
        assert len(distinct(part)) == len(plain)
        assert np.array_equal(distinct(part), shingle_set(text, unit, n))
    for (one, first), (other, second) in itertools.combinations(zip(parts, sets, strict=True), 2):
        assert jaccard(distinct(one), distinct(other)) == plain_jaccard(first, second)


def test_long_text_is_shingled_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"söz{number}" for number in range(3000))
    complete = shingle_set(text, "characters", 5)
    monkeypatch.setattr(minhash, "SEGMENT_CHARACTERS", 1000)
    assert jaccard(complete, shingle_set(text, "characters", 5)) > 0.99


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_reach_the_recall(threshold: float) -> None:
    bands, rows = choose_bands(threshold)
    assert 1 - (1 - threshold**rows) ** bands >= MIN_RECALL, "the probability of at least one equal band"
    assert bands * rows <= MAX_SKETCH_SIZE


def two_sets(size: int, similarity: float, rng: np.random.Generator) -> tuple[Any, Any, float]:
    common = round(size * 2 * similarity / (1 + similarity))
    pool = mix(rng.integers(0, 2**63, 2 * size - common).astype(np.uint64))
    return pool[:size], pool[size - common :], common / (2 * size - common)


@pytest.mark.parametrize("size", [1, 7, 40, 300, 4000])
def test_sketches_estimate_jaccard_similarity(size: int) -> None:
    """Over many pairs, the fraction of equal values is the Jaccard similarity, for short and long texts."""
    rng, agreed, expected = np.random.default_rng(size), [], []
    for _ in range(60):
        one, other, similarity = two_sets(size, 0.8, rng)
        values = sketch(np.concatenate((one, other)), np.array([size, size]), 232)
        assert not (values == np.uint64(2**64 - 1)).any()
        agreed.append((values[0] == values[1]).mean())
        expected.append(similarity)
    assert abs(np.mean(agreed) - np.mean(expected)) < 4 * max(np.std(agreed), 1e-9) / np.sqrt(len(agreed)) + 1e-9


@pytest.mark.parametrize(("threshold", "size"), [(0.8, 30), (0.8, 1000), (0.5, 200)])
def test_pairs_at_the_threshold_share_a_band(threshold: float, size: int) -> None:
    bands, rows = choose_bands(threshold)
    rng, pairs = np.random.default_rng(3), 300
    sets = [part for _ in range(pairs) for part in two_sets(size, threshold, rng)[:2]]
    found = band_hashes(np.concatenate(sets), np.full(2 * pairs, size), bands, rows)
    missed = int((~(found[::2] == found[1::2]).any(axis=1)).sum())
    assert missed <= pairs * (1 - MIN_RECALL) + 4 * np.sqrt(pairs * (1 - MIN_RECALL)) + 1


def test_sketch_does_not_depend_on_other_documents() -> None:
    texts = [f"metin {number} " * (number % 40 + 1) for number in range(50)]
    together = band_hashes(*shingle(texts, "characters", 5), 29, 8)
    alone = [band_hashes(*shingle([text], "characters", 5), 29, 8)[0] for text in texts]
    assert np.array_equal(together, np.stack(alone))


HASH = st.integers(0, 6).map(lambda number: number * 0x9E3779B97F4A7C15 % 2**64)


@given(st.lists(st.lists(st.tuples(HASH, HASH), max_size=8), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_all_pairs_of_all_bands(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[tuple[int, int]]]) -> None:
    """In small buckets: every pair once, in order."""
    folder = tmp_path_factory.mktemp("bands")
    (folder / "work").mkdir()
    for number, rows in enumerate(chunks):
        np.array(rows, np.uint64).reshape(-1, 2).T.tofile(chunk_file(folder, number, "bands"))
    everything = [row for rows in chunks for row in rows]
    pairs = find_candidate_pairs(folder, [len(rows) for rows in chunks], 2)
    expected = [
        (one, other)
        for one, other in itertools.combinations(range(len(everything)), 2)
        if any(first == second for first, second in zip(everything[one], everything[other], strict=True))
    ]
    linked = [(pair >> 32, pair & (2**32 - 1)) for pair in pairs.tolist()]
    assert linked == sorted(set(linked))
    assert set(linked) <= set(expected)
    if len(everything) <= 2 * near_duplicates.BUCKET_LINKS:
        assert linked == expected
    assert clusters_of(linked, len(everything)) == clusters_of(expected, len(everything))
    assert np.fromfile(folder / "work" / "pairs", np.uint64).tolist() == pairs.tolist()
    marks = np.concatenate([np.fromfile(chunk_file(folder, chunk, "marks"), np.uint8) for chunk in range(len(chunks))])
    assert np.flatnonzero(marks).tolist() == sorted({number for pair in linked for number in pair})


def clusters_of(pairs: list[tuple[int, int]], count: int) -> list[int]:
    clusters = Clusters()
    for pair in pairs:
        clusters.join(*pair)
    return [clusters.find(number) for number in range(count)]


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda pair: pair[0] != pair[1])), st.randoms()
)
def test_clusters(pairs: list[tuple[int, int]], rng: random.Random) -> None:
    """Compared with sets that are merged until nothing changes, for any order of the pairs."""
    groups = [{number} for number in range(13)]
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if not group & set(pair)] + [set().union(*touched)]
    shuffled = [pair[:: rng.choice((1, -1))] for pair in rng.sample(pairs, len(pairs))]
    assert clusters_of(shuffled, 13) == [min(group) for number in range(13) for group in groups if number in group]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30))
def test_exact_duplicate_in_train_is_kept(documents: list[tuple[int, int]]) -> None:
    digests = np.array([[value] * 16 for value, _ in documents], np.uint8)
    kept = find_kept_equals(digests, np.array([side for _, side in documents], np.int8))
    best = {
        value: min((side > 0, place) for place, (one, side) in enumerate(documents) if one == value)[1]
        for value, _ in documents
    }
    assert kept.tolist() == [best[value] for value, _ in documents]


def prepare_near(texts: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, **corpus: Any) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setattr(find_sources, "FILE_BYTES", records.CHUNK_BYTES)  # a chunk for each file
    os.makedirs("texts", exist_ok=True)
    for part in range(3):
        rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts[part::3])
        Path(f"texts/{part}.jsonl").write_text("".join(rows), encoding="utf-8")
    return prepare(config_of(**corpus))


def config_of(folder: str = "out", workers: int = 1, **corpus: Any) -> RunConfig:
    corpus = {"sources": ["texts"], "dedup": "near", "rules": [], "split": [8.0, 1.0, 1.0], **corpus}
    return RunConfig.model_validate({"folder": folder, "corpus": corpus, "runner": {"workers": workers}})


def read_kept(folder: Path, split: Split | None = None) -> Iterator[str]:
    yield from (document.text for document in open_corpus(folder, split))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "run.yaml"}


@pytest.mark.long_with(0.6)
@pytest.mark.parametrize("threshold", [0.8, 0.6])
def test_truth_set(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    """The check of bench/near_duplicates.py on fewer documents."""
    texts = truth_set(shared_data, 1200, seed=1)
    folder = prepare_near(texts, tmp_path, monkeypatch, dedup_threshold=threshold)
    measured = measure(texts, read_kept(folder), threshold)
    account = json.loads((folder / "account.json").read_text())
    assert account["dropped"]["duplicate"] + account["dropped"]["near_duplicate"] == measured.dropped
    assert measured.expected > 100
    assert measured.precision >= 0.98
    assert measured.recall >= 0.98


def edit(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    return text[:place] + rng.choice("xyz") + text[place + 1 :]


def synthetic_texts(count: int, rng: random.Random) -> list[str]:
    words = ["değirmen", "물레방아", "mill", "磨坊", "su", "강", "river", "taş", "石", "grain"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(20, 60))) for _ in range(count * 2 // 3)]
    return texts + [edit(text, rng) for text in rng.choices(texts, k=count - len(texts))]


def test_workers_order_and_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = synthetic_texts(150, random.Random(2))
    one = content(prepare_near(texts, tmp_path, monkeypatch))
    assert json.loads(one["account.json"])["dropped"]["near_duplicate"] > 20
    assert (
        content(prepare(config_of("two", workers=2, sources=["texts/2.jsonl", "texts/0.jsonl", "texts/1.jsonl"])))
        == one
    )
    monkeypatch.setattr(near, "BLOCK_DOCUMENTS", 7)
    assert content(prepare(config_of("little"))) == one


def test_words_and_short_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a", "A", "b", "물", "물 ", "a b c d e f g h i j k l", "a b c d e f g h i j k m", "one two three four"]
    monkeypatch.setattr(near, "SHINGLE_SIZE", 2)
    folder = prepare_near(texts, tmp_path, monkeypatch, split=[1.0], dedup_shingles="words")
    assert sorted(read_kept(folder)) == ["a", "a b c d e f g h i j k m", "b", "one two three four", "물"]


def test_longest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = " ".join(f"word{number}" for number in range(100))
    texts = [base + " x", base + " and the end", base, "something else entirely"]
    folder = prepare_near(texts, tmp_path, monkeypatch, split=[1.0])
    assert set(read_kept(folder)) == {texts[1], texts[3]}
    account = json.loads((folder / "account.json").read_text())
    assert account["dropped"] == {"near_duplicate": 2}


def test_near_duplicate_in_train_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text in train is kept rather than a long one in test, also if a source is declared test."""
    base = " ".join(f"word{number}" for number in range(100))
    monkeypatch.chdir(tmp_path)
    os.mkdir("texts")
    for name, texts in {"a": [base + " longer", "the same", "only in test"], "b": [base, "the same"]}.items():
        Path(f"texts/{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = prepare(config_of(split=[1.0], source_splits={"texts/a.jsonl": "test"}))
    assert list(read_kept(folder, "train")) == [base, "the same"]
    assert list(read_kept(folder, "test")) == ["only in test"]
    folder = prepare(config_of("other", split=[1.0], dedup="none", source_splits={"texts/a*": "valid"}))
    assert len(list(read_kept(folder, "valid"))) == 3
    with pytest.raises(
        TextmillError, match=r"corpus.source_splits: no source matches 'texts/c.jsonl'; found \['texts/a.jsonl'"
    ):
        prepare(config_of("wrong", source_splits={"texts/c.jsonl": "test"}))
    with pytest.raises(
        TextmillError, match=r"'texts/a.jsonl' has two splits: test by 'texts' and valid by 'texts/a\*'"
    ):
        prepare(config_of("wrong", source_splits={"texts": "test", "texts/a*": "valid"}))


class Crash(BaseException):
    """Raised to simulate the end of the process."""


@pytest.mark.long
def test_crash_at_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = synthetic_texts(18, random.Random(4))
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    expected, replace, point = (
        content(prepare_near(texts, tmp_path, monkeypatch, folder="whole", dedup_threshold=0.95)),
        os.replace,
        0,
    )
    while True:
        point += 1
        left = [point]

        def crash_later(old: Any, new: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            replace(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash_later)
            try:
                prepare(config_of(f"run-{point}", dedup_threshold=0.95))
            except Crash:
                pass
            else:
                break
        assert content(prepare(config_of(f"run-{point}", dedup_threshold=0.95))) == expected, f"crash point {point}"
    assert point > 40


@pytest.mark.long
def test_killed_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    expected = content(prepare_near(synthetic_texts(150, rng), tmp_path, monkeypatch, folder="whole"))
    corpus = {"sources": ["texts"], "dedup": "near", "rules": [], "split": [8.0, 1.0, 1.0]}
    config = RunConfig.model_validate({"folder": "killed", "corpus": corpus, "runner": {"workers": 2}})
    for stage in ("*.bands", "confirmed-*"):
        assert run_prepare(config, f"killed/corpus.part/work/{stage}", 1) == -signal.SIGKILL
    assert run_prepare(config) == 0
    assert content(Path("killed/corpus")) == expected
