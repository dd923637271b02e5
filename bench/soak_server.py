"""Soak test: clients that join, leave and send nonsense for a long time, while the model process is killed.

    python bench/soak_server.py [--minutes 30] [--clients 32] [--kills 0]

Every client does one thing after another, chosen at random: a complete or a streamed text, a stream that it leaves, a
request that breaks off in the middle, a wrong value, bytes that are no HTTP. Prints the replies by kind and status, and
the memory of both processes in each tenth of the time. Without kills there must be no status of 500 or more; with
kills, 500 and 503 with the message that the model is being restarted. A client that waits for longer than
serve.request_timeout and some seconds counts as "no reply".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from load_server import child_processes, memory_mb, serving, small_model

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PATIENCE = 120.0
KINDS = ("complete", "stream", "leave", "broken off", "wrong value", "no HTTP")
WRONG = ({"top_p": 3}, {"prompt": 5}, {"max_tokens": -1}, {"temprature": 1}, {"stop": [""]}, {"n": 10**9})
KILLED = "the model's process has died"


def write_request(kind: str, dice: random.Random) -> bytes:
    """Return the bytes that a client of this kind sends."""
    if kind == "no HTTP":
        return dice.randbytes(dice.randrange(1, 2000)) + b"\r\n\r\n"
    body = {"prompt": "The king of the", "max_tokens": dice.randrange(1, 40), "stream": kind in ("stream", "leave")}
    if kind == "wrong value":
        body |= dice.choice(WRONG)
    data = json.dumps(body).encode()
    request = f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    return request[: dice.randrange(1, len(request))] if kind == "broken off" else request


async def talk(port: int, kind: str, dice: random.Random) -> str:
    """Do one thing; return the status of the reply, or what happened instead."""
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(write_request(kind, dice))
            if kind == "broken off":
                writer.close()
                return "left"
            if kind == "leave":
                await reader.read(dice.randrange(1, 400))
                writer.close()
                return "left"
            got = await reader.read(-1)
            writer.close()
    except TimeoutError:
        return "no reply"
    except OSError as error:
        return type(error).__name__
    status = got[9:12].decode("ascii", "replace")
    if KILLED.encode() in got:
        return f"{status}, restarting"
    if kind == "stream" and status == "200" and b"data: [DONE]" not in got:
        return "cut off"
    return status or "closed"


async def wait_until_answered(port: int) -> None:
    """Send a request again and again until it gets its text."""
    async with asyncio.timeout(PATIENCE):
        while await talk(port, "complete", random.Random(0)) != "200":
            await asyncio.sleep(0.2)


async def soak(port: int, pid: int, minutes: float, clients: int, kills: int) -> None:
    """Run the clients and print what they saw."""
    end = time.monotonic() + 60 * minutes
    seen = Counter[tuple[str, str]]()

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < end or not killing.done():
            kind = dice.choice(KINDS)
            seen[kind, await talk(port, kind, dice)] += 1

    sizes = ""

    async def watch() -> None:
        nonlocal sizes
        for part in range(10):
            await asyncio.sleep(6 * minutes)
            with suppress(TypeError, OSError):  # a process that was killed has no memory
                sizes = ", ".join(f"{memory_mb(one):.0f} MB" for one in (pid, *child_processes(pid)))
            print(f"after {(part + 1) / 10:.0%}: {sizes}; {sum(seen.values()):,} requests", flush=True)

    async def kill() -> None:
        for _ in range(kills):
            await asyncio.sleep(60 * minutes / (kills + 1))
            while not (children := child_processes(pid)):
                await asyncio.sleep(0.1)
            os.kill(children[0], signal.SIGKILL)
            await asyncio.sleep(0.5)
            await wait_until_answered(port)  # restarts in a row without an answer are limited

    killing = asyncio.create_task(kill())
    await asyncio.gather(watch(), killing, *(client(number) for number in range(clients)))
    for (kind, status), count in sorted(seen.items()):
        print(f"{kind:>12}  {status:<20} {count:,}")
    bad = [status for _, status in seen if status[:1] == "5" and "restarting" not in status]
    print("unexpected:", [*bad, *(status for _, status in seen if status in ("no reply", "cut off"))] or "nothing")
    await wait_until_answered(port)


def main() -> None:
    """Start the server and the clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("minutes", 30), ("clients", 32), ("kills", 0)):
        parser.add_argument(f"--{name}", type=float if name == "minutes" else int, default=value)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        settings = ["engine.device=cpu", "serve.slots=8", "serve.queue=64"]
        with serving(Path(root), [str(small_model(Path(root))), *settings]) as (port, pid):
            asyncio.run(soak(port, pid, arguments.minutes, arguments.clients, arguments.kills))


if __name__ == "__main__":
    main()
