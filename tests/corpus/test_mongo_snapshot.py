"""Positions stay stable while a collection grows, and the fingerprint notices changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="needs pymongo: pip install 'textmill[mongo]'")

from tests.support.mongo_process import MongoDatabase, open_database
from textmill.config import CorpusConfig, LocalRunner, RunConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, source_state, split_into_chunks
from textmill.corpus.formats import mongo
from textmill.corpus.formats.mongo import PROBES, read
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.corpus.source import Source
from textmill.errors import TextmillError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoDatabase]:
    with open_database(tmp_path_factory.mktemp("bounds")) as database:
        yield database


@pytest.fixture
def database(server: MongoDatabase) -> MongoDatabase:
    for name in ("one", "two"):
        server.db.drop_collection(name)
        server.db["meta_info"].delete_many({"collection_name": name})
        server.fill(name, [f"{name} {idx}" for idx in range(100)])
    server.write_config("db_config.json", COLLECTIONS=["one", "two"])
    return server


def source_of(database: MongoDatabase) -> Source:
    return find_sources([f"mongo:{database.config}"])[0]


def read_all_texts(source: Source) -> list[str]:
    found = [record for chunk in split_into_chunks([source], "section") for record in read(chunk, CorpusConfig())]
    return [record.text for record in found if isinstance(record, Document)]


EXPECTED = [f"{name} {idx}" for name in ("one", "two") for idx in range(100)]


def test_growth_does_not_move_positions(database: MongoDatabase) -> None:
    before = source_of(database)
    mark = source_state(before)
    database.db["one"].insert_many([{"idx": 100 + idx, "form": f"late {idx}"} for idx in range(30)])
    assert read_all_texts(before) == EXPECTED
    assert source_state(before) == mark
    after = source_of(database)
    assert read_all_texts(after) == [*EXPECTED[:100], *(f"late {idx}" for idx in range(30)), *EXPECTED[100:]]
    assert source_state(after).bytes == 230
    assert source_state(after).fingerprint != mark.fingerprint


def test_prepare_ignores_documents_added_later(
    database: MongoDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mongo.read

    def read_and_grow(chunk: Any, config: CorpusConfig) -> Any:
        if not chunk.start:
            database.db["one"].insert_many([{"idx": 100 + idx, "form": f"late {idx}"} for idx in range(30)])
        return real(chunk, config)

    monkeypatch.setattr(mongo, "read", read_and_grow)
    monkeypatch.setattr(mongo, "DOCUMENTS_PER_CHUNK", 40)
    config = RunConfig(
        folder=str(tmp_path),
        corpus=CorpusConfig(sources=[f"mongo:{database.config}"], split=[1.0]),
        runner=LocalRunner(workers=1),
    )
    folder = prepare(config)
    assert [document.text for document in open_corpus(folder, "train")] == EXPECTED
    with pytest.raises(TextmillError, match=r"was made from other settings or inputs: the source mongo:.* has changed"):
        prepare(config)


@pytest.mark.parametrize("change", ["first", "last", "deleted", "another _id", "no idx", "deleted and no idx"])
def test_fingerprint_notices(change: str, database: MongoDatabase) -> None:
    source = source_of(database)
    before, two = source_state(source).fingerprint, database.db["two"]
    if change.startswith("deleted"):
        two.delete_one({"idx": 41})
        if change != "deleted":
            two.insert_one({"form": "nowhere"})
    elif change == "no idx":
        two.insert_one({"form": "nowhere"})
    elif change == "another _id":
        two.delete_one({"idx": 99})
        two.insert_one({"idx": 99, "form": "two 99"})
    else:
        two.update_one({"idx": 0 if change == "first" else 99}, {"$set": {"form": "edited"}})
    assert source_state(source).fingerprint != before


def test_fingerprint_misses_an_edit_between_its_probes(database: MongoDatabase) -> None:
    source = source_of(database)
    before, probed = source_state(source).fingerprint, {99 * number // (PROBES + 1) for number in range(PROBES + 2)}
    unseen = next(idx for idx in range(100) if idx not in probed)
    database.db["two"].update_one({"idx": unseen}, {"$set": {"form": "edited"}})
    assert source_state(source).fingerprint == before


def test_manifest_has_the_fingerprint_and_no_text(database: MongoDatabase, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=[f"mongo:{database.config}"], split=[1.0])
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    made_from = json.loads((folder / "manifest.json").read_text())["made_from"]
    assert made_from[f"inputs.mongo:{database.config}"] == {
        "bytes": 200,
        "sha256": source_state(source_of(database)).fingerprint,
    }
    assert "two 99" not in (folder / "manifest.json").read_text()
