"""Many prompts: greedy text equals transformers', samples follow the probabilities, streams and stop strings work."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.config import SampleConfig
from textmill.generation import sampling
from textmill.generation.generator import Generator
from textmill.generation.incremental_text import REPLACEMENT, StopStringFilter
from textmill.generation.requests import Done, Request, Token

LANGUAGES = {
    "english": "the mill stands by river and its wheel begins to turn every morning before a child counts sacks "
    "of grain",
    "korean": "물레방아는 강가에 서 있다 아침마다 바퀴가 천천히 돌기 시작한다 "
    "어젯밤에 누가 곡식을 가져왔을까 아이는 자루를 세다가",
    "turkish": "değirmen ırmağın kıyısında duruyor her sabah çark ağır ağır dönmeye başlar dün gece buğdayı kim "
    "getirdi",
    "chinese": "磨坊 站在 河边 每天 早上 轮子 开始 转动 谁 昨晚 带来 了 谷物 孩子 数 着 袋子",
}
CHARACTERS = [*"🎡🏞👩‍👧🇰🇷👍🏽☺️물레방아강가에서있다ḉé漢字 aé", "The ", " mill", "\n"]


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder).eval()


def prompts_of(language: str, count: int) -> list[str]:
    dice = random.Random(language)
    return [" ".join(dice.choices(LANGUAGES[language].split(), k=dice.randint(1, 8)))[:40] for _ in range(count)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_greedy_text_equals_transformers_for_fifty_prompts(generator: Generator, theirs: Any, language: str) -> None:
    tokenizer, prompts = generator.tokenizer, prompts_of(language, 50)
    contexts = [tokenizer.encode(prompt)[:70] for prompt in prompts]
    longest = max(map(len, contexts))
    ids = torch.tensor([[tokenizer.eos_id] * (longest - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.eos_id}
    wanted = theirs.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    wanted = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in wanted]
    sample = SampleConfig(temperature=0, max_tokens=24)
    found: list[list[int]] = [[] for _ in contexts]
    for place, event in generator.run([Request(tuple(context), sample) for context in contexts], 16):
        if isinstance(event, Token):
            found[place].append(event.id)
    assert found == wanted
    assert len({tuple(row) for row in wanted}) > 25


ALL_TOKENS = SampleConfig(max_tokens=1000, temperature=0)
DRAWS = 3_000
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "bias": {},
    "min_tokens": {"min_tokens": 9},
}
NEW_IDS = [5, 9, 5]
"""The new text before the sampled token."""


def reference_probabilities(scores: torch.Tensor, option: str, prompt: list[int], end: int) -> torch.Tensor:
    """Return the probabilities by their definitions, token by token, in Python."""
    values = {"temperature": 1.0, **OPTIONS[option]}
    z = [float(score) for score in scores.double()]
    if option == "bias":
        z[max(range(len(z)), key=z.__getitem__)] -= 4.0
        z[5] += 3.0
    if option == "presence_penalty":
        z[5], z[9] = z[5] - 2.0, z[9] - 2.0
    if option == "frequency_penalty":
        z[5], z[9] = z[5] - 2.0, z[9] - 1.0
    if option == "repetition_penalty":
        z = [
            (score / 1.8 if score > 0 else score * 1.8) if id_ in (*prompt, *NEW_IDS) else score
            for id_, score in enumerate(z)
        ]
    if option == "min_tokens":
        z[end] = float("-inf")
    chances = (torch.tensor(z, dtype=torch.double) / values["temperature"]).softmax(0).tolist()
    order = sorted(range(len(z)), key=lambda id_: -chances[id_])
    kept, mass = [], 0.0
    for rank, id_ in enumerate(order):
        out = (
            (option == "top_k" and rank >= 7)
            or (option == "top_p" and mass >= values[option])
            or (option == "min_p" and chances[id_] < 0.1 * max(chances))
        )
        mass += chances[id_]
        if not out:
            kept.append(id_)
    total = sum(chances[id_] for id_ in kept)
    return torch.tensor([chances[id_] / total if id_ in kept else 0.0 for id_ in range(len(z))], dtype=torch.double)


@pytest.mark.parametrize("option", OPTIONS)
def test_samples_follow_the_reference_probabilities(generator: Generator, theirs: Any, option: str) -> None:
    """Pearson's chi-square of 3,000 samples, with small cells merged, is within five deviations of its mean."""
    tokenizer = generator.tokenizer
    prompt = tokenizer.encode("The mill stands by the")
    with torch.no_grad():
        scores = theirs(torch.tensor([prompt])).logits[0, -1, : tokenizer.vocab] / 3
    bias = ((5, 3.0), (int(scores.argmax()), -4.0)) if option == "bias" else ()
    samples = [SampleConfig(seed=seed, **{"temperature": 1.0, **OPTIONS[option]}) for seed in range(DRAWS)]
    first = sampling.new_state(
        samples[0], prompt, ends=(tokenizer.eos_id,), bias=bias, vocab=tokenizer.vocab, device=scores.device
    )
    for id_ in NEW_IDS:
        first.add(id_)
        first.new_tokens += 1
    states = [dataclasses.replace(first, sample=one) for one in samples]
    found = sampling.choose_next_ids(scores.expand(DRAWS, -1), states, sampling.collect_rules(states, scores.device))
    counts = torch.bincount(found, minlength=tokenizer.vocab).double()
    wanted = reference_probabilities(scores, option, prompt, tokenizer.eos_id) * DRAWS
    assert counts[wanted == 0].sum() == 0
    large = wanted >= 5
    cells = [(counts[large], wanted[large])]
    if (rest := wanted[~large].sum()) >= 5:
        cells.append((counts[~large].sum()[None], rest[None]))
    chi_square = sum(((count - want) ** 2 / want).sum().item() for count, want in cells)
    freedom = sum(len(count) for count, _ in cells) - 1
    assert freedom >= 3
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.long_with(150)
@pytest.mark.parametrize("count", [50, 150])
def test_streamed_chunks_join_to_the_full_text(parrot_of: Callable[[str], Generator], count: int) -> None:
    dice = random.Random(8)
    for _ in range(count):
        text = "".join(dice.choices(CHARACTERS, k=dice.randint(1, 9)))
        parrot = parrot_of(text)
        chunks = list(parrot.stream("", ALL_TOKENS))
        assert "".join(chunks) == text == parrot.sample("", ALL_TOKENS).text
        assert not any(REPLACEMENT in chunk for chunk in chunks)


