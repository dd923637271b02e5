"""Continuations equal transformers', stream complete characters, and depend on prompt and seed only."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.small_models import write_model
from textmill.checkpoints.folders import Checkpoint, open_checkpoint
from textmill.config import SampleConfig, TokenizerConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.generation.generator import Generator, open_generator
from textmill.generation.incremental_text import REPLACEMENT, WindowTextDecoder, read_token_bytes, text_decoder_factory
from textmill.models.gpt2 import family as gpt2
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

GREEDY = SampleConfig(temperature=0, max_tokens=64)


ParrotOf = Callable[[str], Generator]


@pytest.mark.parametrize(("prompt", "penalty"), [("The mill", 1.0), ("물레방아는", 1.4), ("", 1.4), ("a", 1.0)])
def test_greedy_continuation_equals_transformers(
    generator: Generator, checkpoint: Checkpoint, prompt: str, penalty: float
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    start = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt")
    options = {
        "max_new_tokens": 64,
        "do_sample": False,
        "repetition_penalty": penalty,
        "pad_token_id": tokenizer.eos_token_id,
    }
    found = model.generate(**start, **options)[0, start["input_ids"].shape[1] :].tolist()
    if tokenizer.eos_token_id in found:
        found = found[: found.index(tokenizer.eos_token_id)]
    assert len(set(found)) > 3
    sample = generator.sample(prompt, GREEDY.model_copy(update={"repetition_penalty": penalty}))
    assert sample.text == tokenizer.decode(found)
    assert sample.tokens == len(found)


@pytest.mark.parametrize("text", ["물레방아는 강가에 서 있다. 🎡🏞️ 끝", "👩‍👩‍👧‍👦 çığ ß 漢字", "plain", "끝"])
def test_stream_never_splits_a_character(text: str, parrot_of: ParrotOf, tokenizer: TextTokenizer) -> None:
    texts = list(parrot_of(text).stream("", SampleConfig(max_tokens=1000)))
    assert "".join(texts) == text
    assert not any(REPLACEMENT in text_part for text_part in texts)
    assert len(tokenizer.encode(text)) > len(texts) or text == "plain"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_is_decoded_completely(tokenizer: TextTokenizer, text: str) -> None:
    for stream in (
        WindowTextDecoder(tokenizer, [tokenizer.eos_id]),
        text_decoder_factory(tokenizer)([tokenizer.eos_id]),
    ):
        texts = [stream.add(id_) for id_ in tokenizer.encode(text)]
        assert "".join([*texts, stream.end()]) == text
        assert REPLACEMENT in text or not any(REPLACEMENT in text_part for text_part in texts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=30))
def test_streamed_texts_of_any_ids_join_to_their_decoding(tokenizer: TextTokenizer, ids: list[int]) -> None:
    ids = [id_ for id_ in ids if id_ < tokenizer.vocab]
    for stream in (
        WindowTextDecoder(tokenizer, tokenizer.encode("The")),
        text_decoder_factory(tokenizer)(tokenizer.encode("The")),
    ):
        joined = "".join([*(stream.add(id_) for id_ in ids), stream.end()])
        assert joined == tokenizer.decode(ids)


def test_bytes_of_every_token_equal_the_librarys(tokenizer: TextTokenizer) -> None:
    token_bytes = read_token_bytes(tokenizer)
    assert token_bytes is not None
    assert [one.decode("utf-8", "replace") for one in token_bytes] == [
        tokenizer.decode([id_]) for id_ in range(tokenizer.vocab)
    ]
    assert token_bytes[tokenizer.eos_id] == b"<|endoftext|>"


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_other_tokenizers_are_decoded_by_the_library(kind: Any) -> None:
    texts = ["the mill stands by the river and the wheel turns " * 9]
    other = fit(iter([texts]), TokenizerConfig(kind=kind, vocab=300))
    assert read_token_bytes(other) is None
    stream = text_decoder_factory(other)(other.encode("the"))
    ids = other.encode(" mill stands by the river")
    assert "".join([*map(stream.add, ids), stream.end()]) == other.decode([*other.encode("the"), *ids])[3:]


def test_prompt_that_ends_within_a_character_is_completed(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("漢")
    stream = text_decoder_factory(tokenizer)(ids[:1])
    assert "".join(map(stream.add, ids[1:])) == "漢"


def test_incomplete_bytes_are_printed_at_the_end(parrot_of: ParrotOf, tokenizer: TextTokenizer) -> None:
    parrot = parrot_of("漢")
    cut = len(tokenizer.encode("漢")) - 1
    assert cut > 0
    assert list(parrot.stream("", SampleConfig(max_tokens=cut))) == [REPLACEMENT]


@pytest.mark.parametrize("text", ["end", ""])
def test_min_tokens_prevents_an_early_end(parrot_of: ParrotOf, tokenizer: TextTokenizer, text: str) -> None:
    parrot = parrot_of(text)
    count = len(tokenizer.encode(text))
    assert parrot.sample("", SampleConfig(max_tokens=count + 1)).tokens == count
    assert parrot.sample("", SampleConfig(max_tokens=count + 1, min_tokens=count + 1)).tokens == count + 1


def test_seed_decides_the_text(generator: Generator) -> None:
    texts = ["".join(generator.stream("The", SampleConfig(seed=seed, max_tokens=30))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_continuation_does_not_depend_on_other_prompts(generator: Generator) -> None:
    prompts = ["The mill", "물", "", "The wheel turns", "The mill"]
    sample = SampleConfig(seed=3, max_tokens=20)
    wanted = [
        "".join(generator.stream(prompt, sample.model_copy(update={"seed": 3 + place})))
        for place, prompt in enumerate(prompts)
    ]
    assert generator.texts(prompts, sample) == wanted
    assert generator.texts([], sample) == []


def test_special_token_in_a_prompt_is_plain_text(generator: Generator) -> None:
    assert generator.tokenizer.eos_id not in generator.encode_prompt("<|endoftext|>")


def test_new_tokens_are_limited_to_the_positions_with_one_warning(
    checkpoint: Checkpoint, engine: TorchEngine, tokenizer: TextTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = open_generator(checkpoint, engine)
    prompt = tokenizer.decode(tokenizer.encode("The mill stands" * 20)[:90])
    length = len(tokenizer.encode(prompt))
    sample = SampleConfig(max_tokens=200, min_tokens=200, temperature=0, slide_context=False)
    assert generator.sample(prompt, sample).tokens == 96 - length
    generator.sample(prompt, sample)
    assert capsys.readouterr().err.count("sample.max_tokens=200") == 1


def test_sliding_context_keeps_the_last_half(
    checkpoint: Checkpoint, generator: Generator, tokenizer: TextTokenizer
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.folder).eval()
    prompt, positions = "The mill stands by", 96
    seen = tokenizer.encode(prompt)
    view, wanted = list(seen), []
    for _ in range(150):
        if len(view) > positions:
            view = seen[-positions // 2 :]
        with torch.no_grad():
            scores = theirs(torch.tensor([view])).logits[0, -1]
        scores[tokenizer.eos_id] = -torch.inf
        wanted.append(int(scores.argmax()))
        seen, view = [*seen, wanted[-1]], [*view, wanted[-1]]
    sample = SampleConfig(max_tokens=150, min_tokens=150, temperature=0)
    assert generator.sample(prompt, sample).text == tokenizer.decode(wanted)


def test_too_long_prompt_is_refused_before_the_first_token(generator: Generator) -> None:
    with pytest.raises(TextmillError, match="the model's context is 96"):
        generator.stream("x y z " * 100, GREEDY)


def test_lone_surrogate_is_refused(generator: Generator) -> None:
    with pytest.raises(TextmillError, match=r"sample\.prompt"):
        generator.stream("a \ud83d", GREEDY)


def test_unknown_family_is_named_in_the_error(checkpoint: Checkpoint, engine: TorchEngine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint.folder, folder, ignore=lambda *_: ["progress.json"])
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2_torch"}))
    with pytest.raises(TextmillError, match="model_type is 'gpt2_torch'; textmill knows gpt2"):
        open_generator(open_checkpoint(folder), engine)


def test_missing_or_too_large_tokenizer_is_refused(
    checkpoint: Checkpoint, engine: TorchEngine, tokenizer: TextTokenizer, shape: gpt2.Shape, tmp_path: Path
) -> None:
    small = write_model(tmp_path, tokenizer, dataclasses.replace(shape, vocab=shape.vocab - 1))
    with pytest.raises(TextmillError, match="the embedding has only 299 rows"):
        open_generator(small, engine)
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint.folder, folder, ignore=lambda *_: ["progress.json", "tokenizer.json"])
    with pytest.raises(TextmillError, match="no tokenizer found"):
        open_generator(open_checkpoint(folder), engine)


def test_padding_rows_of_the_vocabulary_are_never_chosen(
    engine: TorchEngine, tokenizer: TextTokenizer, shape: gpt2.Shape, tmp_path: Path
) -> None:
    wide = open_generator(write_model(tmp_path, tokenizer, dataclasses.replace(shape, vocab=shape.vocab * 3)), engine)
    sample = wide.sample("The", SampleConfig(max_tokens=60, min_tokens=60, temperature=5.0))
    assert sample.tokens == 60


def test_bf16_stores_every_weight_in_bf16(checkpoint: Checkpoint) -> None:
    generator = open_generator(checkpoint, TorchEngine(device="cpu", precision="bf16"))
    assert {parameter.dtype for _, parameter in generator.net.named_parameters()} == {torch.bfloat16}
    assert generator.sample("The", SampleConfig(max_tokens=5)).tokens <= 5


def test_fp16_gives_the_text_of_fp32(checkpoint: Checkpoint, generator: Generator) -> None:
    half = open_generator(checkpoint, TorchEngine(device="cpu", precision="fp16"))
    assert {parameter.dtype for _, parameter in half.net.named_parameters()} == {torch.float16}
    # On a CPU without fp16 oneDNN takes a second for what plain loops do in milliseconds.
    with torch.backends.mkldnn.flags(enabled=False):
        assert_same_texts(half, generator)


def assert_same_texts(one: Generator, other: Generator) -> None:
    for sample in (SampleConfig(max_tokens=12, temperature=0.0), SampleConfig(max_tokens=12, beams=2)):
        assert one.texts(["The mill", "물레", ""], sample) == other.texts(["The mill", "물레", ""], sample)


def test_too_many_slots_are_refused_with_the_number_that_fits(generator: Generator) -> None:
    with pytest.raises(TextmillError, match=r"GiB are free; set sample.batch or serve.slots to \d+ or less"):
        generator.new_slots(10**9, 96)
