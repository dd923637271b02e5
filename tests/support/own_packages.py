"""Packages that only one test needs, installed once into a folder of their own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def own_wheel(pinned: str) -> Path:
    """The wheel of a package, downloaded once; the test is skipped if that is not possible."""
    kept = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    place = kept / "textmill-test-wheels"
    place.mkdir(exist_ok=True)
    name = pinned.replace("-", "_").replace("==", "-")
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(place.glob(f"{name}-*.whl")):
            words = ["-q", "--disable-pip-version-check", "--no-deps", "--dest", str(place)]
            try:
                command = [sys.executable, "-m", "pip", "download", *words, pinned]
                subprocess.run(command, check=True, capture_output=True, timeout=300)
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"{pinned} cannot be downloaded ({type(error).__name__})")
    (wheel,) = place.glob(f"{name}-*.whl")
    return wheel


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
