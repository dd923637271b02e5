"""The look at how a run ends sees what it is there for; the engines' own runs are looked at where they are launched."""

from __future__ import annotations

import os
import re
import sys

import pytest

from bench import engine_ends
from bench.engine_ends import children, ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who is whose child")


NOT_WAITED_FOR = "import os; child = os.fork() or os._exit(0); os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["true"], "well"),
        (["sh", "-c", "echo oh; exit 3"], "failed with 3: oh\n"),
        (["sleep", "60"], "hung"),
        (["sh", "-c", "sleep 60 & exit 0"], r"well, left 1 behind \(\w+, alive\)"),
        (["sh", "-c", "sleep 60 & exec sleep 60"], r"hung, left 1 behind \(\w+, alive\)"),
        ([sys.executable, "-c", NOT_WAITED_FOR], r"well, left 1 behind \(\S+, a zombie\)"),
    ],
)
def test_who_is_left_is_counted_and_ended(command: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ends, "LONGEST", 1 if wanted.startswith("hung") else 60)
    before = children()
    assert re.fullmatch(wanted, ended(command, dict(os.environ)))
    assert children().keys() == before.keys()
