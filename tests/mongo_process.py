"""A MongoDB server for tests and measurements: the one that TEXTMILL_TEST_MONGO names, or secantusdb in an environment of its own.

secantusdb is under the GPL and is run as a process, never imported.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = "secantusdb==0.7.0b3"
VARIABLE = "TEXTMILL_TEST_MONGO"


class NoServer(Exception):
    """Why there is no server to test against."""


class MongoProcess:
    """A server of our own that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.command, self.port = folder, _installed(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--storage-path", str(self.folder), "--log-level", "ERROR"]
        self.process = subprocess.Popen([str(self.command), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if self.process.poll() is not None:
                    raise NoServer(f"secantusdb ended with code {self.process.returncode}") from None
                time.sleep(0.1)
            else:
                return
        raise NoServer("secantusdb did not open its port in 60 s")

    def stop(self, sign: int = signal.SIGTERM) -> None:
        if self.process:
            self.process.send_signal(sign)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _installed() -> Path:
    """The server's command, installed once into an environment of its own."""
    kept = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    place = kept / f"textmill-test-{PINNED.replace('==', '-')}"
    command = place / "bin" / "secantusd-py"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not command.exists():
            try:
                subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, timeout=120)
                pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", PINNED]
                subprocess.run(pip, check=True, capture_output=True, timeout=300)
            except (subprocess.SubprocessError, OSError) as error:
                raise NoServer(f"{PINNED} cannot be installed ({type(error).__name__})") from None
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def named_server() -> str | None:
    """The connection string of a real server, where one is named."""
    return os.environ.get(VARIABLE)
