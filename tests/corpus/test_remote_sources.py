"""Sources that are not local files: URLs, hub names, saved datasets, MongoDB."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.records import read_sources, texts_of
from textmill.config import RunConfig
from textmill.config.load import resolve_paths
from textmill.corpus.find_sources import find_sources, portable_names, source_state
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError

LINES = [f"{number} satır" for number in range(200)]
DATA = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()


# URLs


def test_memory_urls() -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe({"/here/a.jsonl.gz": gzip.compress(DATA), "/here/deep/b.jsonl": DATA, "/here/notes.bin": b"x"})
    with files.open("/here/c.parquet", "wb") as stream:
        pq.write_table(pa.table({"text": LINES}), stream, row_group_size=50)
    try:
        assert (
            texts_of(read_sources(["memory://here/a.jsonl.gz"]))
            == texts_of(read_sources(["memory://here/c.parquet"]))
            == LINES
        )
        skipped: list[str] = []
        names = [source.name for source in find_sources(["memory://here"], skipped=skipped)]
        assert skipped == ["memory:///here/notes.bin"]
        assert names == [f"memory:///here/{name}" for name in ("a.jsonl.gz", "c.parquet", "deep/b.jsonl")]
        assert [source.name for source in find_sources(["memory://here/*.gz"])] == names[:1]
        (source,) = find_sources(["memory://here/deep/b.jsonl"])
        before = source_state(source)
        assert before.bytes == len(DATA)
        files.pipe("/here/deep/b.jsonl", DATA)
        assert source_state(source) != before
        assert portable_names([source]) == [source.name]
        for word, message in [
            ("memory://here/notes.bin", "unknown format"),
            ("memory://gone.txt", "nothing at 'memory://gone.txt'"),
        ]:
            with pytest.raises(TextmillError, match=message):
                find_sources([word])
    finally:
        files.rm("/here", recursive=True)


def test_unknown_protocol() -> None:
    with pytest.raises(TextmillError, match=r"strange://a.txt: protocol not available"):
        find_sources(["strange://a.txt"])


def test_file_url_is_the_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(DATA)
    (source,) = find_sources([f"file://{tmp_path}/a.jsonl"])
    assert source.address == str(tmp_path / "a.jsonl")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "web"))
    ) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


def test_http(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web" / "a.jsonl.gz").write_bytes(gzip.compress(DATA))
    (tmp_path / "web" / "b.jsonl").write_bytes(DATA[:110])
    assert texts_of(read_sources([f"{server}/a.jsonl.gz?version=1"])) == LINES
    with pytest.raises(TextmillError, match="nothing at"):
        find_sources([f"{server}/gone.jsonl"])
    settings = {"sources": [f"{server}/a.jsonl.gz", f"{server}/b.jsonl"], "max_unreadable": 0.5}
    config = RunConfig.model_validate({"folder": "out", "corpus": settings, "runner": {"workers": 1}})
    account = json.loads((prepare(config) / "account.json").read_text())
    assert (account["records"], account["kept"], account["quarantined"]) == (205, 200, 1)
    inputs = json.loads((tmp_path / "out/corpus/manifest.json").read_text())["made_from"]
    assert inputs[f"inputs.{server}/b.jsonl"]["bytes"] == 110


# Hugging Face


def test_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": LINES, "url": [f"u{number}" for number in range(200)]})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    found = read_sources([str(tmp_path / "one")], keep_fields=["url"])
    assert texts_of(found) == LINES
    assert found[5].meta == '{"url": "u5"}'  # type: ignore[union-attr]
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    assert len(read_sources([str(tmp_path / "two")])) == 205
    assert len(read_sources([str(tmp_path / "two" / "test")])) == 5


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(DATA)
    (tmp_path / "set" / "test.jsonl").write_bytes(DATA[:100])
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **words: load(*args, **words, cache_dir=str(tmp_path / "cache"))
    )
    name = f"hf:{tmp_path / 'set'}"
    assert texts_of(read_sources([f"{name}::train"])) == LINES
    (source,) = find_sources([f"{name}::train"])
    assert portable_names([source]) == [f"{name}::train"]
    assert len(find_sources([name])) == 2
    with pytest.raises(TextmillError, match=r"download failed .*check the name"):
        find_sources([f"{name}::gone"])
    with pytest.raises(TextmillError, match="without slicing"):
        find_sources([f"{name}::train[:10%]"])


class BadGateway(http.server.BaseHTTPRequestHandler):
    """A proxy that does not reach the hub."""

    def do_CONNECT(self) -> None:
        self.send_error(502)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"HF_ENDPOINT": "{gone}", "HF_HUB_OFFLINE": "0"}, "127.0.0.1 cannot be reached: Connection refused"),
        ({"https_proxy": "{gone}"}, "127.0.0.1 cannot be reached: Connection refused"),
        pytest.param({"HF_ENDPOINT": "{gone}", "HF_HUB_OFFLINE": "1"}, "OfflineModeIsEnabled", marks=pytest.mark.long),
        pytest.param({"https_proxy": "{bad}"}, "502 Bad Gateway", marks=pytest.mark.long),
    ],
    ids=["online", "no proxy", "offline", "a proxy that fails"],
)
def test_a_hub_that_is_not_reached_is_one_line(tmp_path: Path, variables: dict[str, str], reason: str) -> None:
    """Its package would log each of its retries; it reads the variables when it is imported."""
    pytest.importorskip("datasets")
    (tmp_path / "x.yaml").write_text('corpus: {sources: ["hf:someone/nothing"], folder: corpus}')
    environment = {name: value for name, value in os.environ.items() if not re.search("proxy|^hf_", name.lower())}
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), BadGateway) as bad,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        addresses = {"bad": f"http://127.0.0.1:{bad.server_port}", "gone": f"http://127.0.0.1:{gone.getsockname()[1]}"}
        gone.close()
        threading.Thread(target=bad.serve_forever, daemon=True).start()
        environment |= {name: value.format(**addresses) for name, value in variables.items()}
        environment["HF_HOME"] = str(tmp_path / "home")
        command = [sys.executable, "-m", "textmill", "prepare", str(tmp_path / "x.yaml")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        bad.shutdown()
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "'hf:someone/nothing': download failed" in done.stderr
    assert reason in done.stderr


def test_hub_name_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TextmillError, match=r"'hf:wikitext' needs datasets; run: pip install 'textmill\[hf\]'"):
        find_sources(["hf:wikitext"])


def test_a_mongo_entry_is_a_path() -> None:
    resolved = resolve_paths({"corpus": {"sources": ["mongo:conf/db_config.json"]}}, Path("/project"))
    assert resolved["corpus"]["sources"] == ["mongo:/project/conf/db_config.json"]
