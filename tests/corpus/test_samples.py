"""A sample or a limit of named sources: how much is read, and that records are complete."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from textmill.config import RunConfig
from textmill.corpus import streams
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus

COUNT = 60_000
DICE = random.Random(7)
TEXTS = [f"{number} {DICE.randbytes(60).hex()}" for number in range(COUNT)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


class CountedReads:
    """A file that counts the bytes that are read of it."""

    total = 0

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        block: bytes = self.stream.read(size)
        CountedReads.total += len(block)
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __enter__(self) -> CountedReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for a server of files, whose delivered bytes are counted."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    open_url = streams.open_url
    monkeypatch.setattr(streams, "open_url", lambda url: CountedReads(open_url(url)))
    CountedReads.total = 0
    yield files
    files.rm("/sampled", recursive=True)


def kept_of(folder: Path, path: str, **settings: Any) -> list[str]:
    corpus = {"sources": [{"name": "sampled", "path": path, **settings}], "section_chars": 100}
    config = RunConfig.model_validate({"folder": str(folder), "corpus": corpus, "runner": {"workers": 1}})
    return [document.text for document in open_corpus(prepare(config))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("settings", [{"sample": 0.01}, {"limit": len(LINES) // 100}])
def test_a_sample_of_a_remote_file_reads_little(tmp_path: Path, memory: Any, name: str, settings: Any) -> None:
    if name.endswith("parquet"):
        with memory.open(f"/sampled/{name}", "wb") as stream:
            pq.write_table(pa.table({"text": TEXTS}), stream, row_group_size=300)
        size = memory.size(f"/sampled/{name}")
    else:
        pack = {"l": bytes, "z": gzip.compress, "t": zstandard.ZstdCompressor().compress}[name[-1]]
        memory.pipe(f"/sampled/{name}", pack(LINES))
        size = len(pack(LINES))
    kept = kept_of(tmp_path, f"memory://sampled/{name}", **settings)
    assert 100 < len(kept) < 0.06 * COUNT
    assert set(kept) <= set(TEXTS)
    # The first 256 KB are read up to three times, however large a file is.
    assert CountedReads.total <= 0.05 * size + 3 * (1 << 18)


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
