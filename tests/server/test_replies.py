"""Streams: a client that cannot be written to has left, and its texts are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.server_process import new_service
from tests.support.waiting import wait_for
from textmill.config import SampleConfig
from textmill.generation.requests import Request
from textmill.server.bodies import CompletionBody
from textmill.server.replies import CompletionReply, EventStream
from textmill.server.service import start_request


def test_a_client_that_cannot_be_written_to_has_left() -> None:
    service = new_service({})

    async def stream() -> dict[str, Any]:
        request = Request((1, 2), SampleConfig(max_tokens=10**9))
        in_flight = await start_request(service, [request], streamed=True)
        reply = CompletionReply(service, CompletionBody(prompt="x"), [])
        scope: dict[str, Any] = {}

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError("the connection is closed")

        await EventStream(in_flight, reply, on_end=lambda: None)(scope, receive, send)
        return scope

    assert asyncio.run(stream()) == {"log_fields": {"ended": "left"}}
    assert service.metrics.disconnects == 1
    wait_for(lambda: service.model.stats().cancelled == 1)
    asyncio.run(service.model.close(0))
