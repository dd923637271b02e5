"""Packages that only one test needs, installed once into a folder of their own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def own_packages(*pinned: str) -> Path:
    """The folder with these packages, for PYTHONPATH; the test is skipped if they cannot be installed."""
    kept = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    place = kept / f"textmill-test-{pinned[0].replace('==', '-')}"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            part = place.with_name(f"{place.name}.part")
            words = ["-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), "--target", str(part)]
            command = [sys.executable, "-m", "pip", "install", *words, "--upgrade", *pinned]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=300)
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"{' '.join(pinned)} cannot be installed ({type(error).__name__})")
            part.rename(place)
    return place
