"""Live servers for tests, each a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.generation.conftest import _write_model
from tests.server.live import TEXT
from textmill.config import TokenizerConfig
from textmill.models.gpt2 import facts as gpt2
from textmill.tokens.vocabulary.tokenizer import fit

ROOT = Path(__file__).resolve().parents[2]


class Live:
    """A server process, its address and what it wrote."""

    def __init__(self, asked: dict[str, Any], env: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(Path(__file__).with_name("live.py")), json.dumps(asked)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)/", line)
        assert found, line + "".join(self.said)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def stats(self, **headers: str) -> dict[str, float]:
        """The numbers of /metrics that have no labels."""
        lines = httpx.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        pairs = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
        return {name.removeprefix("textmill_"): float(value) for name, value in pairs}

    def wait_idle(self, seconds: float = 20) -> dict[str, float]:
        """The numbers once nothing runs and nothing waits; a slot that leaks is found here."""
        import time

        end = time.monotonic() + seconds
        while (stats := self.stats())["active"] or stats["waiting"]:
            assert time.monotonic() < end, stats
            time.sleep(0.02)
        return stats

    def stop(self) -> int:
        """End it and give its exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@pytest.fixture(scope="module")
def new_live() -> Iterator[Callable[..., Live]]:
    """Starts servers, and ends them after the module's tests."""
    started: list[Live] = []

    def start(asked: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Live:
        started.append(Live(asked or {}, env))
        return started[-1]

    yield start
    for live in started:
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights that sees 96 tokens."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(layers=2, heads=2, width=32, inner=128, positions=96, vocab=tokenizer.vocab, end=tokenizer.end)
    return _write_model(tmp_path_factory.mktemp("small") / "run", tokenizer, shape).folder


@pytest.fixture(scope="module")
def live(new_live: Callable[..., Live]) -> Live:
    """A server of the echoing model, quick and without a key."""
    return new_live({"serve": {"slots": 8, "queue": 64}})
