"""Wait for a condition, up to a limit that only a hang reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LONGEST = 300.0
"""Seconds after which a wait counts as a hang; no test depends on being faster than this."""
T = TypeVar("T")


def wait_for(condition: Callable[[], T], describe: Callable[[], object] = lambda: "") -> T:
    """Wait until a condition is true; return its value. `describe` gives the error message at a timeout."""
    end = time.monotonic() + LONGEST
    while not (found := condition()):
        assert time.monotonic() < end, f"not true after {LONGEST:.0f} s: {describe()}"
        time.sleep(0.01)
    return found
