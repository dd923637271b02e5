"""A server in its own process, with its address and its log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import web
from tests.support.waiting import LONGEST, wait_for

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "serve"]


class Live:
    """A server process, its address and its log."""

    def __init__(self, options: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.paused = Path(tempfile.mkdtemp(prefix="textmill-live-")) / "paused"
        arguments = json.dumps({**options, "paused": str(self.paused)})
        command = [sys.executable, "-m", "tests.support.server_process", arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)/", line)
        assert found, line + "".join(self.output)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.output.extend(self.process.stderr)

    def stats(self, **headers: str) -> dict[str, float]:
        """Return the metrics without labels."""
        lines = web.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        pairs = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
        return {name.removeprefix("textmill_"): float(value) for name, value in pairs}

    def wait_for_stats(self, condition: Callable[[dict[str, float]], object]) -> dict[str, float]:
        """Wait until the metrics meet the condition; return them."""
        seen: dict[str, float] = {}

        def fulfilled() -> object:
            seen.update(self.stats())
            return condition(seen)

        wait_for(fulfilled, lambda: seen)
        return seen

    def wait_idle(self) -> dict[str, float]:
        """Wait until no request runs or waits; return the metrics. A leaked slot fails here."""
        return self.wait_for_stats(lambda stats: not stats["active"] and not stats["waiting"])

    def pause(self) -> None:
        """Stop the echo model from generating; requests are accepted, wait and can be cancelled."""
        self.paused.touch()

    def resume(self) -> None:
        """Let it generate again."""
        self.paused.unlink()

    def stop(self) -> int:
        """Stop the server; return its exit code."""
        self.process.terminate()
        code = self.process.wait(LONGEST)
        self._reader.join(LONGEST)
        return code


@contextmanager
def served(arguments: list[str]) -> Iterator[str]:
    """Run `textmill serve` with these arguments; yield its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    found = re.search(r"http://\S+:(\d+)/", process.stdout.readline())
    assert found, "the server did not print its address"
    try:
        address = f"http://127.0.0.1:{found[1]}"
        assert web.get(f"{address}/ready").status_code == 200
        yield address
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONGEST)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def list_children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    stats = [stat for path in Path("/proc").iterdir() if path.name.isdigit() and (stat := read_stat(int(path.name)))]
    return [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == pid]


def read_stat(pid: int) -> str:
    """Return /proc/PID/stat, or an empty string if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
