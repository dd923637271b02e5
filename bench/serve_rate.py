"""What `textmill serve` makes of the model's rate, and what a request costs the process that speaks HTTP.

    python bench/serve_rate.py [clients] [new tokens]

A very small net: 64 requests of 128 ids and 256 new tokens through the scheduler alone, then as many clients of `textmill serve`, each of
which asks four times, its texts in whole and as streams. Printed are tokens a second, and the processor time of the process that speaks
HTTP for a request and for an event of a stream. Clients, front and model want three cores; with fewer they take turns, and rates suffer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from load_server import call, serving, small_tokenizer, write_model

from textmill.checkpoints.folders import open_checkpoint
from textmill.config import SampleConfig, TorchEngine
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import Done, Request, Token
from textmill.generation.scheduler import Scheduler
from textmill.models.gpt2 import facts as gpt2

PROMPT, TIMES = 128, 4


def main() -> None:
    """The scheduler alone, then the server."""
    clients, new = ([int(word) for word in sys.argv[1:]] + [64, 256][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        root, tokenizer = Path(folder), small_tokenizer()
        shape = gpt2.Shape(
            layers=1, heads=2, width=32, inner=64, positions=1024, vocab=tokenizer.vocab, end=tokenizer.end
        )
        where, dice = write_model(root, shape, tokenizer), random.Random(1)
        prompts = [[dice.randrange(tokenizer.vocab) for _ in range(PROMPT)] for _ in range(clients)]
        checkpoint = open_checkpoint(next((root / "run").glob("step-*")))
        alone = scheduled(open_generator(checkpoint, TorchEngine(device="cpu")), prompts, new)
        print(
            f"{clients} requests of {PROMPT} ids and {new} new tokens, through the scheduler alone: {alone:,.0f} tokens/s",
            flush=True,
        )
        with serving(root, [str(where), f"serve.slots={clients}", "serve.queue=64", "engine.device=cpu"]) as (
            port,
            pid,
        ):
            for streamed in (False, True):
                seconds, used, events = asyncio.run(served(port, pid, prompts, new, streamed))
                rate, asked = clients * TIMES * new / seconds, clients * TIMES
                kind = f"streamed in {events / asked:.0f} events a text" if streamed else "whole"
                each = f", {used / events * 1e6:.0f} us an event" if streamed else ""
                took = f"the front {used / asked * 1e3:.2f} ms a request{each}"
                print(
                    f"{clients} clients, {kind}: {rate:,.0f} tokens/s, {rate / alone:.2f} of that; {took}", flush=True
                )


def scheduled(generator: Generator, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of requests that all come at once, the second time."""
    scheduler = Scheduler(generator, slots=len(prompts), queue=len(prompts))
    requests = [Request(tuple(ids), SampleConfig(max_tokens=new, min_tokens=new, temperature=0)) for ids in prompts]
    for _ in range(2):
        left, begun = threading.Semaphore(0), time.perf_counter()

        def deliver(event: Token | Done, left: threading.Semaphore = left) -> None:
            if isinstance(event, Done):
                left.release()

        for request in requests:
            scheduler.submit(request, deliver)
        for _ in requests:
            left.acquire()
        seconds = time.perf_counter() - begun
    scheduler.close(0)
    return len(prompts) * new / seconds


async def served(port: int, pid: int, prompts: list[list[int]], new: int, streamed: bool) -> tuple[float, float, int]:
    """Seconds in which every client was answered, the front's processor time, and events that came; after a round to warm up."""
    told, events = {"max_tokens": new, "min_tokens": new, "temperature": 0, "stream": streamed}, 0

    async def client(ids: list[int], times: int) -> None:
        nonlocal events
        for _ in range(times):
            head, body = await call(port, "POST", "/v1/completions", json.dumps({"prompt": ids, **told}).encode())
            assert " 200 " in head.splitlines()[0], head
            events += body.count("data: ")

    for times in (1, TIMES):
        events, begun, used = 0, time.perf_counter(), processor_time(pid)
        await asyncio.gather(*(client(ids, times) for ids in prompts))
    return time.perf_counter() - begun, processor_time(pid) - used, events


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
