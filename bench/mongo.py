"""Measure MongoDB reads in documents/s: a full scan, as `prepare` reads, against find_one.

    python bench/mongo.py [documents] [seconds]

The server is that of TEXTMILL_TEST_MONGO, else secantusdb. secantusdb is written in Python: its numbers compare query
methods and say nothing about the speed of a real server. If the server is ours, it is killed in the middle of a second
scan, and every document is counted.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.mongo_process import MongoProcess, named_server
from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources
from textmill.corpus.formats import mongo
from textmill.corpus.source import SourceChunk

NAMES = ("web", "books", "news")
INSERT_BLOCK = 5000
TEXT = "The mill stands by the river, and every morning the wheel begins to turn. " * 5


def expected_text(name: str, idx: int) -> str:
    """The expected text of a document."""
    return f"{name} {idx} {TEXT}"


def fill(db: Any, documents: int) -> list[str]:
    """Fill three collections; return the texts in the order of the index."""
    expected: list[str] = []
    for name in NAMES:
        size = documents // len(NAMES) + (documents % len(NAMES) if name == NAMES[-1] else 0)
        for start in range(0, size, INSERT_BLOCK):
            numbers = range(start, min(start + INSERT_BLOCK, size))
            db[name].insert_many([{"idx": idx, "form": expected_text(name, idx)} for idx in numbers], ordered=False)
        db[name].create_index("idx", unique=True)
        db["meta_info"].insert_one({"collection_name": name, "num_docs": size})
        expected += [expected_text(name, idx) for idx in range(size)]
    return expected


def scan(config: Path) -> Iterator[Document]:
    """Every document, in order."""
    (source,) = find_sources([f"mongo:{config}"])
    for record in mongo.read(SourceChunk(source, 0, sum(one.size for one in source.snapshot)), CorpusConfig()):
        assert isinstance(record, Document)
        yield record


def measure(db: Any, config: Path, expected: list[str], seconds: float) -> None:
    """Measure both and check every result."""
    rng = random.Random(1)
    size = len(expected) // len(NAMES)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        idx = rng.randrange(size)
        assert db[NAMES[0]].find_one({"idx": idx})["form"] == expected[idx]
        count += 1
    single = count / elapsed
    started = time.perf_counter()
    assert [document.text for document in scan(config)] == expected
    scanned = len(expected) / (time.perf_counter() - started)
    for name, speed in (("find_one", single), ("full scan", scanned)):
        print(f"{name:<16} {speed:12,.0f} documents/s   {speed / single:6.1f}x find_one")


def scan_with_kill(process: MongoProcess, config: Path, expected: list[str]) -> None:
    """Check that each document is read once although the server is killed in the middle."""
    ids, texts = set(), []
    for document in scan(config):
        ids.add(document.id)
        texts.append(document.text)
        if len(texts) == len(expected) // 2:
            process.stop(signal.SIGKILL)
            threading.Timer(1.0, process.start).start()
    print(
        f"scan with a kill {len(texts):12,} documents, {len(expected) - len(ids):,} lost, "
        f"{len(texts) - len(ids):,} read twice"
    )
    assert texts == expected


def main(documents: int = 100_000, seconds: float = 5.0) -> None:
    """Fill a database, measure, and drop it."""
    with tempfile.TemporaryDirectory() as folder:
        address = named_server()
        process = None if address else MongoProcess(Path(folder) / "data")
        client: Any = pymongo.MongoClient(address or process.address)  # type: ignore[union-attr]
        db = client[f"textmill_bench_{random.SystemRandom().randrange(10**9)}"]
        config = Path(folder) / "db_config.json"
        connection = {"MONGO_CONNECTION_STRING": address or process.address}  # type: ignore[union-attr]
        config.write_text(json.dumps({**connection, "MONGO_CONNECTION_DB": db.name, "COLLECTIONS": list(NAMES)}))
        try:
            started = time.perf_counter()
            expected = fill(db, documents)
            seconds_taken, kind = time.perf_counter() - started, "a real server" if address else "secantusdb"
            print(f"{documents:,} documents in {len(NAMES)} collections, {kind}; loaded in {seconds_taken:.0f} s")
            measure(db, config, expected, seconds)
            if process:
                scan_with_kill(process, config, expected)
            client.drop_database(db.name)
        finally:
            client.close()
            if process:
                process.stop()


if __name__ == "__main__":
    main(*(int(argument.replace("_", "")) for argument in sys.argv[1:]))
