"""Overload test: at ten times its capacity, a server must bound its queue, reject with 429, and not slow down or grow.

    python bench/load_server.py [WHERE] [--seconds 60] [--slots 8] [--queue 16] [--tokens 32] [--times 10]

Without WHERE it uses a small model with random weights. The server runs as `textmill serve`; this process is the load:
first one client per slot, each sending request after request, to measure the capacity; then ten times that rate.
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

from textmill.checkpoints.writing import Snapshot, plan_files, write_checkpoint
from textmill.config import TokenizerConfig
from textmill.models import Shape, initial_weights, open_family
from textmill.models.gpt2 import family as gpt2
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "serve"]
CAPACITY_SECONDS = 8.0
"""Time to measure the capacity."""


@dataclass
class Results:
    """What was observed under load."""

    statuses: Counter[str] = field(default_factory=Counter)
    accepted: list[tuple[float, float]] = field(default_factory=list)
    """When an accepted request was sent, and how long it took."""
    rejected: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    """Rejections without Retry-After."""
    waiting: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def small_tokenizer() -> TextTokenizer:
    """Return an English tokenizer with 2,000 tokens."""
    text = (Path(gpt2.__file__).parents[2] / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    return fit(iter([[text[:200_000]]]), TokenizerConfig(vocab=2000))


def small_model(root: Path) -> Path:
    """Write a small model with random weights; return its config file."""
    tokenizer = small_tokenizer()
    shape = gpt2.Shape(
        layers=4, heads=4, width=128, inner=512, positions=512, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    return write_model(root, shape, tokenizer)


def write_model(root: Path, shape: Shape, tokenizer: TextTokenizer) -> Path:
    """Write a model with random weights; return its config file."""
    texts = {
        "config.json": json.dumps(open_family(shape.family).hf_config_of(shape)),
        **tokenizer.files(shape.positions),
    }
    files = {name: text.encode() for name, text in texts.items()}
    weights = list(initial_weights(shape, 1))
    file_plans = plan_files("model", weights)[0], plan_files("optimizer", [])[0]
    write_checkpoint(root / "run", Snapshot(1, weights, [], {"step": 1}, files, file_plans))
    (root / "model.yaml").write_text("folder: .\n", encoding="utf-8")
    return root / "model.yaml"


@contextmanager
def serving(root: Path, arguments: list[str]) -> Iterator[tuple[int, int]]:
    """Run `textmill serve`; yield its port and process id. At the end it must stop without a traceback."""
    with open(root / "log", "w") as log:
        server = subprocess.Popen([*COMMAND, *arguments, "serve.port=0"], stdout=subprocess.PIPE, stderr=log, text=True)
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


def memory_mb(pid: int) -> float:
    """Return a process's resident memory in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1000  # type: ignore[index]


def child_processes(pid: int) -> list[int]:
    """Return a process's children: the model process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # a thread may have started it
    return [int(one) for path in lists for one in path.read_text().split()]


async def call(port: int, method: str, path: str, body: bytes = b"") -> tuple[str, str]:
    """Send a request; return head and body of the reply. A client library would use more CPU than the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + body)
    got = (await reader.read(-1)).decode()
    writer.close()
    return got.partition("\r\n\r\n")[0].lower(), got.partition("\r\n\r\n")[2]


