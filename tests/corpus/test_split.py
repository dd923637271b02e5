"""Splits: decided by the document's text alone, in the requested ratios."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.config import CorpusConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.split import (
    assign_split,
    assign_splits,
    declared_splits,
    split_from_name,
    split_records,
    split_sources,
    text_digest,
)
from textmill.errors import TextmillError

TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("  \t\nab")))


def rows(texts: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(text_digest, texts)), np.uint8).reshape(-1, 16)


def test_digest_never_changes() -> None:
    """The digests equal `b2sum -l 128` of the normalised text."""
    assert text_digest("The mill stands.").hex() == "37fafa2904bd7c572bd81eccb887c6f3"
    assert text_digest("한국어 \n\n İstanbul").hex() == "78ed8e88c55da7708f9d7c9a356ddb79"


@pytest.mark.parametrize("same", ["a b c", " a  b\nc ", "a\t\tb\r\n\x0b\x0cc\n"])
def test_digest_ignores_white_space(same: str) -> None:
    assert text_digest(same) == text_digest("a b c")


def test_different_texts_have_different_digests() -> None:
    different = ["a b", "ab", "A b", "a b c", "a\u3000b", "e", "é", ""]
    assert len({text_digest(text) for text in different}) == len(different)
    assert text_digest("e\u0301") == text_digest("é")


@given(TEXT)
def test_digest_against_its_definition(text: str) -> None:
    import hashlib
    import re
    import unicodedata

    plain = re.sub("[ \t\n\r\x0b\x0c]+", " ", unicodedata.normalize("NFC", text)).strip(" ")
    assert text_digest(text) == hashlib.blake2b(plain.encode(), digest_size=16).digest()
    assert text_digest(unicodedata.normalize("NFC", text), is_nfc=True) == text_digest(text)


@given(st.lists(TEXT, min_size=1), st.sampled_from([[90.0, 5.0, 5.0], [1.0, 1.0, 1.0], [949.0, 50.0, 1.0]]))
def test_single_and_batch_assignment_agree(texts: list[str], shares: list[float]) -> None:
    assert [SPLITS[side] for side in assign_splits(rows(texts), shares)] == [
        assign_split(text_digest(text), shares) for text in texts
    ]


@pytest.mark.parametrize("shares", [[90.0, 5.0, 5.0], [949.0, 50.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
def test_ratios(shares: list[float]) -> None:
    counts = np.bincount(assign_splits(rows([f"document {number}" for number in range(20_000)]), shares), minlength=3)
    for count, share in zip(counts, shares, strict=True):
        expected = 20_000 * share / sum(shares)
        assert abs(count - expected) <= 5 * np.sqrt(expected)


def test_all_in_train() -> None:
    edge = np.array([[255] * 16, [0] * 16], np.uint8)
    assert assign_splits(edge, [1.0, 0.0, 0.0]).tolist() == [0, 0]
    assert assign_splits(edge, [1.0, 1.0, 0.0]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("data/a.jsonl", [0]),
        ("a.jsonl", [0]),
        ("./data/a.jsonl", [0]),
        ("data", [0, 1, 2]),
        ("held", [1, 2]),
        ("data/held/*", [1, 2]),
        ("*.txt", [2]),
    ],
)
def test_splits_are_declared_by_file_folder_and_pattern(word: str, named: list[int]) -> None:
    names = ["data/a.jsonl", "data/held/b.jsonl", "data/held/c.txt", "database/x.jsonl"]
    for prefix in ("", "../", "/elsewhere/"):
        assert declared_splits([prefix + name for name in names], {word: "test"}) == [
            "test" if place in named else None for place in range(4)
        ]


@pytest.mark.parametrize("word", ["", ".", "atabase", "b", "data/*.txt"])
def test_declaration_without_a_source_is_refused(word: str) -> None:
    with pytest.raises(TextmillError, match="no source matches"):
        declared_splits(["data/a.jsonl"], {word: "test"})


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("wikitext.test-00000", "test"),
        ("ValidATION", "valid"),
        ("news_dev.jsonl", "valid"),
        ("my-gpt2_val2_text", "valid"),
        ("test_clean", "test"),
        ("latest.txt", None),
        ("contest-trains.txt", None),
        ("train_test.txt", None),
        ("news.jsonl", None),
    ],
)
def test_the_split_of_a_name(name: str, split: str | None) -> None:
    assert split_from_name(name) == split


def splits_of(names: list[str], **corpus: object) -> list[tuple[float, ...]]:
    return split_sources(names, names, CorpusConfig.model_validate(corpus)).ratios


def test_sources_keep_their_own_splits() -> None:
    every = (90.0, 5.0, 5.0)
    data = ["hf:wiki:raw:train", "hf:wiki:raw:validation", "hf:wiki:raw:test", "more.txt"]
    assert splits_of(data) == [(90.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), every]
    assert splits_of(data, own_splits=False) == [every] * 4
    saved = ["train/data-0.arrow", "test/data-0.arrow"]
    assert splits_of(saved) == [(90.0, 5.0, 0.0), (0.0, 0.0, 1.0)], "valid is taken out of train"
    assert splits_of(saved, source_splits={"test/*": "valid"}) == [(90.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
    assert splits_of(["hf:test-set:v1:train", "dev/train.txt"]) == [(90.0, 5.0, 0.0)] * 2
    assert splits_of(["mongo:db_train.json", "mongo:db_test.json"])[1] == (0.0, 0.0, 1.0)


def test_an_evaluation_split_without_a_train_split_is_named() -> None:
    found = split_sources(["a.txt", "x/test.txt"], ["a.txt", "x/test.txt"], CorpusConfig())
    assert found.ratios == [(90.0, 5.0, 5.0)] * 2
    assert "x/test.txt is named after the test split" in found.notes[0]
    assert "corpus.source_splits=test.txt:test" in found.notes[0]
    assert not found.names


@given(st.lists(st.integers(1, 400), min_size=1, max_size=300), st.sampled_from([(90, 5, 5), (80, 20, 0), (1, 0, 0)]))
def test_a_record_is_cut_into_parts_with_a_gap(lengths: list[int], ratios: tuple[float, ...]) -> None:
    cuts = np.array(lengths) * np.where(np.arange(len(lengths)) == 0, -1, 1)
    splits, is_gap = split_records(cuts, np.zeros((len(cuts), 16), np.uint8), ratios)
    parts = [split for split, _ in groupby(splits.tolist())]
    if len(set(parts)) == 1:
        assert not is_gap.any()
        return
    held_out = [split for split in (1, 2) if ratios[split]]
    assert parts in ([0, *held_out, 0], [0, *held_out], [*held_out, 0]), "train on both sides, unless it is short"
    first, last = np.flatnonzero(splits)[[0, -1]].tolist()
    assert is_gap[first - 1 : first].all()
    assert is_gap[last + 1 : last + 2].all()
    assert not is_gap[first : last + 1].any()
    assert not is_gap[splits == 0].all()
    for index, ratio in enumerate(ratios):
        share = np.sum(np.array(lengths)[splits == index]) / sum(lengths)
        assert abs(share - ratio / sum(ratios)) <= max(lengths) / sum(lengths)


def test_each_record_is_cut_and_a_short_one_is_whole() -> None:
    cuts = np.tile([-10, *[10] * 99], 3).tolist() + [-10, 10] * 100
    digests = np.random.default_rng(1).integers(0, 256, (len(cuts), 16), np.uint8)
    splits, is_gap = split_records(np.array(cuts), digests, (90, 5, 5))
    for record in range(3):
        part = splits[record * 100 : record * 100 + 100]
        assert np.bincount(part).tolist() == [90, 5, 5]
        assert np.flatnonzero(part).tolist() == list(range(45, 55))
        assert np.flatnonzero(is_gap[record * 100 : record * 100 + 100]).tolist() == [44, 55]
    short = splits[300:].reshape(-1, 2)
    assert (short[:, 0] == short[:, 1]).all()
    assert set(short[:, 0].tolist()) == {0, 1, 2}
