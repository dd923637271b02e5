"""The check for leftover processes finds them; the engines' own runs are checked where they are launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import IO, Any

import pytest

from bench import engine_exits
from bench.engine_exits import list_children, run_to_exit
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who is whose child")


NOT_WAITED_FOR = "import os; child = os.fork() or os._exit(0); os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"


def give_up_when_ready(command: list[str], *, stdout: IO[str], timeout: float, **options: Any) -> None:
    """Act like subprocess.run at its timeout, as soon as the command hangs."""
    process = subprocess.Popen(command, stdout=stdout, **options)
    wait_for(lambda: os.fstat(stdout.fileno()).st_size)
    process.kill()
    process.wait()
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["true"], "ok"),
        (["sh", "-c", "echo oh; exit 3"], "failed with 3: oh\n"),
        (["sh", "-c", "echo ready; exec sleep 600"], "hung"),
        (["sh", "-c", "sleep 600 & exit 0"], r"ok, left processes: \w+, alive"),
        (["sh", "-c", "sleep 600 & echo ready; exec sleep 600"], r"hung, left processes: \w+, alive"),
        ([sys.executable, "-c", NOT_WAITED_FOR], r"ok, left processes: \S+, a zombie"),
    ],
)
def test_leftover_processes_are_counted_and_killed(
    command: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if expected.startswith("hung"):
        monkeypatch.setattr(engine_exits.subprocess, "run", give_up_when_ready)
    before = list_children()
    assert re.fullmatch(expected, run_to_exit(command, dict(os.environ)))
    assert list_children().keys() == before.keys()
