"""A server under ten times the load it can carry: is the queue bounded, are refusals said, do times and memory stay flat?

    python bench/load_server.py [WHERE] [--seconds 60] [--slots 8] [--queue 16] [--tokens 32] [--times 10]

Without WHERE a small model of random weights is made. The server runs as `textmill serve`, the load comes from this process: first
as many clients as there are slots, one request after the other, to find the capacity; then ten times that rate, whatever is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from textmill.checkpoints.folders import Snapshot, write_checkpoint
from textmill.config import TokenizerConfig
from textmill.models import initial_weights
from textmill.models.gpt2 import facts as gpt2
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "serve"]
WARM = 8.0
"""Seconds of measuring the capacity."""


@dataclass
class Found:
    """What was seen under load."""

    statuses: Counter[str] = field(default_factory=Counter)
    accepted: list[tuple[float, float]] = field(default_factory=list)
    """When an accepted request was sent, and how long it took."""
    refused: list[float] = field(default_factory=list)
    unsaid: int = 0
    """Refusals without Retry-After."""
    waiting: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def small_tokenizer() -> TextTokenizer:
    """A tokenizer of 2,000 pieces of English."""
    text = (Path(gpt2.__file__).parents[2] / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    return fit(iter([[text[:200_000]]]), TokenizerConfig(vocab=2000))


def small_model(root: Path) -> Path:
    """A config whose run holds a small model of random weights."""
    tokenizer = small_tokenizer()
    shape = gpt2.Shape(layers=4, heads=4, width=128, inner=512, positions=512, vocab=tokenizer.vocab, end=tokenizer.end)
    return write_model(root, shape, tokenizer)


def write_model(root: Path, shape: gpt2.Shape, tokenizer: TextTokenizer) -> Path:
    """A config whose run holds a model of random weights."""
    texts = {"config.json": json.dumps(gpt2.hf_config_of(shape)), **tokenizer.files(shape.positions)}
    files = {name: text.encode() for name, text in texts.items()}
    write_checkpoint(root / "run", Snapshot(1, list(initial_weights(shape, 1)), [], {"step": 1}, files))
    (root / "model.yaml").write_text("folder: .\n", encoding="utf-8")
    return root / "model.yaml"


@contextmanager
def serving(root: Path, words: list[str]) -> Iterator[tuple[int, int]]:
    """`textmill serve` with these words: its port and its process number; afterwards it is asked to end, and must without a traceback."""
    with open(root / "log", "w") as log:
        server = subprocess.Popen([*COMMAND, *words, "serve.port=0"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = re.search(r"http://\S+:(\d+)", line)
            assert address, line + (root / "log").read_text()
            yield int(address[1]), server.pid
            server.terminate()
            assert server.wait(60) == 0
            assert "Traceback" not in (root / "log").read_text()
        finally:
            server.kill()


def memory_of(pid: int) -> float:
    """A process's memory in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1000  # type: ignore[index]


def children_of(pid: int) -> list[int]:
    """The processes that a process started: the model's."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def call(port: int, method: str, path: str, body: bytes = b"") -> tuple[str, str]:
    """Head and body of an answer; plain sockets, since a client library would take more of the machine than the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    got = (await reader.read(-1)).decode()
    writer.close()
    return got.partition("\r\n\r\n")[0].lower(), got.partition("\r\n\r\n")[2]


async def ask(port: int, tokens: int, found: Found) -> None:
    """One request for a text, and what came of it."""
    body = {"prompt": "The king said that", "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0}
    begun = time.monotonic()
    try:
        head, _ = await call(port, "POST", "/v1/completions", json.dumps(body).encode())
    except OSError as error:
        found.statuses[type(error).__name__] += 1
        return
    status = head[9:12]
    found.statuses[status] += 1
    if status == "200":
        found.accepted.append((begun, time.monotonic() - begun))
    elif status == "429":
        found.refused.append(time.monotonic() - begun)
        found.unsaid += "retry-after: " not in head


async def capacity_of(port: int, slots: int, tokens: int) -> float:
    """Requests a second that the server carries."""
    await asyncio.gather(*(ask(port, tokens, Found()) for _ in range(slots)))
    found, end, begun = Found(), time.monotonic() + WARM, time.monotonic()

    async def one_after_the_other() -> None:
        while time.monotonic() < end:
            await ask(port, tokens, found)

    await asyncio.gather(*(one_after_the_other() for _ in range(slots)))
    return len(found.accepted) / (time.monotonic() - begun)


async def look(port: int, pid: int, found: Found) -> None:
    while True:
        found.memory.append(sum(map(memory_of, [pid, *children_of(pid)])))
        lines = (await call(port, "GET", "/metrics"))[1].splitlines()
        told = dict(line.split() for line in lines if not line.startswith("#") and "{" not in line)
        found.waiting.append(float(told["textmill_waiting"]))
        found.active.append(float(told["textmill_active"]))
        await asyncio.sleep(0.5)


async def load(port: int, pid: int, asked: argparse.Namespace) -> tuple[float, Found]:
    """The capacity, and what was seen at many times of it."""
    capacity = await capacity_of(port, asked.slots, asked.tokens)
    found, tasks = Found(), set[asyncio.Task[None]]()
    looking = asyncio.create_task(look(port, pid, found))
    begun, sent = time.monotonic(), 0
    while (now := time.monotonic() - begun) < asked.seconds:
        while sent < now * capacity * asked.times:
            sent += 1
            task = asyncio.create_task(ask(port, asked.tokens, found))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    looking.cancel()
    last = (await call(port, "GET", "/metrics"))[1]
    assert "\ntextmill_active 0\n" in last, f"slots leaked: {last}"
    return capacity, found


def told(found: Found, capacity: float, asked: argparse.Namespace) -> str:
    """The figures, a line each."""
    found.accepted.sort()
    half = len(found.accepted) // 2
    times = [[seconds for _, seconds in part] for part in (found.accepted[:half], found.accepted[half:])]
    middle = [f"{statistics.median(part):.2f} s, 95% {sorted(part)[int(len(part) * 0.95)]:.2f} s" for part in times]
    quarter, count = max(len(found.memory) // 4, 1), sum(found.statuses.values())
    memory = [statistics.mean(part) for part in (found.memory[:quarter], found.memory[-quarter:])]
    return "\n".join(
        [
            f"capacity {capacity:.1f} requests/s of {asked.tokens} tokens, {asked.slots} slots, queue {asked.queue}",
            f"load {asked.times} times that for {asked.seconds} s: {count:,} requests, answers {dict(found.statuses)}",
            f"accepted {len(found.accepted) / asked.seconds:.1f} requests/s; 429 without Retry-After: {found.unsaid}",
            f"waiting at most {max(found.waiting):.0f}, at work at most {max(found.active):.0f}",
            f"accepted requests took: first half median {middle[0]}; second half median {middle[1]}",
            f"refusals took: median {statistics.median(found.refused or [0]) * 1000:.0f} ms",
            f"memory: first quarter {memory[0]:.0f} MB, last quarter {memory[1]:.0f} MB",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", nargs="?")
    for name, value in (("seconds", 60), ("slots", 8), ("queue", 16), ("tokens", 32), ("times", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        where = asked.where or str(small_model(Path(root)))
        with serving(Path(root), [where, f"serve.slots={asked.slots}", f"serve.queue={asked.queue}"]) as (port, pid):
            capacity, found = asyncio.run(load(port, pid, asked))
            print(told(found, capacity, asked))


if __name__ == "__main__":
    main()
