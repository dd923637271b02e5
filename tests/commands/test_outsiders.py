"""A short version of bench/outsiders.py: random configs, mutated files and command lines, in five conditions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.long
def test_no_traceback_no_hang_and_a_message_for_every_mistake() -> None:
    arguments = [sys.executable, "bench/outsiders.py", "5", "20", "25", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "config: 5 cases" in done.stdout
    assert done.stdout.endswith("0 defects\n")
