"""Every engine there is with every family of the package, for the tests that all of them pass."""

from __future__ import annotations

import pytest

from tests.support import engine_runs
from tests.support.engine_runs import ENGINES, engines_of
from textmill.config import SIZES

LONG = [
    pytest.param(f"{engine}-{family}", marks=pytest.mark.long)
    for family in SIZES
    for engine in engines_of(family)
    if family != "gpt2"
]


@pytest.fixture(params=[*ENGINES, *LONG])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of an engine, with GPT-2 or the family after the hyphen."""
    engine, _, family = str(request.param).partition("-")
    monkeypatch.setattr(engine_runs, "FAMILY", [family or "gpt2"])
    return engine
