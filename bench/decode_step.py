"""Where the time of a decoding step goes.

    python bench/decode_step.py [drawn] [tiny]

On a GPU: GPT-2 of 124M with random weights, bf16, prompts of 128 tokens, one text and 64; for each the kernels of a step by name with
their number and time, their sum, the time of a whole step, the share of it in which no kernel ran, and what the host alone took. `drawn`
draws with temperature 0.8 and top_k 50 instead of taking the likeliest. Without a GPU, or with `tiny`, a net of two layers and 64 columns
with 512 tokens on the CPU, whose step is little else than what the host does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from generate import TINY, new_tokenizer, prompts_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from textmill.config import SampleConfig
from textmill.generation.batch import Batch
from textmill.generation.generator import Generator
from textmill.generation.requests import Request
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

PROMPT, STEPS, ROUNDS = 128, 100, 3


def main() -> None:
    """One text and 64."""
    drawn, cuda = "drawn" in sys.argv, torch.cuda.is_available() and "tiny" not in sys.argv
    generator = open_generator_of(cuda)
    print(
        f"{torch.cuda.get_device_name() if cuda else 'CPU, two small layers'}, torch {torch.__version__}, {'drawn' if drawn else 'greedy'}"
    )
    for count in (1, 64):
        batch = batch_of(generator, count, drawn)
        for _ in range(5):
            batch.step()
        seconds, host = min(step_times(batch, cuda) for _ in range(ROUNDS))
        print(
            f"batch {count:>3}: {seconds * 1e3:.3f} ms a step, {count / seconds:,.0f} tokens/s; the host's part {host * 1e3:.3f} ms"
        )
        if cuda:
            print_kernels(batch, seconds)
        else:
            batch.slots.decode = constant(batch)  # type: ignore[method-assign]
            print(f"           without the net {min(step_times(batch, cuda) for _ in range(ROUNDS))[1] * 1e3:.3f} ms")


def open_generator_of(cuda: bool) -> Generator:
    """Random weights; without a GPU so few that the host's own work shows."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    device = torch.device("cuda" if cuda else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config(**({} if cuda else {**TINY, "vocab_size": 512}))).save_pretrained(folder)
        net: Any = open_net(Path(folder), device)
    return Generator(net.to(torch.bfloat16) if cuda else net, new_tokenizer() if cuda else small_tokenizer())


def small_tokenizer() -> TextTokenizer:
    """512 tokens of one byte or two."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*signs, *(first + second for first in signs[:1] for second in signs)][:511]
    inner = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner, inner.token_to_id("<|endoftext|>"))


def batch_of(generator: Generator, count: int, drawn: bool) -> Batch:
    """Texts at work that will not end."""
    batch, room = generator.new_batch(count), generator.positions - PROMPT
    batch.run_ahead = True
    sample = SampleConfig(temperature=0.8 if drawn else 0.0, top_k=50 if drawn else 0, max_tokens=room, min_tokens=room)
    for place, ids in enumerate(prompts_of(count, PROMPT)):
        request = Request(tuple(id_ % generator.tokenizer.vocab for id_ in ids), sample)
        batch.add(place, request, generator.max_new_tokens(request))
    return batch


def step_times(batch: Batch, cuda: bool) -> tuple[float, float]:
    """Seconds of a step on the clock, and on the host's processor."""
    begun, busy = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        batch.step()
    host = time.thread_time() - busy
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / STEPS, host / STEPS


def constant(batch: Batch) -> Any:
    """A net that takes no time."""
    scores_NV = torch.randn(len(batch.running), batch.tokenizer.vocab)
    return lambda ids_N, places: scores_NV


def print_kernels(batch: Batch, seconds: float) -> None:
    """The kernels of a step by name, and how much of a step has none."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            batch.step()
        torch.cuda.synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    busy = sum(times.values()) / STEPS
    told = f"{sum(counts.values()) / STEPS:.0f} kernels and copies a step, {busy / 1e3:.3f} ms together"
    print(f"           {told}; nothing runs in {max(1 - busy / seconds / 1e6, 0):.0%} of a step")
    for name, microseconds in times.most_common(15):
        print(f"           {microseconds / STEPS:8.1f} us {counts[name] / STEPS:6.1f} times  {name[:110]}")


if __name__ == "__main__":
    main()
