"""Generation speed on a GPU, compared with transformers' `generate` in the same run.

    python bench/generate_gpu.py sampling
    python bench/generate_gpu.py [new tokens] [texts] [alone] [server] [tiny] [llama]

GPT-2 124M, or a Llama of that size, with random weights, bf16, prompts of 128 tokens, 256 new tokens.

sampling only ours, GPT-2 and Llama: greedy, and sampled with four sets of rules, one text and 64; the fraction of the
         greedy rate, and whether the GPU's texts are those of the CPU's formulas
texts    one and 64 texts, greedy and sampled, compared with transformers' default cache and its compiled static cache;
         time to the first token
alone    the same without transformers
server   64 requests through the scheduler, and 64 clients of `textmill serve` that send request after request, for
         complete, streamed and constrained texts
tiny     a small net, also on the CPU, to test the script

The default is both.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode_step import open_random_generator
from generate import Ids, compare, new_tokenizer, open_both, our_tokens, random_prompts, their_tokens
from load_server import serving, write_model
from serve_rate import measure_scheduler

from textmill.config import SIZES, ModelConfig, SampleConfig
from textmill.generation import sampling
from textmill.generation.generator import Generator
from textmill.models import open_family

PROMPT = 128
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}
SAME_STEPS = 20
LONG_LIST = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
KINDS: dict[str, dict[str, Any]] = {
    "complete texts": {},
    "streamed": {"stream": True},
    "constrained by a regex": {"regex": "[a-z ]{4000}"},
    "constrained by a JSON schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LONG_LIST}}
    },
}
"""Fields of the requests to a server; constrained texts are longer than any that is measured."""


def main() -> None:
    """Run all measurements."""
    arguments = sys.argv[1:]
    tiny, cuda = "tiny" in arguments, torch.cuda.is_available()
    if not cuda and not tiny:
        print("no CUDA device: nothing is measured (add 'tiny' to test the script on the CPU)")
        return
    new = next((int(one) for one in arguments if one.isdigit()), 8 if tiny else 256)
    device = torch.device("cuda" if cuda else "cpu")
    if "sampling" in arguments:
        measure_sampling(new, cuda)
        return
    family = next((one for one in arguments if one in SIZES), "gpt2")
    ours, theirs = open_both(device, torch.bfloat16 if cuda else torch.float32, tiny, family)
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, {new} new tokens")
    for part in [one for one in arguments if one in ("texts", "server")] or ["texts", "server"]:
        if part == "texts":
            measure_texts(ours, None if "alone" in arguments else theirs, new, cuda)
        else:
            measure_server(ours, new, tiny, family)


def measure_texts(ours: Generator, theirs: Any, new: int, cuda: bool) -> None:
    """Compare both generators; only measure ours if there is no other."""
    for batch in (1, 64):
        methods: dict[str, Any] = {
            "textmill, greedy": lambda ids: our_tokens(ours, ids, new),
            "textmill, sampled": lambda ids: our_tokens(ours, ids, new, temperature=0.8, top_k=50),
        }
        if theirs is not None:
            methods["transformers"] = lambda ids: their_tokens(theirs, ids, new)
        if theirs is not None and cuda:
            methods["transformers, static compiled"] = lambda ids: their_tokens(
                theirs, ids, new, cache_implementation="static"
            )
        compare(random_prompts(batch, PROMPT), new, methods)
        print(f"  batch {batch:>3}  first token after {first_token(ours, random_prompts(batch, PROMPT)) * 1e3:.1f} ms")


def measure_sampling(new: int, cuda: bool) -> None:
    """Compare sampled with greedy texts of both families, without another program."""
    print(torch.cuda.get_device_name() if cuda else "CPU, two small layers", f"torch {torch.__version__}, {new} tokens")
    for family in ("gpt2", "llama"):
        generator = open_random_generator(cuda, family)
        for batch in (1, 64):
            prompts = [[id_ % generator.tokenizer.vocab for id_ in ids] for ids in random_prompts(batch, PROMPT)]
            methods = {name: partial(our_tokens, generator, new=new, **settings) for name, settings in SAMPLED.items()}
            print(family)
            rates = compare(prompts, new, methods)
            for name, rate in rates.items():
                print(f"  {family} batch {batch:>3}  {name:<28}{rate / rates['greedy']:.3f} of greedy", flush=True)
        check_kernels(generator)


def check_kernels(generator: Generator) -> None:
    """Print how many ids the kernels and torch's operations choose alike, for each set of rules."""
    rows, vocab = 1000, generator.tokenizer.vocab
    dice = torch.Generator(generator.device).manual_seed(1)
    logits_NV = 3 * torch.randn(rows, vocab, generator=dice, device=generator.device)
    for name, settings in SAMPLED.items():
        samples = [SampleConfig(seed=seed, **{"temperature": 0.0, **settings}) for seed in range(rows)]
        states = [sampling.SamplingState(sample, ()) for sample in samples]
        rules = sampling.collect_rules(states, generator.device)
        equal = 0
        for step in range(SAME_STEPS):
            for state in states:
                state.new_tokens = step
            found_N = sampling.choose_next_ids(logits_NV, states, rules)
            equal += int((found_N == _by_torch(logits_NV, states, rules)).sum())
        print(f"  {name:<28}{equal:,} of {rows * SAME_STEPS:,} ids are those of torch's operations", flush=True)


