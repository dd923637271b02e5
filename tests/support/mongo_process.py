"""A MongoDB server for tests and benchmarks: that of TEXTMILL_TEST_MONGO, or secantusdb in its own environment.

secantusdb is under the GPL; it runs as a process and is never imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from textmill.verification.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
PINNED = "secantusdb==0.7.0b3"
VARIABLE = "TEXTMILL_TEST_MONGO"
SIZES = {"web": 300, "books": 200, "news": 100}


def text_of(name: str, idx: int) -> str:
    """The expected text of a document."""
    return f"{name} number {idx} 한국어"


EXPECTED_TEXTS = [text_of(name, idx) for name, size in SIZES.items() for idx in range(size)]


class NoServer(Exception):
    """Raised with the reason why no server is available."""


class MongoProcess:
    """A local server that can be killed and restarted on the same port and data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.command, self.port = folder, _installed(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--storage-path",
            str(self.folder),
            "--log-level",
            "ERROR",
        ]
        # The file names the interpreter by a path that is wrong if the environment was moved.
        self.process = subprocess.Popen(
            [str(self.command.with_name("python")), str(self.command), *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if self.process.poll() is not None:
                    raise NoServer(f"secantusdb ended with code {self.process.returncode}") from None
                time.sleep(0.1)
            else:
                return
        raise NoServer("secantusdb did not open its port in 60 s")

    def stop(self, sign: int = signal.SIGTERM) -> None:
        if self.process:
            self.process.send_signal(sign)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _installed() -> Path:
    """The server's command; installed once into its own environment."""
    kept = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    place = kept / f"textmill-test-{PINNED.replace('==', '-')}"
    command = place / "bin" / "secantusd-py"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not command.exists():
            try:
                subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, timeout=120)
                pip = [
                    str(place / "bin" / "python"),
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    PINNED,
                ]
                subprocess.run(pip, check=True, capture_output=True, timeout=300)
            except (subprocess.SubprocessError, OSError) as error:
                raise NoServer(f"{PINNED} cannot be installed ({type(error).__name__})") from None
    return command


def named_server() -> str | None:
    """The connection string of a real server, if one is configured."""
    return os.environ.get(VARIABLE)


@dataclass
class MongoDatabase:
    """A database on a server, and the db_config.json to open it."""

    address: str
    db: Any
    config: Path
    process: MongoProcess | None

    def write_config(self, name: str, **settings: Any) -> Path:
        path = self.config.with_name(name)
        own = {"MONGO_CONNECTION_STRING": self.address, "MONGO_CONNECTION_DB": self.db.name, "COLLECTIONS": list(SIZES)}
        path.write_text(json.dumps({**own, **settings}))
        return path

    def fill(self, name: str, forms: Sequence[str]) -> None:
        """A collection of these texts, with its index and its count."""
        self.db[name].create_index("idx", unique=True)
        self.db[name].insert_many([{"idx": idx, "form": form} for idx, form in enumerate(forms)], ordered=False)
        self.db["meta_info"].insert_one({"collection_name": name, "num_docs": len(forms)})


@contextmanager
def open_database(folder: Path) -> Iterator[MongoDatabase]:
    """An empty database; the test is skipped if there is no server."""
    import pymongo

    process = None
    if not (address := named_server()):
        try:
            process = MongoProcess(folder / "data")
        except NoServer as reason:
            pytest.skip(f"no MongoDB server: {reason}; {VARIABLE} may name one")
        address = process.address
    client: Any = pymongo.MongoClient(address)
    world = MongoDatabase(
        address, client[f"textmill_test_{random.SystemRandom().randrange(10**9)}"], folder / "db_config.json", process
    )
    world.write_config("db_config.json")
    try:
        yield world
        client.drop_database(world.db.name)
    finally:
        client.close()
        if process:
            process.stop()


if __name__ == "__main__":
    try:
        _installed()
    except NoServer as reason:
        print(f"{reason}; tests of MongoDB will be skipped")
