"""The prefix cache: texts are the same with and without it, and it stays within its limit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.small_models import write_model
from textmill.checkpoints.folders import Checkpoint
from textmill.config import SampleConfig, TorchEngine
from textmill.generation.batch import PrefixCache
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import Done, Request
from textmill.models.llama import family as llama
from textmill.ranges import count_common
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer) -> Checkpoint:
    shape = llama.Shape(
        layers=2,
        heads=4,
        kv_heads=2,
        width=32,
        head_width=8,
        inner=96,
        positions=96,
        vocab=tokenizer.vocab,
        eos_id=tokenizer.eos_id,
    )
    return write_model(tmp_path_factory.mktemp("llama") / "run", tokenizer, shape)


def new_requests(tokenizer: TextTokenizer, count: int, seed: int) -> list[Request]:
    """Prompts that begin with a few common texts, and some that do not."""
    dice = random.Random(seed)
    stems = [[dice.randrange(tokenizer.vocab) for _ in range(60)] for _ in range(3)]
    requests = []
    for number in range(count):
        stem = dice.choice(stems)[: dice.randrange(61)]
        ids = stem + [dice.randrange(tokenizer.vocab) for _ in range(dice.randrange(1, 25))]
        sample = SampleConfig(temperature=dice.choice([0.0, 0.8]), seed=number, max_tokens=dice.randrange(1, 40))
        requests.append(Request(tuple(ids), sample))
    return requests


def run(generator: Generator, requests: list[Request], slots: int) -> list[tuple[str, Done]]:
    """The texts and ends of all requests."""
    texts = [""] * len(requests)
    ends = dict[int, Done]()
    for index, event in generator.run(requests, slots):
        texts[index] += event.text
        if isinstance(event, Done):
            ends[index] = event
    return [(text, ends[index]) for index, text in enumerate(texts)]


@pytest.mark.parametrize(("family", "slots"), [("gpt2", 4), ("llama", 1)])
def test_texts_are_the_same_with_and_without(
    checkpoint: Checkpoint, llama_checkpoint: Checkpoint, engine: TorchEngine, family: str, slots: int
) -> None:
    """Texts that slide, share a prompt, and join while others run; in fp32 a text does not depend on its batch."""
    generator = open_generator(checkpoint if family == "gpt2" else llama_checkpoint, engine)
    requests = new_requests(generator.tokenizer, 20, slots)
    requests[7:9] = [requests[6]] * 2
    wanted = run(generator, requests, slots)
    generator.keep_texts(slots)
    for _ in range(2):  # the second time, every prompt has been read before
        found = run(generator, requests, slots)
        assert [(text, end.reason, end.tokens) for text, end in found] == [
            (text, end.reason, end.tokens) for text, end in wanted
        ]
    assert sum(end.reused for _, end in found) > 100
    assert all(end.reused < len(request.ids) for request, (_, end) in zip(requests, found, strict=True))
    assert all(end.reused == 0 for _, end in wanted)
    assert generator.prefixes is not None
    assert 0 < generator.prefixes.tokens <= generator.prefixes.limit


def test_next_turn_computes_only_what_is_new(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(generator.net, generator.tokenizer)
    generator.keep_texts(1)
    sample = SampleConfig(temperature=0, max_tokens=8, min_tokens=8)
    first = tuple(range(10, 50))
    [(text, _)] = run(generator, [Request(first, sample)], 1)
    answer = generator.tokenizer.encode(text)
    computed: list[int] = []
    forward = generator.net.forward

    def count(ids_NT: torch.Tensor, **given: object) -> torch.Tensor:
        computed.append(ids_NT.numel())
        result: torch.Tensor = forward(ids_NT, **given)
        return result

    monkeypatch.setattr(generator.net, "forward", count)
    [(_, end)] = run(generator, [Request((*first, *answer, 3, 4, 5), sample)], 1)
    assert end.reused >= len(first)
    assert computed == [len(first) + len(answer) + 3 - 1 - end.reused]


def test_a_text_that_has_slid_is_not_reused(generator: Generator) -> None:
    """Its slot has the keys and values of its last tokens, not of its first, once it has ended and while it runs."""
    generator = Generator(generator.net, generator.tokenizer)
    samples = [SampleConfig(temperature=0, max_tokens=count, min_tokens=count) for count in (80, 70, 80)]
    requests = [Request(tuple(range(10, 50)), sample) for sample in samples]
    wanted = run(generator, requests, 1)
    for slots in (1, 2):
        generator.keep_texts(slots)
        assert run(generator, requests, slots) == wanted


def test_scored_prompts_are_computed(generator: Generator) -> None:
    generator = Generator(generator.net, generator.tokenizer)
    request = Request(tuple(range(10, 50)), SampleConfig(temperature=0, max_tokens=1), logprobs=1, echo=True)
    wanted = run(generator, [request], 1)
    generator.keep_texts(1)
    for _ in range(2):
        assert run(generator, [request], 1) == wanted


def test_cache_keeps_the_newest_texts_within_its_limit() -> None:
    cache = PrefixCache(10)
    memory = torch.zeros(1)
    cache.add([1, 2, 3, 4], memory)
    cache.add([5, 6, 7, 8], memory + 1)
    assert cache.find([1, 2, 3, 9]) == (3, memory)
    cache.add([9, 9, 9], memory + 2)  # 11 tokens: 5 to 8 was unused longest
    assert cache.find([5, 6]) == (0, None)
    assert not cache.is_new([1, 2, 3])
    assert not cache.is_new(range(11))
    cache.add([1, 2, 3, 4, 5], memory + 3)  # takes the place of its beginning
    assert cache.tokens == 8
    assert cache.find([]) == (0, None)


def test_common_tokens_are_counted_as_they_are_one_by_one() -> None:
    dice = np.random.default_rng(3)
    for _ in range(200):
        first, second = (dice.integers(0, 2, dice.integers(0, 6)).tolist() for _ in range(2))
        pairs = [one == other for one, other in zip(first, second, strict=False)]
        assert count_common(first, second) == (pairs.index(False) if False in pairs else len(pairs))


def test_net_with_a_cache_of_its_own_keeps_no_texts(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(generator.net), "new_cache", lambda *_: None)
    generator = Generator(generator.net, generator.tokenizer)
    generator.keep_texts(4)
    assert generator.prefixes is None
