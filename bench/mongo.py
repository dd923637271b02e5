"""Measure MongoDB reads in documents/s: random batches and a full scan against find_one and bare `$in`.

    python bench/mongo.py [documents] [seconds]

The server is that of TEXTMILL_TEST_MONGO, else secantusdb. secantusdb is written in Python: its numbers compare query
methods and say nothing about the speed of a real server. Bare pymongo (`$in` of many sizes over one and three
connections, results unused) shows the most that the server can deliver. If the server is ours, it is killed in the
middle of a second scan, and every document is counted.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pymongo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.mongo_process import MongoProcess, named_server
from textmill.corpus.mongo.collections import open_index

NAMES = ("web", "books", "news")
BATCH = 1024
INSERT_BLOCK = 5000
SIZES, CONNECTIONS = (8, 16, 24, 32, 64, 128, 256, 1024), (1, 3)
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


def rate(read: Callable[[], int], seconds: float) -> float:
    """Documents/s of a read that is repeated for some seconds, after one warm-up call."""
    read()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        count += read()
    return count / elapsed


def measure_bare_pymongo(db: Any, size: int, seconds: float) -> tuple[float, int, int]:
    """The fastest `$in` without textmill: (documents/s, positions per query, connections)."""
    rng, found = random.Random(2), []

    def query(numbers: list[int]) -> int:
        return len(list(db[NAMES[0]].find({"idx": {"$in": numbers}}, batch_size=len(numbers) + 1)))

    for connections in CONNECTIONS:
        with ThreadPoolExecutor(connections) as threads:
            for query_size in SIZES:

                def read_batch(query_size: int = query_size, threads: ThreadPoolExecutor = threads) -> int:
                    parts = [sorted(rng.sample(range(size), query_size)) for _ in range(max(BATCH // query_size, 1))]
                    return sum(threads.map(query, parts))

                found.append((rate(read_batch, seconds), query_size, connections))
    return max(found)


def measure(db: Any, config: Path, expected: list[str], seconds: float) -> None:
    """Measure all variants and check every result."""
    index, rng = open_index(config), random.Random(1)
    assert len(index) == len(expected)
    ranges = {item.collection: item for item in index.collection_ranges}

    def read_one() -> int:
        collection_range = ranges[rng.choice(NAMES)]
        idx = rng.randrange(collection_range.size)
        assert db[collection_range.collection].find_one({"idx": idx})["form"] == expected[collection_range.first + idx]
        return 1

    def read_batch() -> int:
        positions = [rng.randrange(len(expected)) for _ in range(BATCH)]
        assert [row and row["form"] for row in index.batch(positions)] == [expected[position] for position in positions]
        return BATCH

    single, batched = rate(read_one, seconds), rate(read_batch, seconds)
    again, (fastest, query_size, connections) = (
        rate(read_one, seconds),
        measure_bare_pymongo(db, ranges[NAMES[0]].size, seconds / 5),
    )
    single = (single + again) / 2  # measured before and after, because the load of the machine may change
    started = time.perf_counter()
    assert [row["form"] for row in index] == expected
    scanned = len(expected) / (time.perf_counter() - started)
    rows = [
        ("find_one", single, ""),
        ("random batches", batched, f"batches of {BATCH}, $in of {index.query_size.size}"),
        (
            "bare $in",
            fastest,
            f"$in of {query_size}, {connections} connections: best of {len(SIZES) * len(CONNECTIONS)}",
        ),
        ("full scan", scanned, ""),
    ]
    for name, speed, note in rows:
        print(f"{name:<16} {speed:12,.0f} documents/s   {speed / single:6.1f}x find_one   {note}".rstrip())
    index.close()


def scan_with_kill(process: MongoProcess, config: Path, expected: list[str]) -> None:
    """Check that each document is read once although the server is killed in the middle."""
    index = open_index(config)
    ids, forms = set(), []
    for _, row in index.scan():
        ids.add(row["_id"])
        forms.append(row["form"])
        if len(forms) == len(expected) // 2:
            process.stop(signal.SIGKILL)
            threading.Timer(1.0, process.start).start()
    print(
        f"scan with a kill {len(forms):12,} documents, {len(expected) - len(ids):,} lost, "
        f"{len(forms) - len(ids):,} read twice"
    )
    assert forms == expected
    index.close()


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
