"""Throughput of `textmill serve` compared with its scheduler, and the CPU time of the HTTP process per request.

    python bench/serve_rate.py [clients] [new tokens]

A very small net: 64 requests of 128 ids and 256 new tokens through the scheduler alone, then as many clients of
`textmill serve` with four requests each, for complete and for streamed texts. Prints tokens/s, and the CPU time of the
HTTP process per request and per stream event. Clients, HTTP process and model need three cores; with fewer, rates drop.
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
from textmill.models.gpt2 import family as gpt2

PROMPT, ROUNDS = 128, 4


def main() -> None:
    """Measure the scheduler alone, then the server."""
    clients, new = ([int(one) for one in sys.argv[1:]] + [64, 256][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        root, tokenizer = Path(folder), small_tokenizer()
        shape = gpt2.Shape(
            layers=1, heads=2, width=32, inner=64, positions=1024, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
        )
        where, dice = write_model(root, shape, tokenizer), random.Random(1)
        prompts = [[dice.randrange(tokenizer.vocab) for _ in range(PROMPT)] for _ in range(clients)]
        checkpoint = open_checkpoint(next((root / "run").glob("step-*")))
        alone = measure_scheduler(open_generator(checkpoint, TorchEngine(device="cpu")), prompts, new)
        size = f"{clients} requests of {PROMPT} ids and {new} new tokens"
        print(f"{size}, through the scheduler alone: {alone:,.0f} tokens/s", flush=True)
        with serving(root, [str(where), f"serve.slots={clients}", "serve.queue=64", "engine.device=cpu"]) as (
            port,
            pid,
        ):
            for streamed in (False, True):
                seconds, used, events = asyncio.run(measure_server(port, pid, prompts, new, streamed))
                rate, requests = clients * ROUNDS * new / seconds, clients * ROUNDS
                kind = f"streamed in {events / requests:.0f} events per text" if streamed else "complete texts"
                each = f", {used / events * 1e6:.0f} us per event" if streamed else ""
                cost = f"HTTP process {used / requests * 1e3:.2f} ms per request{each}"
                print(
                    f"{clients} clients, {kind}: {rate:,.0f} tokens/s, {rate / alone:.2f} of that; {cost}", flush=True
                )


def measure_scheduler(generator: Generator, prompts: list[list[int]], new: int) -> float:
    """Return the tokens/s of requests submitted at once, in the second of two rounds."""
    scheduler = Scheduler(generator, slots=len(prompts), queue=len(prompts))
    requests = [Request(tuple(ids), SampleConfig(max_tokens=new, min_tokens=new, temperature=0)) for ids in prompts]
    for _ in range(2):
        ended, started = threading.Semaphore(0), time.perf_counter()

        def deliver(event: Token | Done, ended: threading.Semaphore = ended) -> None:
            if isinstance(event, Done):
                ended.release()

        for request in requests:
            scheduler.submit(request, deliver)
        for _ in requests:
            ended.acquire()
        seconds = time.perf_counter() - started
    scheduler.close(0)
    return len(prompts) * new / seconds


async def measure_server(
    port: int, pid: int, prompts: list[list[int]], new: int, streamed: bool
) -> tuple[float, float, int]:
    """Return wall-clock seconds, CPU seconds of the HTTP process, and the number of events; after a warm-up round."""
    options, events = {"max_tokens": new, "min_tokens": new, "temperature": 0, "stream": streamed}, 0

    async def client(ids: list[int], times: int) -> None:
        nonlocal events
        for _ in range(times):
            head, body = await call(port, "POST", "/v1/completions", json.dumps({"prompt": ids, **options}).encode())
            assert " 200 " in head.splitlines()[0], head
            events += body.count("data: ")

    for times in (1, ROUNDS):
        events, started, used = 0, time.perf_counter(), cpu_seconds(pid)
        await asyncio.gather(*(client(ids, times) for ids in prompts))
    return time.perf_counter() - started, cpu_seconds(pid) - used, events


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
