"""Disconnected clients free their slots, and a server that stops sends every client a reply."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST, wait_for
from textmill.server.lifecycle import DRAIN_SECONDS

pytestmark = pytest.mark.long

ENDLESS = 10**9
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
COUNT = int(os.environ.get("TEXTMILL_TEST_LEAVING", "100"))


def leave(live: Live, number: int) -> int:
    """Request endless texts and disconnect, at once or in mid-stream; return how many surely started."""
    dice = random.Random(number)
    texts, started = dice.choice([1, 1, 3]), False
    body = json.dumps(
        {"prompt": "The mill", "max_tokens": ENDLESS, "min_tokens": ENDLESS, "stream": number % 2 == 0, "n": texts}
    ).encode()
    head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONGEST) as line:
        line.sendall(head.encode() + body)
        if number % 2 == 0 and dice.random() < 0.7:
            started = bool(line.recv(dice.choice([1, 500, 4000])))
        if dice.random() < 0.5:  # a reset instead of a normal close
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    return texts * started


@pytest.mark.parametrize("real", [False, True], ids=["echo", "model"])
def test_no_slot_leaks(new_live: Callable[..., Live], small_model: Path, real: bool) -> None:
    options = {"model": str(small_model), "sample": {"temperature": 0.0}} if real else {"delay": 0.005}
    live = new_live({**options, "serve": {"slots": 8, "queue": 400, "max_tokens": ENDLESS}})
    count = COUNT // 4 if real else COUNT
    with ThreadPoolExecutor(16) as pool:
        started = sum(pool.map(lambda number: leave(live, number), range(count)))
    stats = live.wait_idle()
    assert stats["scheduled_total"] >= started > 0
    assert stats["cancelled_total"] == stats["scheduled_total"], "none of these texts has an end"
    assert stats["clients_left_total"] > 0
    assert live.stats()["generated_tokens_total"] == stats["generated_tokens_total"], (
        "nothing is generated for disconnected clients"
    )
    reply = web.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": 8})
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == 8
    assert real or texts == ["xxx"] * 8
    assert live.stop() == 0
    assert "Traceback" not in "".join(live.output)


def ask(live: Live, number: int, tokens: int) -> tuple[str, Any]:
    """Request a complete or streamed text; return what was received."""
    body = {"prompt": "The mill", "max_tokens": tokens, "stream": number % 2 == 0}
    if number % 2:
        reply = web.post(f"{live.url}/v1/completions", json=body)
        return "complete", (reply.status_code, reply.json())
    with web.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return "refused", reply.status_code
        return "stream", [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("grace", "tokens", "number"),
    [(LONGEST, 60, signal.SIGHUP), (0.3, ENDLESS, signal.SIGTERM)],
    ids=["finished", "ended"],
)
def test_stop_finishes_or_ends_every_request_properly(
    new_live: Callable[..., Live], grace: float, tokens: int, number: signal.Signals
) -> None:
    live = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 16, "shutdown_grace": grace, "max_tokens": ENDLESS}})
    live.pause()  # no request finishes before the stop
    with ThreadPoolExecutor(12) as pool:
        requests = [pool.submit(ask, live, one, tokens) for one in range(12)]
        # A request that arrives later would be refused.
        live.wait_for_stats(lambda stats: stats["scheduled_total"] == 12)
        live.process.send_signal(number)
        live.resume()
        results = [one.result() for one in requests]
    assert live.process.wait(LONGEST) == 0
    for kind, got in results:
        if kind == "stream":
            assert got[-1] == "[DONE]"
            last = [json.loads(line) for line in got[:-1]]
            reasons = [choice["finish_reason"] for chunk in last for choice in chunk.get("choices", [])]
            stopped = any(chunk.get("error", {}).get("code") == "stopping" for chunk in last)
            assert reasons[-1] == (None if grace < 1 else "length")
            assert stopped == (grace < 1)
        else:
            status, tree = got
            assert status == (503 if grace < 1 else 200), "a text that is cut short is no answer"
            assert grace > 1 or tree["error"]["code"] == "stopping"


def test_stopping_server_answers_503_until_it_has_stopped(new_live: Callable[..., Live]) -> None:
    live = new_live({"serve": {"slots": 2, "queue": 2, "shutdown_grace": LONGEST}})
    live.pause()  # the shutdown lasts until the running text has ended
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, live, 1, 5)
        live.wait_for_stats(lambda stats: stats["scheduled_total"] == 1)
        live.process.send_signal(signal.SIGTERM)
        wait_for(lambda: web.get(f"{live.url}/ready").status_code == 503)
        # Longer than the server needs to close its socket: it listens until its last text has ended.
        for _ in range(3):
            assert web.get(f"{live.url}/ready").json() == {"status": "stopping"}
            refused = web.post(f"{live.url}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            time.sleep(2 * DRAIN_SECONDS)
        live.resume()
        assert running.result()[1][0] == 200
    assert live.process.wait(LONGEST) == 0


async def send_request(port: int, number: int, seen: Counter[str]) -> bool:
    """Request a complete or streamed text and count the outcome; return whether the server accepted the connection."""
    body = json.dumps({"prompt": "The mill", "max_tokens": 20, "stream": number % 2 == 0}).encode()
    head = f"{HEAD}Content-Length: {len(body)}\r\n"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        got = await reader.read()
        if not got:
            raise ConnectionResetError
        complete = got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if b"text/event-stream" in got else got.endswith(b"}")
        seen[got[9:12].decode() if complete else "cut off"] += 1
    except OSError:
        seen["closed"] += 1
    finally:
        writer.close()
    return True


CLIENTS = 40


async def run_clients(live: Live, seen: Counter[str]) -> None:
    """Run clients that send requests until the server is gone; stop the server in the middle."""

    async def repeat(number: int) -> None:
        while await send_request(live.port, number, seen):
            number += 1

    clients = [asyncio.create_task(repeat(number)) for number in range(CLIENTS)]
    await until(lambda: seen["200"] >= 12 and seen["429"] >= 40)
    live.pause()  # the server cannot finish before a request is refused
    live.process.send_signal(signal.SIGTERM)
    await until(lambda: seen["503"])
    live.resume()
    await asyncio.wait_for(asyncio.gather(*clients), LONGEST)


async def until(condition: Callable[[], object]) -> None:
    """Wait, while the clients run, until the condition is true."""
    async with asyncio.timeout(LONGEST):
        while not condition():
            await asyncio.sleep(0.02)


def test_stop_under_load_answers_every_client(new_live: Callable[..., Live]) -> None:
    live, seen = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 8, "shutdown_grace": LONGEST}}), Counter[str]()
    asyncio.run(run_clients(live, seen))
    assert live.process.wait(LONGEST) == 0
    # While the socket is being closed, the system may still accept one connection per client.
    assert set(seen) <= {"200", "429", "503", "closed"}, seen
    assert seen["closed"] <= CLIENTS, seen
    assert "Traceback" not in "".join(live.output)
