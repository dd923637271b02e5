"""A server that does not answer: one warning, a bounded wait, and no part of the connection string."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="needs pymongo: pip install 'textmill[mongo]'")

from tests.support.mongo_process import open_database
from textmill.cli import main
from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources
from textmill.corpus.formats import mongo
from textmill.corpus.source import SourceChunk
from textmill.errors import warn


@contextmanager
def silent_server(closes: bool) -> Iterator[int]:
    """A port that accepts connections and closes them at once, or never answers."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    taken = listener.accept()[0]
                except OSError:
                    return
                taken.close() if closes else held.append(taken)

        threading.Thread(target=accept, daemon=True).start()
        yield int(listener.getsockname()[1])
    for taken in held:
        taken.close()


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "says nothing"])
def test_silent_server_ends_in_one_line(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mongo, "MAX_OUTAGE", 1.0)
    config = tmp_path / "db_config.json"
    with silent_server(closes) as port:
        options = "authSource=hidden&serverSelectionTimeoutMS=400&connectTimeoutMS=300"
        address = f"mongodb://millername:s3cretword@127.0.0.1:{port}/?{options}"
        settings = {"MONGO_CONNECTION_DB": "korpus", "COLLECTIONS": ["web"]}
        config.write_text(json.dumps({**settings, "MONGO_CONNECTION_STRING": address}))
        assert main(["prepare", "quickstart", f"folder={tmp_path / 'out'}", f"corpus.sources=mongo:{config}"]) == 2
    printed = capsys.readouterr()
    *warnings, error = printed.err.splitlines()
    assert len(warnings) <= 1, printed.err  # none if the first attempt alone took longer than MAX_OUTAGE
    for line in warnings:
        assert f"{config}: the MongoDB server does not answer (ServerSelectionTimeoutError); retrying for 1 s" in line
    assert f"{config}: no MongoDB server for " in error
    assert error.endswith("); start it and run the command again")
    for secret in ("millername", "s3cretword", "hidden", "127.0.0.1", str(port)):
        assert secret not in printed.err.replace(str(config), "") + printed.out
    assert not (tmp_path / "out" / "corpus").exists()


def test_request_is_repeated_when_the_server_stops_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with open_database(tmp_path) as database:
        if not database.process or not (server := database.process.process):
            pytest.skip("a named server is not ours to stop")
        database.fill("web", [f"web {idx}" for idx in range(600)])
        address = f"{database.address}/?socketTimeoutMS=500&serverSelectionTimeoutMS=500"
        path = database.write_config("db_config.json", COLLECTIONS=["web"], MONGO_CONNECTION_STRING=address)
        monkeypatch.setattr(mongo, "SCAN_BLOCK", 50)
        seen: list[str] = []

        def printed(message: str) -> None:
            """It is asleep until somebody has noticed, however late that is."""
            warn(message)
            server.send_signal(signal.SIGCONT)

        (source,) = find_sources([f"mongo:{path}"])
        monkeypatch.setattr(mongo, "warn", printed)
        for row in mongo.read(SourceChunk(source, 0, 600), CorpusConfig()):
            assert isinstance(row, Document)
            seen.append(row.text)
            if len(seen) == 200:
                server.send_signal(signal.SIGSTOP)
        assert seen == [f"web {idx}" for idx in range(600)]
        assert "the MongoDB server does not answer (" in capsys.readouterr().err
