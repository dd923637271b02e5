"""A sample or a limit of named sources: how much is read, and that records are complete."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from textmill.config import RunConfig
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

COUNT = 60_000
DICE = random.Random(7)
TEXTS = [f"{number} {DICE.randbytes(60).hex()}" for number in range(COUNT)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


class CountedServer(http.server.BaseHTTPRequestHandler):
    """Answers requests for ranges of files, as a web server or S3 does, and counts what it sends."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    gives_ranges = True
    sent = 0

    def do_HEAD(self) -> None:
        self._reply()

    def do_GET(self) -> None:
        body = self._reply()
        CountedServer.sent += len(body)
        self.wfile.write(body)

    def _reply(self) -> bytes:
        data = self.files[self.path[1:]]
        first, last = 0, len(data) - 1
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.gives_ranges else None
        if found:
            first, last = int(found[1]), min(int(found[2] or last), last)
        self.send_response(206 if found else 200)
        if self.gives_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        if found:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        return data[first : last + 1]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server whose sent bytes are counted."""
    CountedServer.sent = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), CountedServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kept_of(folder: Path, path: str, **settings: Any) -> list[str]:
    corpus = {"sources": [{"name": "sampled", "path": path, **settings}], "section_chars": 100}
    config = RunConfig.model_validate({"folder": str(folder), "corpus": corpus, "runner": {"workers": 1}})
    return [document.text for document in open_corpus(prepare(config))]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a.jsonl", {"sample": 0.01}),
        ("a.jsonl.gz", {"sample": 0.01}),
        ("a.jsonl.zst", {"limit": len(LINES) // 100}),
        ("a.parquet", {"sample": 0.01}),
        ("a.parquet", {"limit": len(LINES) // 100}),
    ],
)
def test_a_sample_of_a_remote_file_reads_little(tmp_path: Path, url: str, name: str, settings: Any) -> None:
    """Neither does a file system that reads ahead, as those of fsspec do."""
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": TEXTS}), tmp_path / name, row_group_size=300)
        data = (tmp_path / name).read_bytes()
    else:
        pack = {"l": bytes, "z": gzip.compress, "t": zstandard.ZstdCompressor().compress}[name[-1]]
        data = pack(LINES)
    CountedServer.files[name] = data
    kept = kept_of(tmp_path, f"{url}/{name}", **settings)
    assert 100 < len(kept) < 0.06 * COUNT
    assert set(kept) <= set(TEXTS)
    # The first 256 KB are read up to three times, however large a file is.
    assert CountedServer.sent <= 0.05 * len(data) + 3 * (1 << 18)


class HubServer(CountedServer):
    """The files of datasets, at the addresses that huggingface_hub asks for."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/api/datasets/(me/\w+)(/revision/\w+|/tree/\w+/?(.*))?", self.path.partition("?")[0])
        if found is None and (file := re.fullmatch(r"/datasets/(.*)/resolve/\w+(/.*)", self.path)):
            self.path = f"/{file[1]}{file[2]}"
            if self.path[1:] in self.files:
                super().do_HEAD() if self.command == "HEAD" else super().do_GET()
                return
        tree: Any = {"error": "not found"}
        if found:
            start = f"{found[1]}/"
            names = [name.removeprefix(start) for name in self.files if name.startswith(start)]
            tree = {"id": found[1], "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in self.path:
                tree = [{"type": "file", "path": name, "size": len(self.files[start + name])} for name in names]
                tree = [{"oid": "1" * 40, **one} for one in tree if not found[3]]
        body = json.dumps(tree).encode()
        self.send_response(200 if found else 404)
        self.send_header("X-Error-Code", "" if found else "EntryNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET


def test_a_sample_of_a_dataset_of_the_hub_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the address of the hub is read when its package is imported."""
    pytest.importorskip("datasets")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # set in this process once the hub was not reached
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=300)
    data = {"me/rows/train.parquet": (tmp_path / "a.parquet").read_bytes(), "me/lines/train.jsonl": LINES}
    monkeypatch.setattr(CountedServer, "files", data)
    CountedServer.sent = 0
    sources = [{"name": name, "path": f"hf:me/{name}", "sample": 0.01} for name in ("rows", "lines")]
    config = {"folder": "out", "corpus": {"sources": sources}, "runner": {"workers": 1}}
    (tmp_path / "x.yaml").write_text(json.dumps(config))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "textmill", "prepare", str(tmp_path / "x.yaml")]
        done = subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, cwd=tmp_path)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    kept = [document.text for document in open_corpus(tmp_path / "out" / "corpus")]
    assert 500 < len(kept) < 3000
    assert set(kept) <= set(TEXTS)
    assert CountedServer.sent <= 0.05 * sum(map(len, data.values())) + 3 * (1 << 18)


def test_all_of_a_remote_file_is_read_once(tmp_path: Path, url: str) -> None:
    data = LINES[: LINES.index(b"\n", 5 << 20) + 1]
    CountedServer.files["a.jsonl"] = data
    assert len(kept_of(tmp_path, f"{url}/a.jsonl")) == data.count(b"\n")
    assert CountedServer.sent <= len(data) + 4 * (1 << 18)


def test_a_web_server_that_gives_no_ranges(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedServer, "gives_ranges", False)
    data = LINES[: LINES.index(b"\n", 6 << 20) + 1]
    CountedServer.files["a.jsonl"] = data
    assert len(kept_of(tmp_path, f"{url}/a.jsonl")) == data.count(b"\n")
    with pytest.raises(TextmillError, match="copy it to this machine"):
        kept_of(tmp_path / "part", f"{url}/a.jsonl", sample=0.01)


def test_a_sample_of_many_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(2000):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXTS[number])
    kept = kept_of(tmp_path / "out", str(tmp_path / "texts"), sample=0.1)
    assert 100 < len(kept) < 300
    assert kept == kept_of(tmp_path / "again", str(tmp_path / "texts"), sample=0.1)


def test_places_in_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES * 3)
    kept = kept_of(tmp_path / "out", str(tmp_path / "a.jsonl"), sample=0.05)
    places = [int(text.split()[0]) / COUNT for text in kept]
    assert len({int(place * 5) for place in places}) == 5, "from all parts of the file"
    assert set(kept) <= set(TEXTS)
