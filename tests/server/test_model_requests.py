"""From a request's body to the settings of its texts: what the request has overrides the server's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from textmill.config import SampleConfig, ServeConfig
from textmill.server.bodies import CompletionBody
from textmill.server.model_requests import sampling_settings


@pytest.mark.parametrize(
    ("fields", "min_tokens", "max_tokens"),
    [
        ({}, 5, 50),
        ({"min_tokens": 0}, 0, 50),
        ({"min_tokens": 7}, 7, 50),
        ({"max_tokens": 3}, 3, 3),
        ({"max_tokens": 3, "min_tokens": 0}, 0, 3),
    ],
)
def test_fewest_and_most_tokens(fields: dict[str, Any], min_tokens: int, max_tokens: int) -> None:
    service: Any = SimpleNamespace(config=ServeConfig(), sample=SampleConfig(min_tokens=5, max_tokens=50))
    body = CompletionBody(prompt="x", **fields)
    settings = sampling_settings(service, body, body.max_tokens)
    assert (settings.min_tokens, settings.max_tokens) == (min_tokens, max_tokens)
