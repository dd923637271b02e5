"""The source and id of every document of a store can be looked up."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from textmill.corpus import shards
from textmill.errors import TextmillError
from textmill.tokens.lineage import Lineage, new_lineage

ROWS = [(f"texts/{number // 7}.jsonl", f"line {number}") for number in range(40)]


def write(path: Path, rows: list[tuple[str, str]], at_a_time: int = 3) -> None:
    with new_lineage(path) as lineage:
        for start in range(0, len(rows), at_a_time):
            sources, ids = zip(*rows[start : start + at_a_time], strict=True)
            lineage.add(list(sources), list(ids))


def test_rows_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP_ROWS", 10)
    write(tmp_path / "a.parquet", ROWS)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups > 3
    lineage = Lineage(tmp_path / "a.parquet")
    assert len(lineage) == len(ROWS)
    for document in (0, 39, 12, 11, 13, 0):
        assert lineage[document] == ROWS[document]
    for outside in (-1, 40):
        with pytest.raises(IndexError, match="the store has 40"):
            lineage[outside]


def test_joined_lineages(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ROWS[:15])
    write(tmp_path / "b.parquet", [])
    write(tmp_path / "c.parquet", ROWS[15:], at_a_time=40)
    with new_lineage(tmp_path / "all.parquet") as joined:
        for name in "abc":
            joined.add_file(tmp_path / f"{name}.parquet")
    lineage = Lineage(tmp_path / "all.parquet")
    assert [lineage[document] for document in range(len(lineage))] == ROWS
    assert len(Lineage(tmp_path / "b.parquet")) == 0


def test_writing_is_atomic(tmp_path: Path) -> None:
    with pytest.raises(TypeError), new_lineage(tmp_path / "a.parquet") as lineage:
        lineage.add(["a"], 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TextmillError, match="no such file"):
        Lineage(tmp_path / "a.parquet")