async def send_request(port: int, tokens: int, results: Results) -> None:
    """Send one generation request and record the result."""
    body = {"prompt": "The king of the", "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0}
    started = time.monotonic()
    try:
        head, _ = await call(port, "POST", "/v1/completions", json.dumps(body).encode())
    except OSError as error:
        results.statuses[type(error).__name__] += 1
        return
    status = head[9:12]
    results.statuses[status] += 1
    if status == "200":
        results.accepted.append((started, time.monotonic() - started))
    elif status == "429":
        results.rejected.append(time.monotonic() - started)
        results.without_retry_after += "retry-after: " not in head


async def measure_capacity(port: int, slots: int, tokens: int) -> float:
    """Return the requests/s that the server can answer."""
    await asyncio.gather(*(send_request(port, tokens, Results()) for _ in range(slots)))
    results, end, started = Results(), time.monotonic() + CAPACITY_SECONDS, time.monotonic()

    async def send_repeatedly() -> None:
        while time.monotonic() < end:
            await send_request(port, tokens, results)

    await asyncio.gather(*(send_repeatedly() for _ in range(slots)))
    return len(results.accepted) / (time.monotonic() - started)


async def monitor(port: int, pid: int, results: Results) -> None:
    """Record memory and queue every half second."""
    while True:
        results.memory.append(sum(map(memory_mb, [pid, *child_processes(pid)])))
        lines = (await call(port, "GET", "/metrics"))[1].splitlines()
        metrics = dict(line.split() for line in lines if not line.startswith("#") and "{" not in line)
        results.waiting.append(float(metrics["textmill_waiting"]))
        results.active.append(float(metrics["textmill_active"]))
        await asyncio.sleep(0.5)


async def load(port: int, pid: int, arguments: argparse.Namespace) -> tuple[float, Results]:
    """Measure the capacity, then apply a multiple of it as load."""
    capacity = await measure_capacity(port, arguments.slots, arguments.tokens)
    results, tasks = Results(), set[asyncio.Task[None]]()
    monitoring = asyncio.create_task(monitor(port, pid, results))
    started, sent = time.monotonic(), 0
    while (now := time.monotonic() - started) < arguments.seconds:
        while sent < now * capacity * arguments.times:
            sent += 1
            task = asyncio.create_task(send_request(port, arguments.tokens, results))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    monitoring.cancel()
    last = (await call(port, "GET", "/metrics"))[1]
    assert "\ntextmill_active 0\n" in last, f"slots leaked: {last}"
    return capacity, results


def format_results(results: Results, capacity: float, arguments: argparse.Namespace) -> str:
    """Return the results as text."""
    results.accepted.sort()
    half = len(results.accepted) // 2
    times = [[seconds for _, seconds in part] for part in (results.accepted[:half], results.accepted[half:])]
    middle = [f"{statistics.median(part):.2f} s, 95% {sorted(part)[int(len(part) * 0.95)]:.2f} s" for part in times]
    quarter, count = max(len(results.memory) // 4, 1), sum(results.statuses.values())
    memory = [statistics.mean(part) for part in (results.memory[:quarter], results.memory[-quarter:])]
    return "\n".join(
        [
            f"capacity {capacity:.1f} requests/s of {arguments.tokens} tokens, {arguments.slots} slots, "
            f"queue {arguments.queue}",
            f"load {arguments.times} times that for {arguments.seconds} s: {count:,} requests, "
            f"replies {dict(results.statuses)}",
            f"accepted {len(results.accepted) / arguments.seconds:.1f} requests/s; "
            f"429 without Retry-After: {results.without_retry_after}",
            f"waiting at most {max(results.waiting):.0f}, running at most {max(results.active):.0f}",
            f"accepted requests took: first half median {middle[0]}; second half median {middle[1]}",
            f"rejections took: median {statistics.median(results.rejected or [0]) * 1000:.0f} ms",
            f"memory: first quarter {memory[0]:.0f} MB, last quarter {memory[1]:.0f} MB",
        ]
    )


def main() -> None:
    """Run the server under load and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", nargs="?")
    for name, value in (("seconds", 60), ("slots", 8), ("queue", 16), ("tokens", 32), ("times", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        where = arguments.where or str(small_model(Path(root)))
        with serving(Path(root), [where, f"serve.slots={arguments.slots}", f"serve.queue={arguments.queue}"]) as (
            port,
            pid,
        ):
            capacity, results = asyncio.run(load(port, pid, arguments))
            print(format_results(results, capacity, arguments))


if __name__ == "__main__":
    main()
