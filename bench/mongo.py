"""Documents a second out of MongoDB: random batches and a full scan against plain find_one and bare `$in`, in one run.

    python bench/mongo.py [documents] [seconds]

The server is the one that TEXTMILL_TEST_MONGO names, else secantusdb, which answers in Python: its figures compare ways of asking, and say
nothing of a real server's speed. Bare pymongo (`$in` of many sizes over one and three connections, nothing done with the answers) shows
what the server can give at most. A server of our own is killed in the middle of a second scan, and every document counted.
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
LOADED = 5000
SIZES, CONNECTIONS = (8, 16, 24, 32, 64, 128, 256, 1024), (1, 3)
TEXT = "The mill stands by the river, and every morning the wheel begins to turn. " * 5


def text_of(name: str, idx: int) -> str:
    """The truth about a document."""
    return f"{name} {idx} {TEXT}"


def fill(db: Any, documents: int) -> list[str]:
    """Three collections; the texts in the order of the index."""
    truth: list[str] = []
    for name in NAMES:
        size = documents // len(NAMES) + (documents % len(NAMES) if name == NAMES[-1] else 0)
        for start in range(0, size, LOADED):
            numbers = range(start, min(start + LOADED, size))
            db[name].insert_many([{"idx": idx, "form": text_of(name, idx)} for idx in numbers], ordered=False)
        db[name].create_index("idx", unique=True)
        db["meta_info"].insert_one({"collection_name": name, "num_docs": size})
        truth += [text_of(name, idx) for idx in range(size)]
    return truth


def rate(read: Callable[[], int], seconds: float) -> float:
    """Documents a second of a reading that is repeated for some seconds, after one that does not count."""
    read()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        count += read()
    return count / spent


def bare(db: Any, size: int, seconds: float) -> tuple[float, int, int]:
    """The most that `$in` gives without textmill: (documents a second, positions of a question, connections)."""
    dice, found = random.Random(2), []

    def ask(numbers: list[int]) -> int:
        return len(list(db[NAMES[0]].find({"idx": {"$in": numbers}}, batch_size=len(numbers) + 1)))

    for connections in CONNECTIONS:
        with ThreadPoolExecutor(connections) as threads:
            for asked in SIZES:

                def many(asked: int = asked, threads: ThreadPoolExecutor = threads) -> int:
                    parts = [sorted(dice.sample(range(size), asked)) for _ in range(max(BATCH // asked, 1))]
                    return sum(threads.map(ask, parts))

                found.append((rate(many, seconds), asked, connections))
    return max(found)


def measure(db: Any, config: Path, truth: list[str], seconds: float) -> None:
    """The three ways, each answer checked."""
    index, dice = open_index(config), random.Random(1)
    assert len(index) == len(truth)
    firsts = {one.collection: one for one in index.collection_ranges}

    def one() -> int:
        stretch = firsts[dice.choice(NAMES)]
        idx = dice.randrange(stretch.size)
        assert db[stretch.collection].find_one({"idx": idx})["form"] == truth[stretch.first + idx]
        return 1

    def many() -> int:
        places = [dice.randrange(len(truth)) for _ in range(BATCH)]
        assert [row and row["form"] for row in index.batch(places)] == [truth[place] for place in places]
        return BATCH

    single, batched = rate(one, seconds), rate(many, seconds)
    again, (most, asked, connections) = rate(one, seconds), bare(db, firsts[NAMES[0]].size, seconds / 5)
    single = (single + again) / 2  # before and after: the machine may have other work
    begin = time.perf_counter()
    assert [row["form"] for row in index] == truth
    scanned = len(truth) / (time.perf_counter() - begin)
    rows = [
        ("find_one", single, ""),
        ("random batches", batched, f"batches of {BATCH}, $in of {index.query_size.size}"),
        (
            "the same, bare",
            most,
            f"$in of {asked}, {connections} connections: the best of {len(SIZES) * len(CONNECTIONS)}",
        ),
        ("full scan", scanned, ""),
    ]
    for name, speed, note in rows:
        print(f"{name:<16} {speed:12,.0f} documents/s   {speed / single:6.1f}x find_one   {note}".rstrip())
    index.close()


def scan_with_a_kill(process: MongoProcess, config: Path, truth: list[str]) -> None:
    """Every document once, though the server dies in the middle."""
    index = open_index(config)
    ids, forms = set(), []
    for _, row in index.scan():
        ids.add(row["_id"])
        forms.append(row["form"])
        if len(forms) == len(truth) // 2:
            process.stop(signal.SIGKILL)
            threading.Timer(1.0, process.start).start()
    print(
        f"scan with a kill {len(forms):12,} documents, {len(truth) - len(ids):,} lost, {len(forms) - len(ids):,} doubled"
    )
    assert forms == truth
    index.close()


def main(documents: int = 100_000, seconds: float = 5.0) -> None:
    """Fill a database, measure, and drop it."""
    with tempfile.TemporaryDirectory() as folder:
        address = named_server()
        process = None if address else MongoProcess(Path(folder) / "data")
        client: Any = pymongo.MongoClient(address or process.address)  # type: ignore[union-attr]
        db = client[f"textmill_bench_{random.SystemRandom().randrange(10**9)}"]
        config = Path(folder) / "db_config.json"
        own = {"MONGO_CONNECTION_STRING": address or process.address}  # type: ignore[union-attr]
        config.write_text(json.dumps({**own, "MONGO_CONNECTION_DB": db.name, "COLLECTIONS": list(NAMES)}))
        try:
            begin = time.perf_counter()
            truth = fill(db, documents)
            took, kind = time.perf_counter() - begin, "a real server" if address else "secantusdb"
            print(f"{documents:,} documents in {len(NAMES)} collections, {kind}; loaded in {took:.0f} s")
            measure(db, config, truth, seconds)
            if process:
                scan_with_a_kill(process, config, truth)
            client.drop_database(db.name)
        finally:
            client.close()
            if process:
                process.stop()


if __name__ == "__main__":
    main(*(int(word.replace("_", "")) for word in sys.argv[1:]))
