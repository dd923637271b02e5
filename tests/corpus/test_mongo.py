"""MongoDB over a real connection: one index over three collections; nothing is lost or read twice when the server dies.

600 documents, to be quick; bench/mongo.py does the same with 100,000.
"""

from __future__ import annotations

import json
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
from textmill.corpus.find_sources import find_sources, source_state
from textmill.corpus.formats import mongo
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import open_corpus
from textmill.corpus.source import Source, SourceChunk
from textmill.errors import TextmillError


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoDatabase]:
    with open_database(tmp_path_factory.mktemp("mongo")) as database:
        for name, size in reversed(SIZES.items()):  # meta_info gets another order than COLLECTIONS has
            database.fill(name, [text_of(name, idx) for idx in range(size)])
        yield database


def read_range(path: Path, start: int, stop: int, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    yield from mongo.read(SourceChunk(open_source(path), start, stop), config)


def open_source(path: Path) -> Source:
    (source,) = find_sources([f"mongo:{path}"])
    return source


def texts_of(path: Path, start: int = 0, stop: int = 10_000) -> list[str]:
    return [row.text for row in read_range(path, start, stop, CorpusConfig()) if isinstance(row, Document)]


def test_ranges_cover_every_document_once(
    database: MongoDatabase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mongo, "SCAN_BLOCK", 100)
    config = CorpusConfig()
    cuts = [0, 1, 99, 290, 310, 499, 501, 599, 600, 700]
    found = [row for start, stop in pairwise(cuts) for row in read_range(database.config, start, stop, config)]
    assert [row.text for row in found if isinstance(row, Document)] == EXPECTED_TEXTS
    assert found[300].source == f"mongo:{database.config}"
    first = database.db["books"].find_one({"idx": 0})
    assert isinstance(found[300], Document)
    assert found[300].id == f"books 0 {first['_id']}"
    assert capsys.readouterr().err == ""  # nothing odd, so nothing said


@pytest.mark.long
def test_server_killed_in_the_middle_of_a_scan(database: MongoDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (process := database.process):
        pytest.skip("a named server is not ours to kill")
    monkeypatch.setattr(mongo, "SCAN_BLOCK", 10)
    seen: list[str] = []
    for number, row in enumerate(read_range(database.config, 0, len(EXPECTED_TEXTS), CorpusConfig())):
        if number in (50, 333):
            process.stop(signal.SIGKILL)
            threading.Timer(1.0, process.start).start()
        assert isinstance(row, Document)
        seen.append(row.id.rpartition(" ")[2] + row.text)
    assert len(set(seen)) == len(seen)
    assert [text[24:] for text in seen] == EXPECTED_TEXTS


def test_documents_without_number_or_index(database: MongoDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    database.db["odd"].insert_many([{"idx": idx, "form": f"odd {idx}"} for idx in range(20) if idx not in (3, 4, 11)])
    path = database.write_config("odd.json", COLLECTIONS=["odd"])
    assert texts_of(path) == [f"odd {idx}" for idx in range(20) if idx not in (3, 4, 11)]
    message = capsys.readouterr().err
    assert "no index on idx" in message
    assert "create one in mongosh: db.getCollection('odd').createIndex({idx: 1}, {unique: true})" in message
    assert texts_of(path, 2, 6) == ["odd 2", "odd 5"]
    database.db["unnumbered"].insert_many([{"idx": 0, "form": "a"}, {"form": "b"}, {"form": "c"}])
    source = open_source(database.write_config("unnumbered.json", COLLECTIONS=["unnumbered"]))
    *bad, document = mongo.read(SourceChunk(source, 0, 1), CorpusConfig())
    assert isinstance(document, Document)
    assert [one.reason[:6] for one in bad if isinstance(one, BadRecord)] == ["no idx", "no idx"]
    database.db["odd"].create_index("idx", unique=True)
    capsys.readouterr()
    open_source(path)
    assert capsys.readouterr().err == ""


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
    assert "no field 'text'; found ['a', 'q']; it is a conversation: set corpus.chat=pairs" in found[3].reason
    by_key = list(read_range(path, 0, 7, CorpusConfig(text_key="body")))
    assert [row.text for row in by_key if isinstance(row, Document)] == ["other"]
    joined = read_range(path, 0, 1, CorpusConfig(text_key="form+filt_text", keep_fields=["form"]))
    assert [(row.text, row.meta) for row in joined if isinstance(row, Document)] == [("raw\nclean", '{"form": "raw"}')]
    conversations = list(read_range(path, 0, 7, CorpusConfig(chat="pairs")))
    assert [row.turns for row in conversations if isinstance(row, Document)] == [(("user", "hi"), ("assistant", "ho"))]
    assert next(row.reason for row in conversations if isinstance(row, BadRecord)).startswith(
        "no question and answer in ['filt_text', 'form']"
    )
    named = list(read_range(path, 0, 7, CorpusConfig(chat="pairs", text_key="form+filt_text")))
    assert next(row.turns for row in named if isinstance(row, Document)) == (("user", "raw"), ("assistant", "clean"))


def test_connection_string_from_environment_or_file(database: MongoDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    (database.config.parent / "secret.txt").write_text(database.address + "\n")
    path = database.write_config("by_file.json", MONGO_CONNECTION_STRING=None, MONGO_CONNECTION_FILE="secret.txt")
    assert source_state(open_source(path)).bytes == len(EXPECTED_TEXTS)
    path = database.write_config("by_variable.json", MONGO_CONNECTION_STRING=None)
    with pytest.raises(TextmillError, match="TEXTMILL_MONGO"):
        open_source(path)
    monkeypatch.setenv("TEXTMILL_MONGO", database.address)
    assert source_state(open_source(path)).bytes == len(EXPECTED_TEXTS)


def test_error_names_an_unknown_collection(database: MongoDatabase) -> None:
    with pytest.raises(TextmillError, match=r"no collection 'boks'; the database holds .*books"):
        open_source(database.write_config("wrong.json", COLLECTIONS=["boks"]))


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
    monkeypatch.setattr(mongo, "MAX_OUTAGE", 0.1)
    path = tmp_path / "db_config.json"
    path.write_text(
        json.dumps({"MONGO_CONNECTION_STRING": address, "MONGO_CONNECTION_DB": "korpus", "COLLECTIONS": ["web"]})
    )
    with pytest.raises(TextmillError) as caught:
        open_source(path)
    message = f"{caught.value} {caught.value.__cause__} {mongo.open_server(path)!r} {capsys.readouterr()}"
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
        open_source(path)


def test_missing_package_is_reported_at_start(root: Path) -> None:
    script = "import sys; sys.modules['pymongo'] = None; import textmill.corpus.formats.mongo"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert "a MongoDB corpus needs pymongo; run: pip install 'textmill[mongo]'" in done.stderr


def test_prepare_reads_conversations(database: MongoDatabase, tmp_path: Path) -> None:
    database.db["chat"].create_index("idx", unique=True)
    database.db["chat"].insert_many([{"idx": idx, "Q": f"question {idx}", "A": f"answer {idx}"} for idx in range(20)])
    source = f"mongo:{database.write_config('chat.json', COLLECTIONS=['chat'])}"
    corpus = CorpusConfig(sources=[source], split=[1.0], chat="pairs")
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    found = [document.turns for document in open_corpus(folder, "train")]
    assert sorted(found) == sorted((("user", f"question {idx}"), ("assistant", f"answer {idx}")) for idx in range(20))


def test_prepare_reads_collections_and_writes_no_address(database: MongoDatabase, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=[f"mongo:{database.config}"], split=[1.0])
    folder = prepare(RunConfig(folder=str(tmp_path), corpus=corpus, runner=LocalRunner(workers=1)))
    found = list(open_corpus(folder, "train"))
    assert [document.text for document in found] == EXPECTED_TEXTS
    assert json.loads((folder / "account.json").read_text())["records"] == len(EXPECTED_TEXTS)
    host = database.address.partition("://")[2]
    assert all(host not in path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".jsonl"))
