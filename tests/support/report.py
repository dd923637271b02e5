"""A pytest plugin that prints the CPU time of the tests, with child processes, and the skipped tests by reason."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

LISTED = 10
KEY = "cpu_seconds"
STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all finished children."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start the CPU clock of a test before its fixtures."""
    item.stash[STARTED] = cpu_seconds()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the CPU time of a test phase to its report, which workers send to the main process."""
    outcome: Any = yield
    now = cpu_seconds()
    outcome.get_result().user_properties.append((KEY, now - item.stash[STARTED]))
    item.stash[STARTED] = now


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print both lists."""
    seconds: dict[str, float] = defaultdict(float)
    skipped: dict[str, set[str]] = defaultdict(set)
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        for key, value in getattr(report, "user_properties", ()):
            seconds[report.nodeid] += value * (key == KEY)
        if getattr(report, "skipped", False) and isinstance(report.longrepr, tuple):
            skipped[report.longrepr[2].removeprefix("Skipped: ")].add(report.nodeid)
    if seconds:
        tests, total = sum(seconds.values()) / 60, cpu_seconds() / 60
        terminalreporter.section(f"CPU time: {total:.1f} minutes, {tests:.1f} of them in tests; the most costly")
        for test, value in sorted(seconds.items(), key=lambda one: -one[1])[:LISTED]:
            terminalreporter.write_line(f"{value:7.1f} s  {test}")
    if skipped:
        terminalreporter.section(f"skipped: {sum(map(len, skipped.values()))} tests")
        for reason, tests in sorted(skipped.items(), key=lambda one: -len(one[1])):
            files = sorted({test.partition("::")[0] for test in tests})
            terminalreporter.write_line(f"{len(tests):5d}  {reason}  ({', '.join(map(os.path.basename, files))})")
