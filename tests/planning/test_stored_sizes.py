"""The size that a compressed file states is that of its content."""

from __future__ import annotations

import gzip
import lzma
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from textmill.planning.inspect_text import content_size

DATA = random.Random(1).randbytes(300_000) + b"text " * 400_000


def test_files_of_python(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(DATA, 1))
    (tmp_path / "a.xz").write_bytes(lzma.compress(DATA, preset=0))
    (tmp_path / "a.txt").write_bytes(DATA)
    assert content_size(str(tmp_path / "a.gz")) == content_size(str(tmp_path / "a.xz")) == len(DATA)
    assert content_size(str(tmp_path / "a.txt")) is None
    assert content_size(str(tmp_path / "none.xz")) is None


@pytest.mark.skipif(shutil.which("xz") is None, reason="no program `xz`")
def test_a_file_of_several_blocks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    subprocess.run(["xz", "-0", "--block-size=100000", str(tmp_path / "a")], check=True)
    assert content_size(str(tmp_path / "a.xz")) == len(DATA)


def test_damaged_files_state_nothing(tmp_path: Path) -> None:
    packed, dice = lzma.compress(DATA, preset=0), random.Random(2)
    path = tmp_path / "a.xz"
    for _ in range(200):
        damaged = bytearray(packed)
        damaged[-dice.randrange(1, 40)] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged[: -dice.randrange(1, 30)] if dice.random() < 0.3 else damaged)
        found = content_size(str(path))
        assert found is None or found >= 0


def test_several_streams_in_one_file_state_nothing(tmp_path: Path) -> None:
    """Their last index is that of the last stream only."""
    (tmp_path / "a.xz").write_bytes(lzma.compress(DATA, preset=0) + lzma.compress(b"the end", preset=0))
    assert content_size(str(tmp_path / "a.xz")) is None
