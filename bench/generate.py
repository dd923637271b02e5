"""How fast texts are continued on the CPU, against transformers' `generate` on the same weights in the same run.

    python bench/generate.py [new tokens] [tiny]

GPT-2 of 124M with random weights, fp32, greedy, prompts of 32 tokens, one text and sixteen; prints tokens a second of both, the ratio,
and how many of the new tokens are the same. `tiny` takes a net of two small layers, to try the script itself.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from textmill.config import SampleConfig
from textmill.generation.generator import Generator
from textmill.generation.requests import Request, Token
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

PROMPT, ROUNDS = 32, 3
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64}
Ids = list[list[int]]


def main() -> None:
    """One text and sixteen, both ways in turn."""
    words = sys.argv[1:]
    new = next((int(word) for word in words if word.isdigit()), 24)
    ours, theirs = open_both(torch.device("cpu"), torch.float32, "tiny" in words)
    print(
        f"prompts of {PROMPT} tokens, {new} new ones, fp32, {torch.get_num_threads()} threads, the middle of {ROUNDS} rounds"
    )
    for batch in (1, 16):
        compare(
            prompts_of(batch, PROMPT),
            new,
            {
                "textmill": lambda ids: our_tokens(ours, ids, new),
                "transformers": lambda ids: their_tokens(theirs, ids, new),
            },
        )


def open_both(device: torch.device, dtype: torch.dtype, tiny: bool) -> tuple[Generator, Any]:
    """The same random weights twice, as a generator of ours and as transformers' model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config(**(TINY if tiny else {}))).save_pretrained(folder)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        net: Any = open_net(Path(folder), device)
    return Generator(net.to(dtype), new_tokenizer()), theirs


def new_tokenizer() -> TextTokenizer:
    """A vocabulary of GPT-2's size whose tokens are one byte or two; ids go in and text comes out, as with the real one."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*signs, *(first + second for first in signs for second in signs)][:50256]
    inner = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner, inner.token_to_id("<|endoftext|>"))


def our_tokens(generator: Generator, prompts: Ids, new: int, **settings: Any) -> Ids:
    """The new tokens of each prompt, all of them in slots at once, their text made on the way."""
    sample = SampleConfig(temperature=0, max_tokens=new, min_tokens=new).model_copy(update=settings)
    found: Ids = [[] for _ in prompts]
    for place, event in generator.run([Request(tuple(ids), sample) for ids in prompts], len(prompts)):
        if isinstance(event, Token):
            found[place].append(event.id)
    return found


def their_tokens(model: Any, prompts: Ids, new: int, **settings: Any) -> Ids:
    """The same by transformers, without text."""
    ids = torch.tensor(prompts, device=model.device)
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 50256, **settings}
    found: Ids = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[:, ids.shape[1] :].tolist()
    return found


def prompts_of(batch: int, length: int) -> Ids:
    """Prompts of one length, which transformers needs no padding for."""
    dice = random.Random(batch)
    return [[dice.randrange(50000) for _ in range(length)] for _ in range(batch)]


def compare(prompts: Ids, new: int, ways: dict[str, Callable[[Ids], Ids]], rounds: int = ROUNDS) -> dict[str, float]:
    """Tokens a second of each way, in turn, after a round to warm up; the first is the one that the others are held against."""
    batch, seconds = len(prompts), {name: [] for name in ways}
    found: dict[str, Ids] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            found[name] = way(prompts)
            if number:
                seconds[name].append(time.perf_counter() - begun)
    rates = {name: batch * new / statistics.median(times) for name, times in seconds.items()}
    first = next(iter(ways))
    for name, rate in rates.items():
        told = (
            ""
            if name == first
            else f"; {first} is {rates[first] / rate:.2f} times as fast, {same(found[first], found[name]):.1%} tokens the same"
        )
        print(f"  batch {batch:>3}  {name:<28}{rate:>10,.1f} tokens/s{told}", flush=True)
    return rates


def same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first that differs: after it two texts have nothing to do with one another."""
    equal = 0
    for one, other in zip(ours, theirs, strict=True):
        equal += next(
            (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
            min(len(one), len(other)),
        )
    return equal / sum(map(len, ours))


if __name__ == "__main__":
    main()
