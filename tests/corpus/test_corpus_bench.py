"""The helpers of bench/corpus.py: text that grows without duplicates, and the memory of all processes."""

from __future__ import annotations

import json
import lzma
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from bench import corpus

CHILD = "import subprocess, sys; data = b'x' * {size}; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"


def test_repeated_text_has_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_CHARACTERS", 60)
    texts = [" ".join(f"word{number}" for number in range(start, start + 7)) for start in (0, 100, 200)]
    with lzma.open(tmp_path / "en.jsonl.xz", "wt") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    found, again = (list(islice(corpus.documents(tmp_path / "en.jsonl.xz"), 9)) for _ in range(2))
    assert found == again
    assert found[:3] == texts
    assert len(set(found)) == 9
    assert all(sorted(one.split()) == sorted(texts[number % 3].split()) for number, one in enumerate(found))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="needs /proc to see memory")
def test_memory_includes_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes keep their memory until a sample was taken after both had it."""
    size, here, seen_here = 60 << 20, tmp_path / "here", tmp_path / "seen"
    inner = f"import pathlib, time; data = b'x' * {size}; pathlib.Path({str(here)!r}).touch()\n"
    inner += f"while not pathlib.Path({str(seen_here)!r}).exists(): time.sleep(0.01)"
    samples, sleep = [0], time.sleep

    def pause(seconds: float) -> None:
        samples[0] += here.exists()
        if samples[0] == 2:
            seen_here.touch()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", pause)
    seen = corpus.run([sys.executable, "-c", CHILD.format(size=size, inner=inner)], pause=0.05)
    assert 120 <= seen.peak < 180
