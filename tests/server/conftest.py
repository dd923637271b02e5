"""Live servers for tests, each in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_server import Live
from tests.support.small_models import TEXT, write_model
from textmill.config import TokenizerConfig
from textmill.models.gpt2 import family as gpt2
from textmill.tokens.vocabulary.tokenizer import fit


@pytest.fixture(scope="module")
def new_live() -> Iterator[Callable[..., Live]]:
    """Return a function that starts servers; they are stopped after the module's tests."""
    started: list[Live] = []

    def start(options: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Live:
        started.append(Live(options or {}, env))
        return started[-1]

    yield start
    for live in started:
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and 96 positions."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=2, heads=2, width=32, inner=128, positions=96, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    return write_model(tmp_path_factory.mktemp("small") / "run", tokenizer, shape).folder


@pytest.fixture(scope="module")
def live(new_live: Callable[..., Live]) -> Live:
    """A server with the echo model, without delay or key."""
    return new_live({"serve": {"slots": 8, "queue": 64}})
