"""The token store equals Megatron's byte for byte, and raises errors for ids and files it cannot hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.errors import TextmillError
from textmill.tokens.store import IndexFormat, StoreWriter, dtype_for, find_index_errors, index_blocks, open_store

# Two one-sequence documents of lengths 3 and 2 in uint16, as the format's description gives it.
GOLDEN = (
    "4d4d494449445800000100000000000000 08 0200000000000000 0300000000000000 03000000 02000000 0000000000000000"
    "0600000000000000 0000000000000000 0100000000000000 0200000000000000"
).replace(" ", "")


def write(prefix: Path, documents: list[list[int]], dtype: object = np.uint16) -> None:
    with StoreWriter(prefix, np.dtype(dtype)) as store:  # type: ignore[call-overload]
        store.add(documents)


def test_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 65535]])
    assert (tmp_path / "a.idx").read_bytes().hex() == GOLDEN
    assert (tmp_path / "a.bin").read_bytes() == np.array([1, 2, 3, 4, 65535], "<u2").tobytes()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=20), st.integers(1, 5))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], at_a_time: int) -> None:
    prefix = tmp_path_factory.mktemp("store") / "dotted.name"
    with StoreWriter(prefix, np.dtype(np.int32)) as writer:
        for start in range(0, len(documents), at_a_time):
            writer.add(documents[start : start + at_a_time])
    store = open_store(prefix)
    assert store.ids.tolist() == [token for document in documents for token in document]
    assert store.lengths.tolist() == [len(document) for document in documents]
    assert store.index.documents.tolist() == list(range(len(documents) + 1))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 60000), max_size=9), max_size=6), min_size=1, max_size=4))
def test_joined_stores_equal_one_store(tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("join")
    with StoreWriter(folder / "joined", np.dtype(np.uint16)) as joined:
        for number, part in enumerate(parts):
            write(folder / f"part{number}", part)
            joined.add_store(open_store(folder / f"part{number}"))
    write(folder / "whole", [document for part in parts for document in part])
    for ending in (".bin", ".idx"):
        assert (folder / f"joined{ending}").read_bytes() == (folder / f"whole{ending}").read_bytes()


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(65499, np.uint16), (65500, np.int32), (65537, np.int32), (50257, np.uint16)]
)
def test_dtype_is_megatrons_choice(vocab: int, dtype: object) -> None:
    assert dtype_for(vocab) == dtype


@pytest.mark.parametrize("token", [65536, 70000, -1, 2**40])
def test_ids_never_wrap(tmp_path: Path, token: int) -> None:
    with pytest.raises(TextmillError, match="does not fit into uint16"):
        write(tmp_path / "a", [[1, token]])
    assert list(tmp_path.iterdir()) == []


def test_stores_of_two_dtypes_cannot_be_joined(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]], np.int32)
    with (
        pytest.raises(TextmillError, match="the same dtype"),
        StoreWriter(tmp_path / "b", np.dtype(np.uint16)) as writer,
    ):
        writer.add_store(open_store(tmp_path / "a"))


def test_damaged_files_and_other_formats_are_errors(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    index, ids = tmp_path / "a.idx", tmp_path / "a.bin"
    whole, tokens = index.read_bytes(), ids.read_bytes()
    for damaged, message in (
        (whole[:-1], "truncated or damaged"),
        (whole[:20], "not a token index"),
        (b"TNTIDX\0\0" + whole[8:], "dtype code"),
        (b"PK" + whole[2:], "not a token index"),
        (whole[:-8] + (7).to_bytes(8, "little"), "documents cover"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(TextmillError, match=message):
            open_store(tmp_path / "a")
    index.write_bytes(whole)
    ids.write_bytes(tokens[:-1])
    with pytest.raises(TextmillError, match="do not belong together"):
        open_store(tmp_path / "a")
    ids.unlink()
    with pytest.raises(TextmillError, match="file not found"):
        open_store(tmp_path / "a")


SENTENCES = st.lists(st.lists(st.lists(st.integers(0, 60000), max_size=5), max_size=4), max_size=12)


def add_sentences(writer: StoreWriter, documents: list[list[list[int]]]) -> None:
    flat = [token for document in documents for sentence in document for token in sentence]
    lengths = [len(sentence) for document in documents for sentence in document]
    writer.add_flat(
        np.array(flat, np.int64),
        np.array(lengths, np.int64),
        np.array([len(document) for document in documents], np.int64),
    )


@settings(max_examples=30, deadline=None)
@given(documents=SENTENCES, index_format=st.sampled_from(["mmap", "lazy"]), data=st.data())
def test_sentences_of_documents_in_both_formats(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[list[int]]],
    index_format: IndexFormat,
    data: st.DataObject,
) -> None:
    prefix = tmp_path_factory.mktemp("store") / "s"
    cut = data.draw(st.integers(0, len(documents)))
    with StoreWriter(prefix, np.dtype(np.uint16), index_format) as writer:
        add_sentences(writer, documents[:cut])
        add_sentences(writer, documents[cut:])
    store = open_store(prefix)
    wholes = [[token for sentence in document for token in sentence] for document in documents]
    assert len(store) == len(documents)
    assert store.lengths.tolist() == [len(sentence) for document in documents for sentence in document]
    assert store.document_lengths().tolist() == list(map(len, wholes))
    assert find_index_errors(store.index) == []
    begin = data.draw(st.integers(0, len(documents)))
    end = data.draw(st.integers(begin, len(documents)))
    part = store.slice(begin, end)
    assert part.ids.tolist() == [token for whole in wholes[begin:end] for token in whole]
    assert part.document_lengths().tolist() == [len(whole) for whole in wholes[begin:end]]
    borders = part.document_starts(np.arange(end - begin + 1))
    assert [part.ids[one:other].tolist() for one, other in pairwise(borders.tolist())] == wholes[begin:end]
    with StoreWriter(prefix.with_name("p"), np.dtype(np.uint16)) as writer:
        writer.add_store(part)
    copied = open_store(prefix.with_name("p"))
    assert copied.ids.tolist() == part.ids.tolist()
    assert np.diff(copied.index.documents).tolist() == [len(document) for document in documents[begin:end]]


def test_the_old_format_against_its_description(tmp_path: Path) -> None:
    """Three items in two documents, by hand: a header of six numbers, the document count, four int64 arrays."""
    header = [1, 8, 2, 3, 3, 3]  # version, uint16's code, its size, items, sizes, entries of the document index
    arrays = [0, 1, 2, 3, 0, 2, 2, 5, 2, 0, 3, 0, 2, 3]
    with StoreWriter(tmp_path / "a", np.dtype(np.uint16), "lazy") as writer:
        add_sentences(writer, [[[7, 8], []], [[9, 10, 11]]])
    assert (tmp_path / "a.idx").read_bytes() == b"TNTIDX\0\0" + np.array(header + arrays, "<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\0\0" + np.array(header[:5] + arrays[:11], "<i8").tobytes())
    assert open_store(tmp_path / "a").document_lengths().tolist() == [2, 0, 3], (
        "without documents, as fairseq writes it, each item is one"
    )


def test_errors_inside_an_index_are_found(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5], [6]])
    whole = (tmp_path / "a.idx").read_bytes()
    for place in range(34 + 4 * 3 + 8, 34 + 12 * 3 - 8):  # the offset in the middle
        (tmp_path / "a.idx").write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        assert find_index_errors(open_store(tmp_path / "a").index)


def test_more_tokens_than_31_bits(tmp_path: Path) -> None:
    """Three sequences of two billion tokens each, in a sparse file."""
    count = 2_000_000_000
    lengths, documents = np.full(3, count, np.int32), np.arange(1, 4, dtype=np.int64)
    (tmp_path / "a.idx").write_bytes(b"".join(index_blocks("mmap", np.dtype(np.uint16), lengths, documents)))
    with open(tmp_path / "a.bin", "wb") as stream:
        stream.truncate(6 * count)
    store = open_store(tmp_path / "a")
    assert store.tokens == 3 * count
    assert store.document_starts(np.arange(4)).tolist() == [0, count, 2 * count, 3 * count]
    assert store.slice(2, 3).ids[-1] == 0
