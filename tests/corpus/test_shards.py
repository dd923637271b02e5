"""Shards: documents round-trip in bounded row groups, damage is detected, and a corpus is a sequence of them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from textmill.config import CorpusConfig, LocalRunner, RunConfig
from textmill.corpus import shards
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import (
    SCHEMA,
    count_group_bytes,
    count_group_rows,
    list_shards,
    new_shard,
    open_corpus,
    read_documents,
    read_groups,
    shard_name,
)
from textmill.errors import TextmillError


def documents(count: int) -> list[Document]:
    return [
        Document(f"문서 {number} " + "söz " * (number % 50), "a.txt", f"section {number}") for number in range(count)
    ]


def write(path: Path, rows: list[Document]) -> None:
    with new_shard(path) as shard:
        for start in range(0, len(rows), 100):
            part = rows[start : start + 100]
            columns = [[getattr(row, name) for row in part] for name in SCHEMA.names]
            shard.add(pa.table([pa.array(column, pa.string()) for column in columns], schema=SCHEMA))


def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP_ROWS", 500)
    path = tmp_path / shard_name("train", 3)
    write(path, documents(2350))
    assert list(read_documents(path)) == documents(2350)
    assert pq.ParquetFile(path).num_row_groups == 5


def test_row_groups_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", 20_000)
    path = tmp_path / "train-00000.parquet"
    write(path, documents(2000))
    meta = pq.ParquetFile(path).metadata
    assert meta.num_row_groups > 5
    assert list(read_documents(path)) == documents(2000)


def test_empty_shard(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    assert list(read_documents(tmp_path / "a.parquet")) == []


def test_order_of_shards(tmp_path: Path) -> None:
    for number in [100_000, 2, 10]:
        (tmp_path / shard_name("valid", number)).touch()
    (tmp_path / shard_name("train", 0)).touch()
    assert [path.name for path in list_shards(tmp_path, "valid")] == [
        "valid-00002.parquet",
        "valid-00010.parquet",
        "valid-100000.parquet",
    ]
    assert list_shards(tmp_path, "test") == []


def test_unfinished_shard_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(AttributeError), new_shard(tmp_path / "a.parquet") as shard:
        shard.add(None)  # as if the work failed in the middle
    assert list(tmp_path.iterdir()) == []


def test_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Truncated or with one flipped bit: never a text that was not written."""
    path, rng = tmp_path / "a.parquet", random.Random(11)
    write(path, documents(300))
    whole, messages = path.read_bytes(), []
    for trial in range(150):
        data = bytearray(whole)
        if trial % 5:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            found = list(read_documents(path))
        except TextmillError as error:
            messages.append(str(error))
        else:
            assert found == documents(300)
    assert len(messages) > 100
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="no such file; create the corpus with: textmill prepare"):
        list(read_documents(tmp_path / "gone.parquet"))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(TextmillError, match=r"not a corpus shard; found the columns \['body'\]"):
        list(read_documents(tmp_path / "b.parquet"))


def test_groups_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP_ROWS", 200)
    rows = documents(500)
    write(tmp_path / "a.parquet", rows)
    assert count_group_rows(tmp_path / "a.parquet") == [200, 200, 100]
    sizes = [sum(len(row.text.encode()) for row in rows[start : start + 200]) for start in (0, 200, 400)]
    assert all(found > size for found, size in zip(count_group_bytes(tmp_path / "a.parquet"), sizes, strict=True))
    middle, last = read_groups(tmp_path / "a.parquet", [1, 2], ["text", "id"])
    assert middle.column("text").to_pylist() == [row.text for row in rows[200:400]]
    assert last.column("id").to_pylist() == [row.id for row in rows[400:]]
    (few,) = read_groups(tmp_path / "a.parquet", [1], ["text"], max_rows=3)
    assert few.column(0).to_pylist() == [row.text for row in rows[200:203]]
    with pytest.raises(TextmillError, match="not a corpus shard"):
        next(read_groups(tmp_path / "a.parquet", [0], ["body"]))


@pytest.fixture
def folder(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "GROUP_ROWS", 7)  # many row groups in a small corpus
    corpus = CorpusConfig(sources=[str(tiny_texts)], section_chars=100)
    return prepare(RunConfig(folder=str(tiny_texts.parent), corpus=corpus, runner=LocalRunner(workers=1)))


def test_every_document_by_position(folder: Path) -> None:
    wanted = [document for split in SPLITS for path in list_shards(folder, split) for document in read_documents(path)]
    corpus = open_corpus(folder)
    assert len(corpus) == len(wanted) > 40
    assert [corpus[place] for place in range(len(corpus))] == wanted == list(corpus)
    assert [corpus[-place] for place in range(1, len(corpus) + 1)] == wanted[::-1]
    assert corpus[3:20:4] == wanted[3:20:4]
    assert sum(len(open_corpus(folder, split)) for split in SPLITS) == len(corpus)
    for place in (len(corpus), -len(corpus) - 1):
        with pytest.raises(IndexError):
            corpus[place]


def test_a_split_may_be_empty(folder: Path) -> None:
    for path in list_shards(folder, "test"):
        path.unlink()
    assert len(open_corpus(folder, "test")) == 0
    with pytest.raises(TextmillError, match="run textmill prepare first"):
        open_corpus(folder / "elsewhere")
