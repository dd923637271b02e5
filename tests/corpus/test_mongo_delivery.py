"""Export to MongoDB by prepare: correct, once, and the same after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="needs pymongo: pip install 'textmill[mongo]'")

from tests.support.mongo_process import MongoDatabase, open_database
from textmill.cli import main
from textmill.corpus import mongo_export
from textmill.corpus.shards import list_shards, read_documents

SIZE = 2000
DUPLICATES, EMPTY = 7, 11


def original_text(idx: int) -> str:
    """Every seventh document is a duplicate, every eleventh is empty; cleaning changes line ends and trailing
    spaces."""
    return " \r\n" if idx % EMPTY == 0 else f"the mill  \r\nnumber {0 if idx % DUPLICATES == 0 else idx}"


def expected_texts() -> list[str]:
    """The expected cleaned text of each document."""
    first = next(idx for idx in range(SIZE) if idx % EMPTY and idx % DUPLICATES == 0)
    texts = []
    for idx in range(SIZE):
        kept = idx % EMPTY and (idx % DUPLICATES or idx == first)
        texts.append(f"the mill\nnumber {0 if idx == first else idx}" if kept else "")
    return texts


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoDatabase]:
    with open_database(tmp_path_factory.mktemp("deliveries")) as database:
        yield database


def new_corpus(database: MongoDatabase, tmp_path: Path, name: str) -> list[str]:
    """An uncleaned and an empty collection; the arguments to prepare the one and fill the other."""
    database.fill(name, [original_text(idx) for idx in range(SIZE)])
    source = database.write_config(f"{name}.json", COLLECTIONS=[name], MONGO_CONNECTION_STRING=None)
    target = database.write_config(f"{name}_to.json", COLLECTIONS=[f"{name}_clean"], MONGO_CONNECTION_STRING=None)
    return [
        "prepare",
        "quickstart",
        f"folder={tmp_path / name}",
        f"corpus.sources=mongo:{source}",
        "runner.workers=1",
        "corpus.split=8,1,1",
        "corpus.mongo_write_back=true",
        f"corpus.mongo_load={target}",
    ]


def read_rows(database: MongoDatabase, name: str) -> list[dict[str, Any]]:
    rows = [
        {key: value for key, value in row.items() if key not in ("_id", "source")} for row in database.db[name].find()
    ]
    return sorted(rows, key=lambda row: int(row["idx"]))


@pytest.mark.long
def test_written_back_and_loaded_once(
    database: MongoDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{database.address}/?authSource=hiddenword"
    monkeypatch.setenv("TEXTMILL_MONGO", address)
    words, texts = new_corpus(database, tmp_path, "dirty"), expected_texts()
    kept = sum(map(bool, texts))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"({database.db.name}): {kept:,} written, 0 gone, {SIZE - kept:,} emptied; {SIZE:,} changed now" in out
    assert f"{kept:,} loaded; {kept:,} changed now" in out
    rows = read_rows(database, "dirty")
    assert [row["filt_text"] for row in rows] == texts
    assert [row["form"] for row in rows] == [original_text(idx) for idx in range(SIZE)]
    loaded, folder = read_rows(database, "dirty_clean"), tmp_path / "dirty" / "corpus"
    assert [row["idx"] for row in loaded] == list(range(kept))
    assert sorted(row["filt_text"] for row in loaded) == sorted(filter(None, texts))
    for split in ("train", "valid", "test"):
        shards = [document for path in list_shards(folder, split) for document in read_documents(path)]
        assert [(row["filt_text"], row["place"]) for row in loaded if row["split"] == split] == [
            (one.text, one.id) for one in shards
        ]
    assert database.db["meta_info"].find_one({"collection_name": "dirty_clean"})["num_docs"] == kept
    notes = (folder / "mongo.json").read_bytes()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("done already") == 3
    assert "changed now" not in out
    assert (read_rows(database, "dirty"), read_rows(database, "dirty_clean")) == (rows, loaded)
    assert (folder / "mongo.json").read_bytes() == notes
    assert main([*words, "--force"]) == 0  # read from form again, though filt_text is there now
    out = capsys.readouterr().out
    assert out.count("; 0 changed now") == 2
    assert (read_rows(database, "dirty"), read_rows(database, "dirty_clean")) == (rows, loaded)
    assert (folder / "mongo.json").read_bytes() == notes
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert not any(
            secret in path.read_bytes() for secret in (b"hiddenword", database.address.partition("://")[2].encode())
        ), path


SCRIPT = """
import os, signal, sys
from textmill.cli import main
from textmill.corpus import mongo_export as writing
real, left = writing._blocks, int(sys.argv[1])
def blocks(rows):
    global left
    for block in real(rows):
        yield block
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
writing._blocks, writing.WRITE_BLOCK = blocks, 100
sys.exit(main(sys.argv[2:]))
"""
"""Ends itself when it has written so many blocks."""


@pytest.mark.long
def test_result_after_a_kill_is_the_same(
    database: MongoDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("TEXTMILL_MONGO", database.address)
    quiet, struck = new_corpus(database, tmp_path, "quiet"), new_corpus(database, tmp_path, "struck")
    assert main(quiet) == 0
    for blocks in (
        1,
        10,
        19,
        21,
        2,
    ):  # what is done stays done: the last ones come while the other collection is filled
        command = [sys.executable, "-c", SCRIPT, str(blocks), *struck]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, (blocks, done.stdout, done.stderr)
    assert main(struck) == 0
    assert read_rows(database, "struck") == read_rows(database, "quiet")
    loaded = [
        [{**row, "place": row["place"].split()[1]} for row in read_rows(database, f"{name}_clean")]
        for name in ("struck", "quiet")
    ]  # but for the names and _ids of two collections
    assert loaded[0] == loaded[1]
    counts = [database.db["meta_info"].find_one({"collection_name": f"{name}_clean"}) for name in ("quiet", "struck")]
    assert counts[0]["num_docs"] == counts[1]["num_docs"] == database.db["quiet_clean"].count_documents({})
    notes = [json.loads((tmp_path / name / "corpus" / "mongo.json").read_text()) for name in ("quiet", "struck")]
    assert list(notes[0].values()) == list(notes[1].values())


def test_impossible_export_is_refused_before_any_work(
    database: MongoDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_texts: Path,
) -> None:
    monkeypatch.setenv("TEXTMILL_MONGO", database.address)
    database.fill("plain", ["a", "b"])
    database.db["unindexed"].insert_one({"idx": 0, "form": "a"})
    plain = database.write_config("plain.json", COLLECTIONS=["plain", "plain_to"])
    only = database.write_config("only.json", COLLECTIONS=["plain"])
    unindexed = database.write_config("unindexed.json", COLLECTIONS=["unindexed"])
    mongo, back = f"corpus.sources=mongo:{plain}", "corpus.mongo_write_back=true"
    database.db["plain_to"].create_index("idx", unique=True)
    cases = [
        ([f"corpus.sources={tiny_texts}", back], "corpus.mongo_write_back: no MongoDB source"),
        (
            [mongo, back, "corpus.text_key=filt_text"],
            "corpus.mongo_write_back: would overwrite corpus.text_key=filt_text",
        ),
        ([f"corpus.sources=mongo:{unindexed}", back], "unindexed: no index on idx; create one"),
        ([mongo, f"corpus.mongo_load={plain}"], "COLLECTIONS lists plain, plain_to; corpus.mongo_load needs"),
        ([mongo, f"corpus.mongo_load={only}"], "corpus.mongo_load: 'plain' is also a source"),
        ([mongo, f"corpus.mongo_load={tmp_path / 'none.json'}"], "none.json: no such file"),
        ([mongo, "corpus.mongo_write_back=perhaps"], "corpus.mongo_write_back: found 'perhaps'; give true or false"),
    ]
    for words, printed in cases:
        assert main(["prepare", "quickstart", f"folder={tmp_path / 'out'}", *words]) == 2
        message = capsys.readouterr().err
        assert printed in message
        assert "Traceback" not in message
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_idx_of_another_writer_is_an_error(
    database: MongoDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"a {number}"}) + "\n" for number in range(10)))
    path = database.write_config("taken.json", COLLECTIONS=["taken"])
    words = [f"folder={tmp_path / 'out'}", f"corpus.sources={file}", "runner.workers=1", "corpus.split=1"]
    words = ["prepare", "quickstart", *words, f"corpus.mongo_load={path}"]
    assert main(words) == 0
    database.db["taken"].update_one({"idx": 3}, {"$set": {"filt_text": "edited"}})
    assert main([*words, "--force"]) == 0
    assert "10 loaded; 1 changed now" in capsys.readouterr().out
    database.db["taken"].delete_one({"idx": 4})
    database.db["taken"].insert_one({"idx": 4, "filt_text": "someone else"})
    assert main([*words, "--force"]) == 2
    assert "another program has written a document with the idx of ours" in capsys.readouterr().err


def test_deleted_documents_are_counted(
    database: MongoDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TEXTMILL_MONGO", database.address)
    database.fill("leaving", [f"leaving {idx}" for idx in range(50)])
    path = database.write_config("leaving.json", COLLECTIONS=["leaving"])
    real = mongo_export.export_to_mongo

    def lose_one(*rest: Any) -> None:
        database.db["leaving"].delete_one({"idx": 9})
        real(*rest)

    monkeypatch.setattr(mongo_export, "export_to_mongo", lose_one)
    words = [f"folder={tmp_path}", f"corpus.sources=mongo:{path}", "corpus.mongo_write_back=true", "runner.workers=1"]
    assert main(["prepare", "quickstart", *words]) == 0
    assert "49 written, 1 gone, 0 emptied; 49 changed now" in capsys.readouterr().out
