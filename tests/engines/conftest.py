"""Every engine there is, and a family outside the package, for the tests that all of them pass."""

from __future__ import annotations

import pytest

from tests.support import engine_runs
from tests.support.engine_runs import ENGINES, MYNET


@pytest.fixture(params=[*ENGINES, "torch-mynet"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of an engine; with torch also a family of the user's own."""
    engine, _, own = str(request.param).partition("-")
    monkeypatch.setattr(engine_runs, "FAMILY", [MYNET if own else "gpt2"])
    return engine
