"""What a step of many texts costs the host, whatever net there is: a GPU that waits for it stands still.

    python bench/host_step.py [texts=64] [steps=400]

The net's scores and the choice of a token are left out; all else is as it is: places, streams of text, events, the scheduler's turns and
the gathering of parts. Microseconds a step of the batch alone, and through the scheduler with texts in whole and streamed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from load_server import small_tokenizer, write_model

from textmill.checkpoints.folders import open_checkpoint
from textmill.config import SampleConfig, TorchEngine
from textmill.generation import batch as batches
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import Request
from textmill.generation.scheduler import Scheduler
from textmill.generation.text_chunks import ChunkingScheduler, TextChunk
from textmill.models.gpt2 import facts as gpt2

PROMPT = 128


def requests_of(count: int, steps: int, vocab: int) -> list[Request]:
    """Prompts of random ids."""
    dice, sample = random.Random(1), SampleConfig(max_tokens=steps, min_tokens=steps, temperature=0)
    return [Request(tuple(dice.randrange(vocab) for _ in range(PROMPT)), sample) for _ in range(count)]


def alone(generator: Generator, requests: list[Request], steps: int) -> float:
    """Seconds of a step of the batch."""
    batch = without_a_net(generator.new_batch(len(requests)))
    for number, request in enumerate(requests):
        batch.add(number, request, steps)
    batch.step()
    begun = time.perf_counter()
    for _ in range(steps - 2):
        batch.step()
    return (time.perf_counter() - begun) / (steps - 2)


def scheduled(generator: Generator, requests: list[Request], steps: int, streamed: bool) -> float:
    """Seconds of a step through the scheduler."""
    scheduler, over = Scheduler(generator, slots=len(requests), queue=0), threading.Semaphore(0)
    without_a_net(scheduler._batch)

    def deliver(part: TextChunk) -> None:
        if part.done:
            over.release()

    begun = time.perf_counter()
    for request in requests:
        ChunkingScheduler(scheduler).submit(request, deliver, None, streamed)
    for _ in requests:
        over.acquire()
    spent = time.perf_counter() - begun
    scheduler.close(0)
    return spent / steps


def without_a_net(batch: Any) -> Any:
    """The same batch, whose scores cost nothing."""
    scores = torch.zeros(batch.limit, batch.tokenizer.vocab)
    batch.slots.decode = lambda ids_N, places: scores[: len(places)]
    return batch


def main() -> None:
    """A line for each."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    texts, steps = int(given.get("texts", 64)), int(given.get("steps", 400))
    tokenizer = small_tokenizer()
    shape = gpt2.Shape(layers=1, heads=2, width=32, inner=64, positions=1024, vocab=tokenizer.vocab, end=tokenizer.end)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, tokenizer)
        generator = open_generator(
            open_checkpoint(next((Path(folder) / "run").glob("step-*"))), TorchEngine(device="cpu")
        )
    ids_N = torch.tensor([id_ for id_ in range(texts + 20) if id_ != tokenizer.end][-texts:])
    batches.choose_next_ids = lambda scores_NV, states, rules: ids_N[: len(states)]
    requests = requests_of(texts, steps, tokenizer.vocab)
    print(
        f"{texts} texts: the batch {1e6 * min(alone(generator, requests, steps) for _ in range(3)):.0f} us a step",
        flush=True,
    )
    for streamed in (False, True):
        least = min(scheduled(generator, requests, steps, streamed) for _ in range(3))
        print(f"  through the scheduler, {'streamed' if streamed else 'whole'}: {1e6 * least:.0f} us", flush=True)


if __name__ == "__main__":
    main()
