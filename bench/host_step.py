"""Host time of a decoding step, without the net: a GPU is idle while it waits for the host.

    python bench/host_step.py [texts=64] [steps=400]

Logits and sampling are replaced by constants; all other work is real: slots, decoding to text, events, the scheduler
and its chunks. Prints microseconds per step of the batch alone, and of the scheduler with complete and streamed texts.
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
from textmill.generation.requests import Request, TextChunk
from textmill.generation.scheduler import Scheduler
from textmill.generation.worker import ChunkCollector
from textmill.models.gpt2 import family as gpt2

PROMPT = 128


def random_requests(count: int, steps: int, vocab: int) -> list[Request]:
    """Return requests with random prompts."""
    dice, sample = random.Random(1), SampleConfig(max_tokens=steps, min_tokens=steps, temperature=0)
    return [Request(tuple(dice.randrange(vocab) for _ in range(PROMPT)), sample) for _ in range(count)]


def measure_batch(generator: Generator, requests: list[Request], steps: int) -> float:
    """Return the seconds per step of the batch."""
    batch = without_net(generator.new_batch(len(requests)))
    for number, request in enumerate(requests):
        batch.add(number, request, steps)
    batch.step()
    started = time.perf_counter()
    for _ in range(steps - 2):
        batch.step()
    return (time.perf_counter() - started) / (steps - 2)


def measure_scheduler(generator: Generator, requests: list[Request], steps: int, streamed: bool) -> float:
    """Return the seconds per step of the scheduler."""
    scheduler, over = Scheduler(generator, slots=len(requests), queue=0), threading.Semaphore(0)
    without_net(scheduler._batch)

    def deliver(chunk: TextChunk) -> None:
        if chunk.done:
            over.release()

    started = time.perf_counter()
    for request in requests:
        scheduler.submit(request, ChunkCollector(deliver, bool(request.logprobs), streamed))
    for _ in requests:
        over.acquire()
    spent = time.perf_counter() - started
    scheduler.close(0)
    return spent / steps


def without_net(batch: Any) -> Any:
    """Replace the batch's logits by constants."""
    logits = torch.zeros(batch.limit, batch.tokenizer.vocab)
    batch.slots.decode = lambda ids_N, positions: logits[: len(positions)]
    return batch


def main() -> None:
    """Print one line per measurement."""
    given = dict(one.split("=", 1) for one in sys.argv[1:])
    texts, steps = int(given.get("texts", 64)), int(given.get("steps", 400))
    tokenizer = small_tokenizer()
    shape = gpt2.Shape(
        layers=1, heads=2, width=32, inner=64, positions=1024, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, tokenizer)
        generator = open_generator(
            open_checkpoint(next((Path(folder) / "run").glob("step-*"))), TorchEngine(device="cpu")
        )
    ids_N = torch.tensor([id_ for id_ in range(texts + 20) if id_ != tokenizer.eos_id][-texts:])
    batches.choose_next_ids = lambda logits_NV, states, rules: ids_N[: len(states)]
    requests = random_requests(texts, steps, tokenizer.vocab)
    least = min(measure_batch(generator, requests, steps) for _ in range(3))
    print(f"{texts} texts: the batch {1e6 * least:.0f} us per step", flush=True)
    for streamed in (False, True):
        least = min(measure_scheduler(generator, requests, steps, streamed) for _ in range(3))
        print(
            f"  through the scheduler, {'streamed' if streamed else 'complete texts'}: {1e6 * least:.0f} us", flush=True
        )


if __name__ == "__main__":
    main()
