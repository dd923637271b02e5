"""Shows where the time of a decoding step goes.

    python bench/decode_step.py [sampled] [tiny] [llama]

On a GPU: GPT-2 124M, or a Llama of that size, with random weights, bf16, prompts of 128 tokens, one text and 64. Prints
the kernels of a step with count and time, their sum, the time of a step, the fraction of it without a kernel, and the
CPU time of the host.

sampled  use temperature 0.8 and top_k 50 instead of greedy decoding
tiny     a net of two layers, width 64 and 512 tokens on the CPU, where host work dominates; the default without a GPU
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import torch
from generate import new_tokenizer, random_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from textmill.config import SIZES, ModelConfig, SampleConfig, ShapeConfig
from textmill.generation.batch import RunningBatch
from textmill.generation.generator import Generator
from textmill.generation.requests import Request
from textmill.models import initial_weights, open_family
from textmill.models.nets_torch import fill, new_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

PROMPT, STEPS, ROUNDS = 128, 100, 3


def main() -> None:
    """Measure one text and 64."""
    sampled, cuda = "sampled" in sys.argv, torch.cuda.is_available() and "tiny" not in sys.argv
    family = next((one for one in sys.argv if one in SIZES), "gpt2")
    generator = open_random_generator(cuda, family)
    device = torch.cuda.get_device_name() if cuda else "CPU, two small layers"
    print(f"{family} on {device}, torch {torch.__version__}, {'sampled' if sampled else 'greedy'}")
    for count in (1, 64):
        batch = new_batch(generator, count, sampled)
        for _ in range(5):
            batch.step()
        seconds, host = min(step_times(batch, cuda) for _ in range(ROUNDS))
        times = f"{seconds * 1e3:.3f} ms per step, {count / seconds:,.0f} tokens/s, host {host * 1e3:.3f} ms"
        print(f"batch {count:>3}: {times}")
        if cuda:
            print_kernels(batch, seconds)
        else:
            batch.slots.decode = constant_logits(batch)  # type: ignore[method-assign]
            print(f"           without the net {min(step_times(batch, cuda) for _ in range(ROUNDS))[1] * 1e3:.3f} ms")


def open_random_generator(cuda: bool, family: str) -> Generator:
    """Open a net with random weights; without a GPU a tiny one, so that host work dominates."""
    tokenizer = new_tokenizer() if cuda else small_tokenizer()
    model = ModelConfig(family=family, size="small")
    if not cuda:
        model = ModelConfig(family=family, size="nano", shape=ShapeConfig(layers=2, heads=2, width=64, positions=1024))
    shape = open_family(family).shape_of(model, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id, length=1024)
    net = new_net(shape, torch.device("cuda" if cuda else "cpu"))
    fill(net, initial_weights(shape, 1), "random weights")
    return Generator(net.to(torch.bfloat16) if cuda else net, tokenizer)


def small_tokenizer() -> TextTokenizer:
    """Return a tokenizer with 512 tokens of one or two bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(first + second for first in letters[:1] for second in letters)][:511]
    inner = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner, inner.token_to_id("<|endoftext|>"))


def new_batch(generator: Generator, count: int, sampled: bool) -> RunningBatch:
    """Return a batch of texts that do not end."""
    batch, max_new = generator.new_batch(count), generator.positions - PROMPT
    batch.run_ahead = True
    sample = SampleConfig(
        temperature=0.8 if sampled else 0.0, top_k=50 if sampled else 0, max_tokens=max_new, min_tokens=max_new
    )
    for number, ids in enumerate(random_prompts(count, PROMPT)):
        request = Request(tuple(id_ % generator.tokenizer.vocab for id_ in ids), sample)
        batch.add(number, request)
    return batch


def step_times(batch: RunningBatch, cuda: bool) -> tuple[float, float]:
    """Return the wall-clock seconds and the host's CPU seconds of a step."""
    started, busy = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        batch.step()
    host = time.thread_time() - busy
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS, host / STEPS


def constant_logits(batch: RunningBatch) -> Any:
    """Return a decode function that takes no time."""
    logits_NV = torch.randn(len(batch.running), batch.tokenizer.vocab)
    return lambda ids_N, positions: logits_NV


def print_kernels(batch: RunningBatch, seconds: float) -> None:
    """Print the kernels of a step, and the fraction of a step without a kernel."""
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
    total = f"{sum(counts.values()) / STEPS:.0f} kernels and copies per step, {busy / 1e3:.3f} ms in total"
    print(f"           {total}; idle for {max(1 - busy / seconds / 1e6, 0):.0%} of a step")
    for name, microseconds in times.most_common(15):
        print(f"           {microseconds / STEPS:8.1f} us {counts[name] / STEPS:6.1f} times  {name[:110]}")


if __name__ == "__main__":
    main()
