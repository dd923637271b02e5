"""How fast texts are continued on a GPU, against transformers' `generate` in the same run.

    python bench/generate_gpu.py [new tokens] [texts] [server] [tiny]

GPT-2 of 124M with random weights, bf16, prompts of 128 tokens, 256 new ones. `texts`: one and 64 at a time, greedy and drawn, against
transformers with its usual cache and with its static one, compiled; then the time to the first token. `server`: 64 requests through the
scheduler's thread, and 64 clients of `textmill serve` that ask again and again and get their texts in whole and as streams. Both, if
neither is named. Without a GPU there is nothing to measure; `tiny` tries the script itself, on the CPU too.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from generate import Ids, compare, new_tokenizer, open_both, our_tokens, prompts_of, their_tokens
from load_server import serving, write_model
from serve_rate import scheduled

from textmill.config import ModelConfig
from textmill.generation.generator import Generator
from textmill.models.gpt2 import facts as gpt2

PROMPT = 128


def main() -> None:
    """All measurements, one after the other."""
    words = sys.argv[1:]
    tiny, cuda = "tiny" in words, torch.cuda.is_available()
    if not cuda and not tiny:
        print("no CUDA device: nothing is measured (say 'tiny' to try the script on the CPU)")
        return
    new = next((int(word) for word in words if word.isdigit()), 8 if tiny else 256)
    device = torch.device("cuda" if cuda else "cpu")
    ours, theirs = open_both(device, torch.bfloat16 if cuda else torch.float32, tiny)
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, {new} new tokens")
    for part in [word for word in words if word in ("texts", "server")] or ["texts", "server"]:
        measure_texts(ours, theirs, new, cuda) if part == "texts" else measure_server(ours, new, tiny)


def measure_texts(ours: Generator, theirs: Any, new: int, cuda: bool) -> None:
    """Both generators side by side."""
    for batch in (1, 64):
        ways: dict[str, Any] = {
            "textmill, greedy": lambda ids: our_tokens(ours, ids, new),
            "textmill, drawn": lambda ids: our_tokens(ours, ids, new, temperature=0.8, top_k=50),
            "transformers": lambda ids: their_tokens(theirs, ids, new),
        }
        if cuda:
            ways["transformers, static compiled"] = lambda ids: their_tokens(
                theirs, ids, new, cache_implementation="static"
            )
        compare(prompts_of(batch, PROMPT), new, ways)
        print(f"  batch {batch:>3}  first token after {first_token(ours, prompts_of(batch, PROMPT)) * 1e3:.1f} ms")


def measure_server(ours: Generator, new: int, tiny: bool) -> None:
    """The generator alone, then what its rate becomes behind a queue and behind HTTP."""
    alone = compare(prompts_of(64, PROMPT), new, {"textmill, greedy": lambda ids: our_tokens(ours, ids, new)})[
        "textmill, greedy"
    ]
    print(f"  64 requests through the scheduler: {scheduled(ours, prompts_of(64, PROMPT), new):,.0f} tokens/s")
    for streamed, rate in served(new, tiny).items():
        kind = "streamed" if streamed else "whole"
        print(
            f"  64 clients of the server, {kind}: {rate:,.0f} tokens/s, {rate / alone:.2f} of the generator's",
            flush=True,
        )


def first_token(generator: Generator, prompts: Ids) -> float:
    """Seconds until every text has its first token; the better of two."""
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        our_tokens(generator, prompts, 1)
        times.append(time.perf_counter() - begun)
    return min(times)


async def answered(port: int, bodies: list[bytes], seconds: float) -> float:
    """Texts a second that as many clients as there are bodies get, each asking again and again by one connection.

    Counted is what comes in so many seconds after the first few, while all of them are at it.
    """
    begun = time.perf_counter() + seconds / 4
    come = 0

    async def client(body: bytes) -> None:
        nonlocal come
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        while time.perf_counter() < begun + seconds:
            writer.write(head.encode() + body)
            told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert " 200 " in told.splitlines()[0], told
            size = re.search(r"content-length: (\d+)", told)
            await (reader.readexactly(int(size[1])) if size else reader.readuntil(b"\r\n0\r\n\r\n"))
            come += begun <= time.perf_counter() < begun + seconds
        writer.close()

    await asyncio.gather(*map(client, bodies))
    return come / seconds


def served(new: int, tiny: bool) -> dict[bool, float]:
    """Tokens a second of 64 clients that ask a server again and again, their texts in whole and streamed."""
    rates, seconds = {}, 2.0 if tiny else 8.0
    with tempfile.TemporaryDirectory() as folder:
        root, tokenizer = Path(folder), new_tokenizer()
        size = ModelConfig(size="nano" if tiny else "small")
        where = write_model(root, gpt2.shape_of(size, vocab=tokenizer.vocab, end=tokenizer.end, length=1024), tokenizer)
        begun, before = time.perf_counter(), _held()
        with serving(root, [str(where), "serve.slots=64", "serve.queue=64"]) as (port, _):
            print(
                f"  the server listens after {time.perf_counter() - begun:.1f} s and holds {_held() - before:.1f} GiB",
                flush=True,
            )
            for streamed in (False, True):
                told = {"max_tokens": new, "min_tokens": new, "temperature": 0, "stream": streamed}
                bodies = [json.dumps({"prompt": ids, **told}).encode() for ids in prompts_of(64, PROMPT)]
                rates[streamed] = new * asyncio.run(answered(port, bodies, seconds))
    return rates


def _held() -> float:
    """GiB of the card that are taken, by all together."""
    free, whole = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (whole - free) / 2**30


if __name__ == "__main__":
    main()
