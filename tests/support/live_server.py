"""A server as a process of its own, its address and what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import web
from tests.support.waiting import LONGEST, wait_for

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "serve"]


class Live:
    """A server process, its address and what it wrote."""

    def __init__(self, asked: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.paused = Path(tempfile.mkdtemp(prefix="textmill-live-")) / "paused"
        told = json.dumps({**asked, "paused": str(self.paused)})
        command = [sys.executable, "-m", "tests.support.server_process", told]
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
        lines = web.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        pairs = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
        return {name.removeprefix("textmill_"): float(value) for name, value in pairs}

    def wait_for_stats(self, condition: Callable[[dict[str, float]], object]) -> dict[str, float]:
        """The numbers once they are as they should be."""
        seen: dict[str, float] = {}

        def fulfilled() -> object:
            seen.update(self.stats())
            return condition(seen)

        wait_for(fulfilled, lambda: seen)
        return seen

    def wait_idle(self) -> dict[str, float]:
        """The numbers once nothing runs and nothing waits; a slot that leaks is found here."""
        return self.wait_for_stats(lambda stats: not stats["active"] and not stats["waiting"])

    def pause(self) -> None:
        """Have the repeating model make no more tokens; requests are taken, wait and can be cancelled."""
        self.paused.touch()

    def go_on(self) -> None:
        """Have it make tokens again."""
        self.paused.unlink()

    def stop(self) -> int:
        """End it and give its exit code."""
        self.process.terminate()
        code = self.process.wait(LONGEST)
        self._reader.join(LONGEST)
        return code
