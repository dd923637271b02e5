"""The tests of commands use a machine that was measured before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.machines import TWO_CORES


@pytest.fixture(scope="session", autouse=True)
def measured_machine() -> Iterator[None]:
    """`textmill new` would train for seconds to measure the machine; tests/planning does that once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("textmill.commands.new.probe_machine", lambda: TWO_CORES)
        yield