def _by_torch(logits_NV: Any, states: Any, rules: Any) -> Any:
    with patch.object(sampling, "can_run_kernels", lambda _: False):
        return sampling.choose_next_ids(logits_NV, states, rules)


def measure_server(ours: Generator, new: int, tiny: bool, family: str) -> None:
    """Measure the generator alone, through the scheduler and through HTTP."""
    alone = compare(random_prompts(64, PROMPT), new, {"textmill, greedy": lambda ids: our_tokens(ours, ids, new)})[
        "textmill, greedy"
    ]
    print(
        f"  64 requests through the scheduler: {measure_scheduler(ours, random_prompts(64, PROMPT), new):,.0f} tokens/s"
    )
    for kind, rate in measure_clients(new, tiny, family).items():
        print(
            f"  64 clients of the server, {kind}: {rate:,.0f} tokens/s, {rate / alone:.2f} of the generator", flush=True
        )


def first_token(generator: Generator, prompts: Ids) -> float:
    """Return the seconds until every text has its first token; the better of two runs."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        our_tokens(generator, prompts, 1)
        times.append(time.perf_counter() - started)
    return min(times)


async def run_clients(port: int, bodies: list[bytes], seconds: float) -> float:
    """Return the texts/s of clients that each send their body again and again over one connection.

    Replies are counted for `seconds`, after a warm-up of a quarter of that.
    """
    started = time.perf_counter() + seconds / 4
    replies = 0

    async def client(body: bytes) -> None:
        nonlocal replies
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        while time.perf_counter() < started + seconds:
            writer.write(head.encode() + body)
            reply_head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert " 200 " in reply_head.splitlines()[0], reply_head
            size = re.search(r"content-length: (\d+)", reply_head)
            await (reader.readexactly(int(size[1])) if size else reader.readuntil(b"\r\n0\r\n\r\n"))
            replies += started <= time.perf_counter() < started + seconds
        writer.close()

    await asyncio.gather(*map(client, bodies))
    return replies / seconds


def measure_clients(new: int, tiny: bool, family: str) -> dict[str, float]:
    """Return the tokens/s of 64 clients of a server, for each kind of request."""
    rates, seconds = {}, 2.0 if tiny else 5.0
    with tempfile.TemporaryDirectory() as folder:
        root, tokenizer = Path(folder), new_tokenizer()
        size = ModelConfig(family=family, size="nano" if tiny else "small")
        shape: Any = open_family(family).shape_of(size, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id, length=1024)
        where = write_model(root, shape, tokenizer)
        started, before = time.perf_counter(), _used_memory()
        with serving(root, [str(where), "serve.slots=64", "serve.queue=64"]) as (port, _):
            ready, used = time.perf_counter() - started, _used_memory() - before
            print(f"  the server is ready after {ready:.1f} s and uses {used:.1f} GiB", flush=True)
            for kind, given in KINDS.items():
                options = {"max_tokens": new, "min_tokens": new, "temperature": 0, **given}
                bodies = [json.dumps({"prompt": ids, **options}).encode() for ids in random_prompts(64, PROMPT)]
                rates[kind] = new * asyncio.run(run_clients(port, bodies, seconds))
    return rates


def _used_memory() -> float:
    """Return the GPU memory used by all processes, in GiB."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (total - free) / 2**30


if __name__ == "__main__":
    main()
