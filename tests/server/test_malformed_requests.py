"""Malformed requests get a status below 500, in one format and without a traceback, and the server keeps running."""

from __future__ import annotations

import json
import os
import random
import socket
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from tests.support import web
from tests.support.garbage import random_bytes, random_request
from tests.support.live_server import Live
from tests.support.waiting import LONGEST

pytestmark = pytest.mark.long

COUNT = int(os.environ.get("TEXTMILL_TEST_MALFORMED", "2000"))
"""Number of malformed bodies; a tenth as many malformed HTTP requests are sent."""


@pytest.fixture(scope="module")
def target(new_live: Callable[..., Live]) -> Live:
    return new_live(
        {"delay": 0.0002, "serve": {"max_tokens": 8, "request_timeout": LONGEST}, "sample": {"max_tokens": 4}}
    )


def test_malformed_bodies(target: Live) -> None:
    dice, statuses = random.Random(7), Counter[int]()
    with httpx.Client(base_url=target.url, timeout=LONGEST) as client:
        api = client.get("/openapi.json").json()
        for number in range(COUNT):
            method, path, headers, body = random_request(api, dice)
            reply = client.request(method, path, headers=headers, content=body)
            statuses[reply.status_code] += 1
            details = (number, method, path, body[:300], reply.text[:300])
            assert reply.status_code < 500, details
            assert "Traceback" not in reply.text, details
            assert ".py" not in reply.text, details
            if reply.status_code >= 400 and method != "HEAD":
                error = json.loads(reply.content)["error"]
                assert set(error) == {"message", "type", "param", "code"}, details
                assert 8 < len(error["message"]) < 400, details
                assert "\n" not in error["message"], details
        assert client.get("/health").status_code == 200
    assert statuses[200] > COUNT / 20, f"the generator makes requests that work, too: {statuses}"
    assert statuses[400] > COUNT / 5
    target.wait_idle()


def test_malformed_http(target: Live) -> None:
    dice = random.Random(8)
    for number in range(COUNT // 10):
        sent, got = random_bytes(dice), b""
        with socket.create_connection(("127.0.0.1", target.port), timeout=LONGEST) as line:
            try:
                line.sendall(sent)
                line.shutdown(socket.SHUT_WR)
                while part := line.recv(65536):
                    got += part
            except OSError:
                pass  # the server may hang up on such a caller
        if got:
            assert got.startswith(b"HTTP/1.1 "), (number, sent[:200], got[:200])
            assert int(got[9:12]) < 500, (number, sent[:200], got[:200])
        assert b"Traceback" not in got
    assert web.get(f"{target.url}/health").status_code == 200
    target.wait_idle()


def test_no_traceback_was_logged(target: Live) -> None:
    assert target.stop() == 0
    assert "Traceback" not in "".join(target.output)
