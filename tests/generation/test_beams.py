"""Beam search finds the same texts as transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.config import SampleConfig
from textmill.generation.generator import Generator
from textmill.generation.requests import Done, Request

WORDS = (
    "the mill stands by a river 물레방아는 강가에 서 있다 Değirmen köprünün üstünde döner wheel turns 漢字 🎡 slowly"
).split()


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder).eval()


def expected_ids(theirs: Any, ids: list[int], sample: SampleConfig, end: int) -> list[int]:
    """Return the new tokens of the best beam by transformers, without the end token."""
    return expected_beams(theirs, ids, sample, end)[0]


def expected_beams(theirs: Any, ids: list[int], sample: SampleConfig, end: int) -> list[list[int]]:
    """Return the new tokens of the `sample.count` best beams by transformers, without the end token."""
    options = {
        "num_beams": sample.beams,
        "max_new_tokens": sample.max_tokens,
        "do_sample": False,
        "min_new_tokens": sample.min_tokens,
        "repetition_penalty": sample.repetition_penalty,
        "pad_token_id": end,
        "eos_token_id": end,
        "num_return_sequences": sample.count,
    }
    start = torch.tensor([ids])
    found: list[list[int]] = theirs.generate(start, attention_mask=torch.ones_like(start), **options)[
        :, len(ids) :
    ].tolist()
    return [one[: one.index(end)] if end in one else one for one in found]


@pytest.mark.parametrize("number", range(12))
def test_best_beam_equals_transformers(generator: Generator, theirs: Any, number: int) -> None:
    dice = random.Random(number)
    tokenizer = generator.tokenizer
    sample = SampleConfig(
        beams=dice.choice([2, 3, 5]),
        max_tokens=dice.choice([8, 20]),
        min_tokens=dice.choice([0, 0, 4]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
    )
    prompt = " ".join(dice.choices(WORDS, k=dice.randint(1, 5)))
    ids = tokenizer.encode(prompt)
    # An end of text that these weights like: some beams must end early for the search to have a choice.
    end = dice.choice(expected_ids(theirs, ids, sample, tokenizer.eos_id))
    wanted = expected_ids(theirs, ids, sample, end)
    other = Generator(generator.net, type(tokenizer)(tokenizer.inner, end, tokenizer.roles))
    [(_, done)] = other.run([Request(tuple(ids), sample)], 1)
    assert isinstance(done, Done)
    assert done.tokens == len(wanted)
    assert tokenizer.decode([*ids, *wanted]) == tokenizer.decode(ids) + done.text


@pytest.mark.parametrize("prompt", ["The mill", "물레방아는", "Değirmen"])
def test_several_beams_equal_transformers(generator: Generator, theirs: Any, prompt: str) -> None:
    sample, tokenizer = SampleConfig(beams=4, count=3, max_tokens=12), generator.tokenizer
    ids = tokenizer.encode(prompt)
    wanted = expected_beams(theirs, ids, sample, tokenizer.eos_id)
    texts = [one.text for one in generator.samples([prompt], sample, sample.count)]
    assert [prompt + text for text in texts] == [tokenizer.decode([*ids, *one]) for one in wanted]
    assert len(set(texts)) == 3


def test_beam_search_can_end_early(generator: Generator, theirs: Any) -> None:
    """Without this, the test above would not cover beams that end before the limit."""
    ids, sample = generator.tokenizer.encode("The mill"), SampleConfig(beams=3, max_tokens=20)
    liked = set(expected_ids(theirs, ids, sample, generator.tokenizer.eos_id))
    assert min(len(expected_ids(theirs, ids, sample, end)) for end in liked) < 20


def test_beam_search_stops_at_the_end_of_the_context(generator: Generator) -> None:
    ids = tuple(generator.tokenizer.encode("The mill stands" * 20)[:92])
    [(_, done)] = generator.run([Request(ids, SampleConfig(beams=2, max_tokens=50))], 1)
    assert isinstance(done, Done)
    assert done.tokens <= 4


def test_stop_string_cuts_the_best_beam(generator: Generator) -> None:
    full = generator.sample("The mill", SampleConfig(beams=3, max_tokens=20)).text
    stop = full[3:5]
    cut = generator.sample("The mill", SampleConfig(beams=3, max_tokens=20, stop=[stop])).text
    assert cut == full[: full.index(stop)]
