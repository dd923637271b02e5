"""The token store is Megatron's, byte for byte, and refuses what it cannot hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.errors import TextmillError
from textmill.tokens.store import StoreWriter, dtype_for, open_store

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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=20), st.integers(1, 5))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], at_a_time: int) -> None:
    prefix = tmp_path_factory.mktemp("store") / "dotted.name"
    with StoreWriter(prefix, np.dtype(np.int32)) as writer:
        for start in range(0, len(documents), at_a_time):
            writer.add(documents[start : start + at_a_time])
    store = open_store(prefix)
    assert store.ids.tolist() == [token for document in documents for token in document]
    assert store.lengths.tolist() == [len(document) for document in documents]
    assert store.documents.tolist() == list(range(len(documents) + 1))


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


@pytest.mark.parametrize(("vocab", "dtype"), [(65499, np.uint16), (65500, np.int32), (65537, np.int32), (50257, np.uint16)])
def test_dtype_is_megatrons_choice(vocab: int, dtype: object) -> None:
    assert dtype_for(vocab) == dtype


@pytest.mark.parametrize("token", [65536, 70000, -1, 2**40])
def test_ids_never_wrap(tmp_path: Path, token: int) -> None:
    with pytest.raises(TextmillError, match="does not fit uint16"):
        write(tmp_path / "a", [[1, token]])
    assert list(tmp_path.iterdir()) == []


def test_stores_of_two_dtypes_do_not_join(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]], np.int32)
    with pytest.raises(TextmillError, match="one dtype"), StoreWriter(tmp_path / "b", np.dtype(np.uint16)) as writer:
        writer.add_store(open_store(tmp_path / "a"))


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    index, ids = tmp_path / "a.idx", tmp_path / "a.bin"
    whole, tokens = index.read_bytes(), ids.read_bytes()
    for damaged, said in (
        (whole[:-1], "cut or damaged"),
        (whole[:20], "not a token index"),
        (b"TNTIDX\0\0" + whole[8:], "not a token index"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(TextmillError, match=said):
            open_store(tmp_path / "a")
    index.write_bytes(whole)
    ids.write_bytes(tokens[:-1])
    with pytest.raises(TextmillError, match="not the index's pair"):
        open_store(tmp_path / "a")
    ids.unlink()
    with pytest.raises(TextmillError, match="no such file"):
        open_store(tmp_path / "a")
