"""MongoDB over a real connection: one index over three collections; nothing is lost or read twice when the server dies.

6,000 documents, to be quick; bench/mongo.py does the same with 100,000.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="needs pymongo: pip install 'textmill[mongo]'")

from tests.support.mongo_process import EXPECTED_TEXTS, SIZES, MongoDatabase, open_database, text_of
from textmill.config import CorpusConfig, LocalRunner, RunConfig
from textmill.corpus.document import Document
from textmill.corpus.mongo import collections as mongo
from textmill.corpus.mongo import server as mongo_server
from textmill.corpus.mongo import writing as mongo_write
from textmill.corpus.mongo.collections import open_index, read_range
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import list_shards, read_documents
from textmill.errors import TextmillError


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoDatabase]:
    with open_database(tmp_path_factory.mktemp("mongo")) as database:
        for name, size in reversed(SIZES.items()):  # meta_info gets another order than COLLECTIONS has
            database.fill(name, [text_of(name, idx) for idx in range(size)])
        yield database


def forms(rows: list[Any]) -> list[str | None]:
    return [row and row["form"] for row in rows]


def test_one_index_in_the_order_of_collections(database: MongoDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    index = open_index(database.config)
    assert len(index) == len(EXPECTED_TEXTS)
    places = [0, 2999, 3000, 4999, 5000, 5999, -1]
    assert forms([index[place] for place in places]) == [EXPECTED_TEXTS[place] for place in places]
    assert forms(index[2990:3010]) == EXPECTED_TEXTS[2990:3010]
    assert forms(index[5990:2:-997]) == EXPECTED_TEXTS[5990:2:-997]
    with pytest.raises(IndexError):
        index[6000]
    assert capsys.readouterr().err == ""  # nothing odd, so nothing said
    index.close()


def test_random_batches_keep_the_requested_order(database: MongoDatabase) -> None:
    index, rng = open_index(database.config), random.Random(1)
    for size in (1, 7, 300):
        places = [rng.randrange(len(EXPECTED_TEXTS)) for _ in range(size)]
        places += places[:3]  # twice in one batch
        assert forms(index.batch(places)) == [EXPECTED_TEXTS[place] for place in places]
    assert index.batch([]) == []
    index.close()


@pytest.mark.parametrize(
    ("speeds", "tried", "best"),
    [
        ({24: 9, 96: 5, 384: 99, 1536: 99}, [24, 96], 24),
        ({24: 1, 96: 2, 384: 3, 1536: 4}, [24, 96, 384, 1536], 1536),
        ({24: 1, 96: 8, 384: 3, 1536: 4}, [24, 96, 384], 96),
    ],
)
def test_query_size_grows_while_the_server_gets_faster(speeds: dict[int, float], tried: list[int], best: int) -> None:
    query_size, sizes = mongo.QuerySize(), []
    for _ in range(20):
        sizes.append(query_size.size)
        query_size.learn(speeds[query_size.size])
    assert sizes == tried + [best] * (20 - len(tried))
    for _ in range(mongo.RELEARN_BATCHES - 20):
        query_size.learn(speeds[query_size.size])
    assert query_size.size == tried[0]  # searched for again


def test_ranges_cover_every_document_once(database: MongoDatabase) -> None:
    config = CorpusConfig()
    cuts = [0, 1, 999, 2500, 3500, 6000]
    found = [row for start, stop in pairwise(cuts) for row in read_range(database.config, start, stop, config)]
    assert [row.text for row in found if isinstance(row, Document)] == EXPECTED_TEXTS
    assert found[3000].source == f"mongo:{database.config}"
    first = database.db["books"].find_one({"idx": 0})
    assert isinstance(found[3000], Document)
    assert found[3000].id == f"books 0 {first['_id']}"


@pytest.mark.long
def test_server_killed_in_the_middle_of_a_scan(database: MongoDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (process := database.process):
        pytest.skip("a named server is not ours to kill")
    monkeypatch.setattr(mongo, "SCAN_BLOCK", 100)
    seen: list[str] = []
    for number, row in enumerate(read_range(database.config, 0, len(EXPECTED_TEXTS), CorpusConfig())):
        if number in (500, 3333):
            process.stop(signal.SIGKILL)
            threading.Timer(1.0, process.start).start()
        assert isinstance(row, Document)
        seen.append(row.id.rpartition(" ")[2] + row.text)
    assert len(set(seen)) == len(seen)
    assert [text[24:] for text in seen] == EXPECTED_TEXTS


def test_irregularities_are_reported(database: MongoDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    database.db["odd"].insert_many([{"idx": idx, "form": f"odd {idx}"} for idx in range(20) if idx not in (3, 4, 11)])
    database.db["meta_info"].insert_one({"collection_name": "odd", "num_docs": 20})
    path = database.write_config("odd.json", COLLECTIONS=["odd"])
    index = open_index(path)
    message = capsys.readouterr().err
    assert "odd: 3 of 20 positions have no document" in message
    assert "meta_info records 20 documents, the collection has 17" in message
    assert "no index on idx" in message
    assert "create_idx_indexes" in message
    assert forms(index[2:6]) == ["odd 2", None, None, "odd 5"]
    assert index.batch([11, 12])[0] is None
    assert [row["idx"] for row in index] == [idx for idx in range(20) if idx not in (3, 4, 11)]
    database.db["unnumbered"].insert_many([{"idx": 0, "form": "a"}, {"form": "b"}, {"form": "c"}])
    open_index(database.write_config("unnumbered.json", COLLECTIONS=["unnumbered"]))
    assert "2 of 3 documents have no idx; they are not read" in capsys.readouterr().err
    rows = [
        {"idx": 0, "form": "a"},
        {"form": "b"},
        {"idx": 2, "form": "c"},
        {"idx": 4, "form": "d"},
        {"idx": 4, "form": "e"},
    ]
    database.db["mixed"].insert_many(rows)  # as many documents as positions
    open_index(database.write_config("mixed.json", COLLECTIONS=["mixed"]))
    message = capsys.readouterr().err
    assert "mixed: 2 of 5 positions have no document" in message
    assert "mixed: 1 of 5 documents have no idx" in message
    assert "mixed: 1 of 5 documents have an idx that another one has too" in message
    mongo_write.create_idx_indexes(path)
    assert mongo_write.fix_meta_info(path) == {"odd": 17}
    capsys.readouterr()
    open_index(path)
    assert capsys.readouterr().err.count("\n") == 1  # only the holes are left


def test_text_fields(database: MongoDatabase) -> None:
    rows: list[dict[str, Any]] = [
        {"form": "raw", "filt_text": "clean"},
        {"form": "raw"},
        {"form": "raw", "filt_text": None},
        {"q": "hi", "a": "ho"},
        {"form": 3},
        {"filt_text": "", "form": "raw"},
        {"body": "other"},
    ]
    database.db["kinds"].create_index("idx", unique=True)
    database.db["kinds"].insert_many([{"idx": idx, **row} for idx, row in enumerate(rows)])
    path = database.write_config("kinds.json", COLLECTIONS=["kinds"])
    found = list(read_range(path, 0, 7, CorpusConfig()))
    assert [row.text if isinstance(row, Document) else None for row in found] == [
        "clean",
        "raw",
        "raw",
        None,
        None,
        "",
        None,
    ]
    assert isinstance(found[3], BadRecord)
    assert "found ['q', 'a']; set corpus.text_key" in found[3].reason
    by_key = list(read_range(path, 0, 7, CorpusConfig(text_key="body")))
    assert [row.text for row in by_key if isinstance(row, Document)] == ["other"]
    conversations = list(read_range(path, 0, 7, CorpusConfig(chat="pairs")))
    assert [row.turns for row in conversations if isinstance(row, Document)] == [(("user", "hi"), ("assistant", "ho"))]
    assert next(row.reason for row in conversations if isinstance(row, BadRecord)).startswith(
        "no question and answer in ['filt_text', 'form']"
    )
    named = list(read_range(path, 0, 7, CorpusConfig(chat="pairs", text_key="form+filt_text")))
    assert next(row.turns for row in named if isinstance(row, Document)) == (("user", "raw"), ("assistant", "clean"))


def test_write_back(database: MongoDatabase) -> None:
    database.db["back"].create_index("idx", unique=True)
    database.db["back"].insert_many([{"idx": idx, "form": f" dirty {idx} "} for idx in range(50)])
    path = database.write_config("back.json", COLLECTIONS=["back"])
    cleaned = [
        Document(row.text.strip(), row.source, row.id)
        for row in read_range(path, 0, 50, CorpusConfig())
        if isinstance(row, Document)
    ]
    database.db["back"].delete_one({"idx": 7})
    assert mongo_write.write_back(path, cleaned) == {"documents": 50, "changed": 49, "missing": 1}
    assert mongo_write.write_back(path, cleaned) == {"documents": 50, "changed": 0, "missing": 1}
    again = [row.text for row in read_range(path, 0, 50, CorpusConfig()) if isinstance(row, Document)]
    assert again == [f"dirty {idx}" for idx in range(50) if idx != 7]
    with pytest.raises(TextmillError, match="not a document of"):
        mongo_write.write_back(path, [Document("x", "a.txt", "line 3")])


class Killed(BaseException):
    """Raised to simulate a killed process."""


def test_loading_is_complete_after_a_kill(
    database: MongoDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.write_config("load.json", COLLECTIONS=["loaded"])
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps({"text": f"a {number}"}) + "\n" for number in range(95)) + "not json\n\n[1]\n")
    second.write_text("".join(json.dumps({"text": f"b {number}"}) + "\n" for number in range(30)))
    monkeypatch.setattr(mongo_write, "WRITE_BLOCK", 10)
    real, calls = mongo_write._insert, []

    def insert(db: Any, collection: str, rows: list[Any], field: str) -> int:
        calls.append(len(rows))
        if len(calls) == 4:
            real(db, collection, rows[:5], field)
            raise Killed
        return real(db, collection, rows, field)

    monkeypatch.setattr(mongo_write, "_insert", insert)
    with pytest.raises(Killed):
        mongo_write.load_lines(path, "loaded", [first])
    counts = mongo_write.load_lines(path, "loaded", [first, second])
    assert counts == {"records": 127, "loaded": 90, "existing": 35, "bad": 2}
    assert mongo_write.load_lines(path, "loaded", [first, second]) == {
        "records": 127,
        "loaded": 0,
        "existing": 125,
        "bad": 2,
    }
    expected = [f"a {number}" for number in range(95)] + [f"b {number}" for number in range(30)]
    assert [row["form"] for row in open_index(path)] == expected
    meta = database.db["meta_info"].find_one({"collection_name": "loaded"})
    assert meta["num_docs"] == 125
    with pytest.raises(TextmillError, match="COLLECTIONS does not list 'other'"):
        mongo_write.load_lines(path, "other", [first])


def test_connection_string_from_environment_or_file(database: MongoDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    (database.config.parent / "secret.txt").write_text(database.address + "\n")
    path = database.write_config("by_file.json", MONGO_CONNECTION_STRING=None, MONGO_CONNECTION_FILE="secret.txt")
    assert len(open_index(path)) == len(EXPECTED_TEXTS)
    path = database.write_config("by_variable.json", MONGO_CONNECTION_STRING=None)
    with pytest.raises(TextmillError, match="TEXTMILL_MONGO"):
        open_index(path)
    monkeypatch.setenv("TEXTMILL_MONGO", database.address)
    assert len(open_index(path)) == len(EXPECTED_TEXTS)


def test_error_names_an_unknown_collection(database: MongoDatabase) -> None:
    with pytest.raises(TextmillError, match="no collection 'boks'; did you mean 'books'"):
        open_index(database.write_config("wrong.json", COLLECTIONS=["boks"]))


SECRET = (
    "mongodb://mill%40er:s3cr%2Ft@nowhere.invalid:27999,127.0.0.1:1/admin"
    "?authSource=hidden&serverSelectionTimeoutMS=300"
)


@pytest.mark.parametrize(
    "address",
    [
        SECRET,
        SECRET.replace("s3cr%2Ft", "s3c/r:t"),
        SECRET.replace("27999", "port"),
        "mongodb+srv://u:pwpw@nowhere.invalid",
    ],
)
def test_no_part_of_the_connection_string_is_printed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mongo_server, "DEFAULT_MAX_OUTAGE", 0.1)
    path = tmp_path / "db_config.json"
    path.write_text(
        json.dumps({"MONGO_CONNECTION_STRING": address, "MONGO_CONNECTION_DB": "korpus", "COLLECTIONS": ["web"]})
    )
    with pytest.raises(TextmillError) as caught:
        open_index(path)
    message = f"{caught.value} {caught.value.__cause__} {mongo_server.open_server(path)!r} {capsys.readouterr()}"
    for secret in (address, "s3c", "mill%40er", "mill@er", "nowhere", "hidden", "pwpw"):
        assert secret not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "found a list"),
        ({}, "MONGO_CONNECTION_DB is missing"),
        ({"MONGO_CONNECTION_DB": "x"}, "COLLECTIONS must be a list"),
        ({"MONGO_CONNECTION_DB": "x", "COLLECTIONS": ["a", "a"]}, "twice"),
    ],
)
def test_error_names_a_wrong_setting(settings: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "db_config.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(TextmillError, match=message):
        open_index(path)


def test_missing_package_is_reported_at_start(root: Path) -> None:
    script = "import sys; sys.modules['pymongo'] = None; import textmill.corpus.mongo.collections"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert "a MongoDB corpus needs pymongo; run: pip install 'textmill[mongo]'" in done.stderr


def test_prepare_reads_conversations(database: MongoDatabase, tmp_path: Path) -> None:
    database.db["chat"].create_index("idx", unique=True)
    database.db["chat"].insert_many([{"idx": idx, "Q": f"question {idx}", "A": f"answer {idx}"} for idx in range(20)])
    source = f"mongo:{database.write_config('chat.json', COLLECTIONS=['chat'])}"
    corpus = CorpusConfig(sources=[source], split=[1.0], chat="pairs")
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    found = [document.turns for path in list_shards(folder, "train") for document in read_documents(path)]
    assert sorted(found) == sorted((("user", f"question {idx}"), ("assistant", f"answer {idx}")) for idx in range(20))
    with pytest.raises(TextmillError, match=r"corpus\.chat=pairs reads conversations"):
        prepare(RunConfig(folder=str(tmp_path / "back"), corpus=corpus.model_copy(update={"mongo_write_back": True})))


def test_prepare_reads_collections_and_writes_no_address(database: MongoDatabase, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=[f"mongo:{database.config}"], split=[1.0])
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    found = [document for path in list_shards(folder, "train") for document in read_documents(path)]
    assert [document.text for document in found] == EXPECTED_TEXTS
    assert json.loads((folder / "account.json").read_text())["records"] == len(EXPECTED_TEXTS)
    host = database.address.partition("://")[2]
    assert all(host not in path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".jsonl"))
