"""Every engine there is, for the tests that all of them pass."""

from __future__ import annotations

import pytest

from tests.support.engine_runs import ENGINES


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
