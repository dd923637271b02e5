"""Clients that leave free their slots, and a server that is told to stop lets nobody go without a word."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import Live

COUNT = int(os.environ.get("TEXTMILL_TEST_LEAVING", "100"))


def leave(live: Live, number: int) -> None:
    """Ask for a long text, and go: at once, while waiting, or in the middle of the stream."""
    dice = random.Random(number)
    body = json.dumps(
        {
            "prompt": "The mill",
            "max_tokens": 4000,
            "min_tokens": 4000,
            "stream": number % 2 == 0,
            "n": dice.choice([1, 1, 3]),
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as line:
        line.sendall(head.encode() + body)
        if number % 2 == 0 and dice.random() < 0.7:
            line.recv(dice.choice([1, 500, 4000]))
        else:
            time.sleep(dice.random() * 0.2)
        if dice.random() < 0.5:  # a reset, not a farewell
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


@pytest.mark.parametrize("real", [False, True], ids=["echo", "model"])
def test_no_slot_leaks(new_live: Callable[..., Live], small_model: Path, real: bool) -> None:
    asked = {"model": str(small_model), "sample": {"temperature": 0.0}} if real else {"delay": 0.005}
    live = new_live({**asked, "serve": {"slots": 8, "queue": 200}})
    count = COUNT // 4 if real else COUNT
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: leave(live, number), range(count)))
    stats = live.wait_idle()
    assert stats["scheduled_total"] >= count / 2
    assert stats["cancelled_total"] == stats["scheduled_total"], "4,000 tokens take longer than anybody stays"
    assert stats["clients_left_total"] > 0
    assert live.stats()["generated_tokens_total"] == stats["generated_tokens_total"], (
        "nothing is made for those who left"
    )
    reply = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": 8}, timeout=60)
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == 8
    assert real or texts == ["xxx"] * 8
    assert live.stop() == 0
    assert "Traceback" not in "".join(live.said)


def ask(live: Live, number: int, tokens: int, started: threading.Semaphore) -> tuple[str, Any]:
    """A whole or a streamed text: what came of it."""
    body = {"prompt": "The mill", "max_tokens": tokens, "stream": number % 2 == 0}
    if number % 2:
        started.release()
        reply = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
        return "whole", (reply.status_code, reply.json())
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as reply:
        if reply.status_code != 200:
            return "refused", reply.status_code
        started.release()
        return "stream", [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(("grace", "tokens"), [(30.0, 60), (0.3, 4000)], ids=["they finish", "they are ended"])
def test_a_stop_cuts_nobody_off_without_a_word(new_live: Callable[..., Live], grace: float, tokens: int) -> None:
    live = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 16, "shutdown_grace": grace}})
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, live, number, tokens, started) for number in range(12)]
        for _ in asked:
            started.acquire()
        end = time.monotonic() + 60
        while (stats := live.stats())["scheduled_total"] < 12:  # whoever is not in yet would find the door closed
            assert time.monotonic() < end, stats
        live.process.send_signal(signal.SIGTERM)
        results = [one.result() for one in asked]
    assert live.process.wait(60) == 0
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
        whole = got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if b"text/event-stream" in got else got.endswith(b"}")
        seen[got[9:12].decode() if whole else "cut off"] += 1
    except OSError:
        seen["cut off"] += 1
    finally:
        writer.close()
    return True


async def crowd(live: Live, seen: Counter[str]) -> None:
    """Many clients that come again and again until nobody is there any more; in the middle of it the server is told to stop."""

    async def again(number: int) -> None:
        while await come(live.port, number, seen):
            number += 1

    clients = [asyncio.create_task(again(number)) for number in range(40)]
    end = time.monotonic() + 60
    while seen["200"] < 12 or seen["429"] < 40:
        assert time.monotonic() < end, seen
        await asyncio.sleep(0.02)
    live.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(asyncio.gather(*clients), 60)


def test_a_stop_under_load_tells_everybody(new_live: Callable[..., Live]) -> None:
    live, seen = new_live({"delay": 0.01, "serve": {"slots": 4, "queue": 8, "shutdown_grace": 20.0}}), Counter[str]()
    asyncio.run(crowd(live, seen))
    assert live.process.wait(60) == 0
    assert set(seen) <= {"200", "429", "503", "cut off"}
    assert seen["503"] > 0, "who comes while the server stops is told so"
    # Between the last look at the door and its shutting the system may take in one more.
    assert seen["cut off"] <= 1, seen
    assert "Traceback" not in "".join(live.said)
