"""Valid and invalid requests that schemathesis generates from the OpenAPI description: none gets a status of 500."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra long")
pytestmark = pytest.mark.long

COUNT = int(os.environ.get("TEXTMILL_TEST_CONTRACT", "20"))
"""Number of requests per route and kind."""


@pytest.fixture(scope="module")
def target(new_live: Callable[..., Live]) -> Live:
    return new_live(
        {"delay": 0.0002, "serve": {"max_tokens": 8, "request_timeout": LONGEST}, "sample": {"max_tokens": 4}}
    )


def send(target: Live, operation: Any, mode: Any, statuses: Counter[tuple[str, int]]) -> None:
    """Send valid or invalid requests to one route."""
    quick = settings(
        max_examples=COUNT,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(7)
    @quick
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        reply = case.call(base_url=target.url)
        statuses[mode.value, reply.status_code] += 1
        details = (case.method, case.path, str(case.body)[:300], reply.text[:300])
        assert reply.status_code < 500, details
        assert "Traceback" not in reply.text, details
        if reply.status_code >= 400:
            assert set(json.loads(reply.content)["error"]) == {"message", "type", "param", "code"}, details

    check()


def test_no_request_gets_a_server_error(target: Live) -> None:
    api = schemathesis.openapi.from_dict(web.get(f"{target.url}/openapi.json").json())
    statuses = Counter[tuple[str, int]]()
    for found in api.get_all_operations():
        operation = found.ok()
        send(target, operation, schemathesis.GenerationMode.POSITIVE, statuses)
        if operation.body:
            send(target, operation, schemathesis.GenerationMode.NEGATIVE, statuses)
    print(f"answers by kind: {dict(sorted(statuses.items()))}")
    assert web.get(f"{target.url}/health").status_code == 200
    assert {mode for mode, status in statuses if status == 200} >= {"positive"}
    assert {mode for mode, status in statuses if status == 400} >= {"negative"}
    target.wait_idle()
    assert target.stop() == 0
    assert "Traceback" not in "".join(target.output)
