"""Sends a server oversized requests, then measures it while hundreds of slow clients hold connections.

    python bench/serve_faults.py [slow clients]

1. Bodies, headers and values far beyond the limits: prints status, time and memory of each.
2. Times of small requests, in turns without and with slow clients (500, in another process). These send their header at
   one byte per second, never complete it, and reconnect when they are closed. Also prints the CPU they cost the server.

The model is small and has random weights.
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

from load_server import COMMAND, call, memory_mb, small_model

REQUESTS, TURNS = 60, 6
"""Small requests per measurement, and measurements without and with slow clients."""
IDLE_SECONDS = 4.0
"""Time to measure the CPU cost without other requests."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def new_request(**fields: object) -> bytes:
    """Return an HTTP request with a JSON body."""
    body = json.dumps({"prompt": "The king", **fields}).encode()
    return HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


LIMITS = {
    "a body of 1 GB, announced": HEAD + b"Content-Length: 1000000000\r\n\r\n",
    "a body of 5 MB in chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"4C4B40\r\n"
    + b"x" * 5_000_000
    + b"\r\n0\r\n\r\n",
    "a header of 1 MB": HEAD + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n",
    "100,000 headers": HEAD + b"".join(b"X-%d: x\r\n" % number for number in range(100_000)) + b"\r\n",
    "n of a billion": new_request(n=10**9),
    "max_tokens below 0": new_request(max_tokens=-1),
    "max_tokens of a trillion": new_request(max_tokens=10**12),
    "a prompt of 3 MB": new_request(prompt="king " * 600_000),
    "a temperature of NaN": new_request(temperature=float("nan")),
    "10,000 stop strings": new_request(stop=["x"] * 10_000),
}


async def get_status(port: int, request: bytes) -> str:
    """Return the reply's status; the server may close the connection while the request is being sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return (await asyncio.wait_for(reader.read(4096), 60))[9:12].decode() or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def small_requests(port: int) -> list[float]:
    """Send small requests one after the other; return their times, sorted."""
    body, times = json.dumps({"prompt": "The king", "max_tokens": 4, "min_tokens": 4}).encode(), []
    for _ in range(REQUESTS):
        started = time.monotonic()
        head, _ = await call(port, "POST", "/v1/completions", body)
        assert head[9:12] == "200", head
        times.append(time.monotonic() - started)
    return sorted(times)


async def send_slowly(port: int, number: int) -> None:
    """Run a client that never completes its header."""
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


async def run_slow_clients(port: int, slow: int) -> None:
    """Run that many slow clients."""
    await asyncio.gather(*(send_slowly(port, number) for number in range(slow)))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_cpu(pid: int) -> float:
    """Return the fraction of a core that a process uses now."""
    before, started = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds(pid) - before) / (time.monotonic() - started)


async def measure(port: int, pid: int, slow: int) -> None:
    """Run all measurements and print the results."""
    await small_requests(port)
    for name, request in LIMITS.items():
        before, started = memory_mb(pid), time.monotonic()
        status = await get_status(port, request)
        print(
            f"{name:<34}{status:>8}{(time.monotonic() - started) * 1e3:>9.0f} ms{memory_mb(pid) - before:>+8.1f} MB",
            flush=True,
        )
    alone, with_slow, costs = list[float](), list[float](), [await measure_cpu(pid)]
    for _ in range(TURNS):
        alone += await small_requests(port)
        slow_process = subprocess.Popen([sys.executable, __file__, "hold", str(port), str(slow)])
        try:
            await asyncio.sleep(3)
            with_slow += await small_requests(port)
            costs.append(await measure_cpu(pid))
        finally:
            slow_process.kill()
            slow_process.wait()
    for name, times in (("alone", sorted(alone)), (f"with {slow} slow clients", sorted(with_slow))):
        median, high = statistics.median(times), times[int(len(times) * 0.99)]
        print(f"small requests {name}: median {median * 1e3:.0f} ms, 99% {high * 1e3:.0f} ms")
    idle, held = costs[0], statistics.median(costs[1:])
    print(f"the server uses {idle:.1%} of a core when idle, {held:.1%} with {slow} slow clients")


def main() -> None:
    """Start a server and measure it."""
    if sys.argv[1:2] == ["hold"]:
        asyncio.run(run_slow_clients(int(sys.argv[2]), int(sys.argv[3])))
    slow = next((int(one) for one in sys.argv[1:] if one.isdigit()), 500)
    with tempfile.TemporaryDirectory() as root, open(Path(root) / "log", "w") as log:
        arguments = [str(small_model(Path(root))), "serve.port=0"]
        server = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
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