@pytest.mark.long_with(150)
@pytest.mark.parametrize("count", [50, 150])
def test_streaming_gives_the_same_texts_as_a_batch(generator: Generator, count: int) -> None:
    dice = random.Random(9)
    prompts = ["".join(dice.choices(CHARACTERS, k=dice.randint(0, 8))) for _ in range(count)]
    sample = SampleConfig(max_tokens=8, temperature=1.2, seed=77, batch=32)
    batched = generator.texts(prompts, sample)
    streamed = [
        "".join(generator.stream(prompt, sample.model_copy(update={"seed": 77 + number})))
        for number, prompt in enumerate(prompts)
    ]
    assert streamed == batched


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_string_is_found_across_chunks(chunks: list[str], stops: list[str]) -> None:
    stop_filter, passed, received = StopStringFilter(stops), "", ""
    for chunk in chunks:
        passed += stop_filter.add(chunk)
        received += chunk
        assert stop_filter.hit == any(stop in received for stop in stops)
        assert received.startswith(passed)
        if stop_filter.hit:
            assert passed == received[: min(received.index(stop) for stop in stops if stop in received)]
            return
        # Held back is only what may yet become a stop string.
        held = received[len(passed) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert passed + stop_filter.end() == received


@pytest.mark.parametrize(
    ("stop", "wanted"), [("는 강", "물레방아"), ("가", "물레방아는 강"), ("🎡x", "물레방아는 강가에 🎡"), ("물", "")]
)
def test_stop_string_is_found_across_tokens(parrot_of: Callable[[str], Generator], stop: str, wanted: str) -> None:
    text = "물레방아는 강가에 🎡"
    parrot = parrot_of(text)
    assert parrot.sample("", SampleConfig(max_tokens=1000, stop=[stop])).text == wanted
    assert "".join(parrot.stream("", SampleConfig(max_tokens=1000, stop=[stop, "zzz"]))) == wanted


def test_stop_tokens_end_the_text_and_are_left_out(parrot_of: Callable[[str], Generator]) -> None:
    parrot = parrot_of("abcd")
    ids = parrot.tokenizer.encode("abcd")
    events = [event for _, event in parrot.run([Request((0,), SampleConfig(max_tokens=99), stop_ids=(ids[2],))], 1)]
    assert [event.id for event in events[:-1]] == ids[:2]
    assert events[-1] == Done("stop", 2, "")


def test_log_probabilities_equal_transformers(generator: Generator, theirs: Any) -> None:
    tokenizer = generator.tokenizer
    prompt = tokenizer.encode("The mill stands")
    request = Request(
        tuple(prompt), SampleConfig(max_tokens=9, min_tokens=9, temperature=0.7, top_k=4), logprobs=3, echo=True
    )
    # Next to a request without logprobs.
    events = [
        event for place, event in generator.run([Request((1, 2), SampleConfig(max_tokens=5)), request], 2) if place == 1
    ]
    tokens, done = events[:-1], events[-1]
    new = [token.id for token in tokens if isinstance(token, Token)]
    with torch.no_grad():
        logs = theirs(torch.tensor([[*prompt, *new]])).logits[0, :, : tokenizer.vocab].log_softmax(1)
    assert isinstance(done, Done)
    assert done.prompt_logprobs[0] == (None, ())
    logprobs = [
        *done.prompt_logprobs[1:],
        *((token.logprob, token.top) for token in tokens if isinstance(token, Token)),
    ]
    for place, (log, top) in enumerate(logprobs):
        assert log == pytest.approx(logs[place, [*prompt, *new][place + 1]].item(), abs=1e-4)
        values, ids = logs[place].topk(3)
        assert [id_ for id_, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)
    assert len(logprobs) == len(prompt) - 1 + 9


def test_echo_alone_generates_no_token(generator: Generator) -> None:
    ids = tuple(generator.tokenizer.encode("The mill stands" * 30)[:96])
    nothing = SampleConfig().model_copy(update={"max_tokens": 0})
    [(_, done)] = generator.run([Request(ids, nothing, logprobs=1, echo=True)], 1)
    assert isinstance(done, Done)
    assert (done.reason, done.tokens, len(done.prompt_logprobs)) == ("length", 0, 96)
    [(_, one)] = generator.run([Request(ids[:1], nothing, logprobs=1, echo=True)], 1)
    assert isinstance(one, Done)
    assert one.prompt_logprobs == ((None, ()),)
