"""A server that is asked too much, and one that hundreds of slow clients hold on to.

    python bench/serve_faults.py [slow clients]

Limits first: bodies, headers and values far beyond them, each with the status, the time and the memory that it took. Then the times of
small requests, alone and, turn by turn, while so many clients (500) of another process send their header a byte a second, never end it, and
come again when they are sent away; and what of a processor those cost the server, seen while nothing else is asked. The model is small
and of random weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from load_server import COMMAND, call, memory_of, small_model

ASKED, TURNS = 60, 6
"""Small requests of each measurement, and measurements alone and beside slow clients."""
QUIET = 4.0
"""Seconds in which the slow clients are all that there is."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def told(**fields: object) -> bytes:
    """A request with a body."""
    body = json.dumps({"prompt": "The king", **fields}).encode()
    return HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


LIMITS = {
    "a body of 1 GB, announced": HEAD + b"Content-Length: 1000000000\r\n\r\n",
    "a body of 5 MB in pieces": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"4C4B40\r\n"
    + b"x" * 5_000_000
    + b"\r\n0\r\n\r\n",
    "a header of 1 MB": HEAD + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n",
    "100,000 headers": HEAD + b"".join(b"X-%d: x\r\n" % number for number in range(100_000)) + b"\r\n",
    "n of a billion": told(n=10**9),
    "max_tokens below 0": told(max_tokens=-1),
    "max_tokens of a trillion": told(max_tokens=10**12),
    "a prompt of 3 MB": told(prompt="king " * 600_000),
    "a temperature that is no number": told(temperature=float("nan")),
    "10,000 stop strings": told(stop=["x"] * 10_000),
}


async def status_of(port: int, request: bytes) -> str:
    """What a request is answered with; the server may hang up while it is still being sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return (await asyncio.wait_for(reader.read(4096), 60))[9:12].decode() or "hung up"
    except OSError:
        return "hung up"
    finally:
        writer.close()


async def small_requests(port: int) -> list[float]:
    """Times of small requests, one after the other, sorted."""
    body, times = json.dumps({"prompt": "The king", "max_tokens": 4, "min_tokens": 4}).encode(), []
    for _ in range(ASKED):
        begun = time.monotonic()
        head, _ = await call(port, "POST", "/v1/completions", body)
        assert head[9:12] == "200", head
        times.append(time.monotonic() - begun)
    return sorted(times)


async def hold_on(port: int, number: int) -> None:
    """A client that never ends its header."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(number % 100 / 100)
            for byte in HEAD * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(1)
        except OSError:
            continue
        finally:
            writer.close()


async def hold_all(port: int, slow: int) -> None:
    """So many of them."""
    await asyncio.gather(*(hold_on(port, number) for number in range(slow)))


def work_of(pid: int) -> float:
    """Seconds of a processor that a process has had."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def cost_of(pid: int) -> float:
    """The share of a processor that a process takes now."""
    before, begun = work_of(pid), time.monotonic()
    await asyncio.sleep(QUIET)
    return (work_of(pid) - before) / (time.monotonic() - begun)


async def measure(port: int, pid: int, slow: int) -> None:
    """All of it, a line each."""
    await small_requests(port)
    for name, request in LIMITS.items():
        before, begun = memory_of(pid), time.monotonic()
        status = await status_of(port, request)
        print(
            f"{name:<34}{status:>8}{(time.monotonic() - begun) * 1e3:>9.0f} ms{memory_of(pid) - before:>+8.1f} MB",
            flush=True,
        )
    alone, beside, costs = list[float](), list[float](), [await cost_of(pid)]
    for _ in range(TURNS):
        alone += await small_requests(port)
        holding = subprocess.Popen([sys.executable, __file__, "hold", str(port), str(slow)])
        try:
            await asyncio.sleep(3)
            beside += await small_requests(port)
            costs.append(await cost_of(pid))
        finally:
            holding.kill()
            holding.wait()
    for name, times in (("alone", sorted(alone)), (f"beside {slow} slow clients", sorted(beside))):
        print(
            f"small requests {name}: median {statistics.median(times) * 1e3:.0f} ms, 99% {times[int(len(times) * 0.99)] * 1e3:.0f} ms"
        )
    idle, held = costs[0], statistics.median(costs[1:])
    print(f"the server takes {idle:.1%} of a processor when nobody asks, {held:.1%} with {slow} slow clients")


def main() -> None:
    if sys.argv[1:2] == ["hold"]:
        asyncio.run(hold_all(int(sys.argv[2]), int(sys.argv[3])))
    slow = next((int(word) for word in sys.argv[1:] if word.isdigit()), 500)
    with tempfile.TemporaryDirectory() as root, open(Path(root) / "log", "w") as log:
        words = [str(small_model(Path(root))), "serve.port=0"]
        server = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+:(\d+)", server.stdout.readline())
            assert address, (Path(root) / "log").read_text()
            asyncio.run(measure(int(address[1]), server.pid, slow))
            server.terminate()
            assert server.wait(60) == 0
            assert "Traceback" not in (Path(root) / "log").read_text()
        finally:
            server.kill()


if __name__ == "__main__":
    main()
