"""A server as a process of its own, its address and what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "serve"]


class Live:
    """A server process, its address and what it wrote."""

    def __init__(self, asked: dict[str, Any], env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tests.support.server_process", json.dumps(asked)]
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
