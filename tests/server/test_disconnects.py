"""Clients that leave free their slots, and a server that is told to stop lets nobody go without a word."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST

pytestmark = pytest.mark.long

ENDLESS = 10**9
COUNT = int(os.environ.get("TEXTMILL_TEST_LEAVING", "100"))


def leave(live: Live, number: int) -> int:
    """Ask for texts without end, and go: at once, or in the middle of the stream. How many were begun for sure."""
    dice = random.Random(number)
    texts, begun = dice.choice([1, 1, 3]), False
    body = json.dumps(
        {
            "prompt": "The mill",
            "max_tokens": ENDLESS,
            "min_tokens": ENDLESS,
            "stream": number % 2 == 0,
            "n": texts,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONGEST) as line:
        line.sendall(head.encode() + body)
        if number % 2 == 0 and dice.random() < 0.7:
            begun = bool(line.recv(dice.choice([1, 500, 4000])))
        if dice.random() < 0.5:  # a reset, not a farewell
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    return texts * begun


@pytest.mark.parametrize("real", [False, True], ids=["echo", "model"])
def test_no_slot_leaks(new_live: Callable[..., Live], small_model: Path, real: bool) -> None:
    asked = {"model": str(small_model), "sample": {"temperature": 0.0}} if real else {"delay": 0.005}
    live = new_live({**asked, "serve": {"slots": 8, "queue": 400, "max_tokens": ENDLESS}})
    count = COUNT // 4 if real else COUNT
    with ThreadPoolExecutor(16) as pool:
        begun = sum(pool.map(lambda number: leave(live, number), range(count)))
    stats = live.wait_idle()
    assert stats["scheduled_total"] >= begun > 0
    assert stats["cancelled_total"] == stats["scheduled_total"], "none of these texts has an end"
    assert stats["clients_left_total"] > 0
    assert live.stats()["generated_tokens_total"] == stats["generated_tokens_total"], (
        "nothing is made for those who left"
    )
    reply = web.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": 8})
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == 8
    assert real or texts == ["xxx"] * 8
    assert live.stop() == 0
    assert "Traceback" not in "".join(live.said)


def ask(live: Live, number: int, tokens: int) -> tuple[str, Any]:
    """A whole or a streamed text: what came of it."""
    body = {"prompt": "The mill", "max_tokens": tokens, "stream": number % 2 == 0}
    if number % 2:
        reply = web.post(f"{live.url}/v1/completions", json=body)
        return "whole", (reply.status_code, reply.json())
    with web.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return "refused", reply.status_code
        return "stream", [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(("grace", "tokens"), [(LONGEST, 60), (0.3, ENDLESS)], ids=["they finish", "they are ended"])
def test_a_stop_cuts_nobody_off_without_a_word(new_live: Callable[..., Live], grace: float, tokens: int) -> None:
    live = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 16, "shutdown_grace": grace, "max_tokens": ENDLESS}})
    live.pause()  # nobody is done before the stop
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, live, number, tokens) for number in range(12)]
        # Who is not in yet would find the door closed.
        live.wait_for_stats(lambda stats: stats["scheduled_total"] == 12)
        live.process.send_signal(signal.SIGTERM)
        live.go_on()
        results = [one.result() for one in asked]
    assert live.process.wait(LONGEST) == 0
    finished = 0
    for kind, got in results:
        if kind == "stream":
            assert got[-1] == "[DONE]"
            last = [json.loads(line) for line in got[:-1]]
            reasons = [choice["finish_reason"] for chunk in last for choice in chunk.get("choices", [])]
            stopped = any(chunk.get("error", {}).get("code") == "stopping" for chunk in last)
            assert reasons[-1] == "length"
            assert stopped == (grace < 1)
        else:
            status, tree = got
            assert status == 200 or (status == 503 and tree["error"]["code"] == "stopping")
            assert grace < 1 or status == 200
        finished += kind == "stream" or got[0] == 200
    assert finished >= (12 if grace > 1 else 4)


async def come(port: int, number: int, seen: Counter[str]) -> bool:
    """Ask for a text, whole or streamed, on a line of its own; what came of it is counted. Whether anybody was there."""
    body = json.dumps({"prompt": "The mill", "max_tokens": 20, "stream": number % 2 == 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        got = await reader.read()
        if not got:
            raise ConnectionResetError
        whole = got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if b"text/event-stream" in got else got.endswith(b"}")
        seen[got[9:12].decode() if whole else "cut off"] += 1
    except OSError:
        seen["hung up on"] += 1
    finally:
        writer.close()
    return True


CLIENTS = 40


async def crowd(live: Live, seen: Counter[str]) -> None:
    """Many clients that come again and again until nobody is there any more; in the middle of it the server is told to stop."""

    async def again(number: int) -> None:
        while await come(live.port, number, seen):
            number += 1

    clients = [asyncio.create_task(again(number)) for number in range(CLIENTS)]
    await until(lambda: seen["200"] >= 12 and seen["429"] >= 40)
    live.pause()  # the server cannot be done before somebody has come too late
    live.process.send_signal(signal.SIGTERM)
    await until(lambda: seen["503"])
    live.go_on()
    await asyncio.wait_for(asyncio.gather(*clients), LONGEST)


async def until(condition: Callable[[], object]) -> None:
    """Let the clients work until something is true."""
    async with asyncio.timeout(LONGEST):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_stop_under_load_tells_everybody(new_live: Callable[..., Live]) -> None:
    live, seen = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 8, "shutdown_grace": LONGEST}}), Counter[str]()
    asyncio.run(crowd(live, seen))
    assert live.process.wait(LONGEST) == 0
    # Between the last look at the door and its shutting the system may take in some more, each client once.
    assert set(seen) <= {"200", "429", "503", "hung up on"}, seen
    assert seen["hung up on"] <= CLIENTS, seen
    assert "Traceback" not in "".join(live.said)
