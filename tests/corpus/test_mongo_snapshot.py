"""A collection that grows moves nothing; a mark that sees what it says it sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="needs pymongo: pip install 'textmill[mongo]'")

from tests.support.mongo_process import World, open_world
from textmill.config import CorpusConfig, LocalRunner, RunConfig
from textmill.corpus.document import Document
from textmill.corpus.formats.mongo import read
from textmill.corpus.mongo import collections as mongo
from textmill.corpus.mongo.snapshot import PROBES
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import list_shards, read_documents
from textmill.corpus.source import Source
from textmill.corpus.sources import find_sources, source_state, split_into_chunks
from textmill.errors import TextmillError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("bounds")) as world:
        yield world


@pytest.fixture
def world(server: World) -> World:
    for name in ("one", "two"):
        server.db.drop_collection(name)
        server.db["meta_info"].delete_many({"collection_name": name})
        server.fill(name, [f"{name} {idx}" for idx in range(100)])
    server.write_config("db_config.json", COLLECTIONS=["one", "two"])
    return server


def source_of(world: World, read_original: bool = False) -> Source:
    return find_sources([f"mongo:{world.config}"], read_original=read_original)[0]


def texts_of(source: Source) -> list[str]:
    found = [record for piece in split_into_chunks([source], "section") for record in read(piece, CorpusConfig())]
    return [record.text for record in found if isinstance(record, Document)]


WANTED = [f"{name} {idx}" for name in ("one", "two") for idx in range(100)]


def test_growth_moves_no_position(world: World) -> None:
    before = source_of(world)
    mark = source_state(before)
    world.db["one"].insert_many([{"idx": 100 + idx, "form": f"late {idx}"} for idx in range(30)])
    assert texts_of(before) == WANTED
    assert source_state(before) == mark
    after = source_of(world)
    assert texts_of(after) == [*WANTED[:100], *(f"late {idx}" for idx in range(30)), *WANTED[100:]]
    assert source_state(after).bytes == 230
    assert source_state(after).fingerprint != mark.fingerprint


def test_prepare_reads_what_was_there_when_it_began(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mongo.read_range

    def read_and_grow(path: Any, start: int, *rest: Any) -> Any:
        if not start:
            world.db["one"].insert_many([{"idx": 100 + idx, "form": f"late {idx}"} for idx in range(30)])
        return real(path, start, *rest)

    monkeypatch.setattr(mongo, "read_range", read_and_grow)
    monkeypatch.setattr("textmill.corpus.formats.mongo.DOCUMENTS_PER_CHUNK", 40)
    config = RunConfig(
        folder=str(tmp_path),
        corpus=CorpusConfig(sources=[f"mongo:{world.config}"], split=[1.0]),
        runner=LocalRunner(workers=1),
    )
    folder = prepare(config)
    assert [document.text for path in list_shards(folder, "train") for document in read_documents(path)] == WANTED
    with pytest.raises(TextmillError, match=r"was made from other settings or inputs: inputs\.mongo"):
        prepare(config)


@pytest.mark.parametrize("change", ["first", "last", "deleted", "another _id", "no idx"])
def test_mark_sees(change: str, world: World) -> None:
    source = source_of(world)
    before, two = source_state(source).fingerprint, world.db["two"]
    if change == "deleted":
        two.delete_one({"idx": 41})
    elif change == "no idx":
        two.insert_one({"form": "nowhere"})
    elif change == "another _id":
        two.delete_one({"idx": 99})
        two.insert_one({"idx": 99, "form": "two 99"})
    else:
        two.update_one({"idx": 0 if change == "first" else 99}, {"$set": {"form": "edited"}})
    assert source_state(source).fingerprint != before


def test_mark_does_not_see_an_edit_between_its_probes(world: World) -> None:
    source = source_of(world)
    before, probed = source_state(source).fingerprint, {99 * number // (PROBES + 1) for number in range(PROBES + 2)}
    unseen = next(idx for idx in range(100) if idx not in probed)
    world.db["two"].update_one({"idx": unseen}, {"$set": {"form": "edited"}})
    assert source_state(source).fingerprint == before


def test_own_writing_is_no_change_only_where_it_is_not_read(world: World) -> None:
    source, raw = source_of(world), source_of(world, read_original=True)
    before, before_raw = source_state(source).fingerprint, source_state(raw).fingerprint
    world.db["two"].update_many({}, {"$set": {"filt_text": "cleaned"}})
    assert source_state(raw).fingerprint == before_raw
    assert source_state(source).fingerprint != before


def test_mark_is_the_same_in_the_manifest_and_tells_no_text(world: World, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=[f"mongo:{world.config}"], split=[1.0])
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    made_from = json.loads((folder / "manifest.json").read_text())["made_from"]
    assert made_from[f"inputs.mongo:{world.config}"] == {
        "bytes": 200,
        "sha256": source_state(source_of(world)).fingerprint,
    }
    assert "two 99" not in (folder / "manifest.json").read_text()
