"""Waiting for a condition: as long as it takes, up to a limit that only a hang reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LONGEST = 300.0
"""Seconds after which something that has not happened never will; no test passes or fails by being faster than this."""
T = TypeVar("T")


def wait_for(condition: Callable[[], T], told: Callable[[], object] = lambda: "") -> T:
    """What a condition returns once that is true; `told` is asked for the message where it never is."""
    end = time.monotonic() + LONGEST
    while not (found := condition()):
        assert time.monotonic() < end, f"not true after {LONGEST:.0f} s: {told()}"
        time.sleep(0.01)
    return found
