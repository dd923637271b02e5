"""The fast encoder gives the ids of tokenizers on any text, and is not used where that is not tested."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary import encoders
from textmill.tokens.vocabulary.encoders import (
    PATTERNS,
    Encoder,
    FastEncoder,
    NamedText,
    ReferenceEncoder,
    first_difference,
    hard_texts,
    why_not_fast,
)
from textmill.tokens.vocabulary.foreign_files import END
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit
from textmill.where import PACKAGE

TEXT = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")
TEXTS = st.text(max_size=80) | st.lists(
    st.sampled_from(
        [
            END,
            "<|im_start|>",
            " foo bar",
            "zzz",
            "\r\n",
            "   ",
            "\t",
            "'s",
            "'LL",
            "12345",
            "é",
            "e\u0301",
            "물레방아",
            "漢字",
            "👩‍👧",
            "\x00",
            "\u3000",
        ]
    )
    | st.text(max_size=6)
).map("".join)


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    pytest.importorskip("fastokens", reason="no fastokens: pip install fastokens")


@pytest.fixture(scope="module")
def fitted() -> TextTokenizer:
    more = ["물레방아는 강가에 서 있다. Değirmen ırmağın kıyısında. 12345 don't"] * 3
    return fit(iter([TEXT[:200_000].split("\n\n"), more]), TokenizerConfig(vocab=900, special_tokens=["<|im_start|>"]))


def open_encoder(tokenizer: TextTokenizer) -> Encoder:
    """The fast encoder of a tokenizer, or the reference where the fast one is not used."""
    import fastokens

    if why_not_fast(tokenizer):
        return ReferenceEncoder(tokenizer)
    return FastEncoder(fastokens.Tokenizer.from_json_str(tokenizer.inner.to_str()))


def copy_of(tokenizer: TextTokenizer) -> Tokenizer:
    inner = Tokenizer.from_str(tokenizer.inner.to_str())
    inner.encode_special_tokens = True
    return inner


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def composed(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.NFC()


def prefixed(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def added(inner: Tokenizer) -> None:
    inner.add_tokens([AddedToken("foo bar", lstrip=True), AddedToken("zzz", single_word=True)])


def pattern_of(pattern: str) -> Callable[[Tokenizer], None]:
    def change(inner: Tokenizer) -> None:
        inner.pre_tokenizer = split_by(pattern)

    return change


CHANGES = [lambda inner: None, digits, composed, prefixed, added, *map(pattern_of, sorted(PATTERNS))]


@pytest.mark.parametrize("change", CHANGES)
def test_ids_equal_those_of_tokenizers(fitted: TextTokenizer, change: Callable[[Tokenizer], None]) -> None:
    inner = copy_of(fitted)
    change(inner)
    encoder = open_encoder(TextTokenizer(inner, fitted.eos_id))
    assert isinstance(encoder, FastEncoder)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(TEXTS, max_size=6))
    def check(texts: list[str]) -> None:
        ids, lengths = encoder.encode(texts)
        wanted = [inner.encode(text, add_special_tokens=False).ids for text in texts]
        assert lengths.tolist() == [len(one) for one in wanted]
        assert ids.tolist() == [token for one in wanted for token in one]

    check()
    for sample in hard_texts():
        assert encoder.encode([sample.text])[0].tolist() == inner.encode(sample.text, add_special_tokens=False).ids, (
            sample.name
        )


def test_special_tokens_in_a_text_are_plain_text(fitted: TextTokenizer) -> None:
    ids, _ = open_encoder(fitted).encode([f"a {END} b<|im_start|>", END])
    assert not {fitted.eos_id, fitted.inner.token_to_id("<|im_start|>")} & set(ids.tolist())
    assert fitted.decode(ids.tolist()) == f"a {END} b<|im_start|>{END}"


@pytest.mark.parametrize(
    "text", ["a" * 300_000, " " * 300_000, "".join(random.Random(1).choices("abcdefgh", k=100_000))]
)
def test_a_long_line_without_a_break(fitted: TextTokenizer, text: str) -> None:
    assert open_encoder(fitted).encode([text])[0].tolist() == fitted.inner.encode(text, add_special_tokens=False).ids


def test_gpt2_on_real_text(shared_data: Path) -> None:
    from textmill.tokens.vocabulary.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(shared_data / "gpt2_bpe")
    texts = [TEXT[start : start + 2000] for start in range(0, 100_000, 2000)]
    texts += (shared_data / "ko_chatbot" / "ChatbotData.csv").read_text(encoding="utf-8")[:50_000].splitlines()
    fast, slow = open_encoder(tokenizer).encode(texts), ReferenceEncoder(tokenizer).encode(texts)
    assert fast[0].tolist() == slow[0].tolist()
    assert fast[1].tolist() == slow[1].tolist()


def changed(inner: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner


def test_untested_tokenizers_use_the_reference(fitted: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, END: 2}
    dropping = copy_of(fitted)
    dropping.model.dropout = 0.1
    cases = [
        (Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")), "WordPiece"),
        (Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], 0)), "Unigram"),
        (Tokenizer(models.BPE(vocabulary, [])), "splitting"),
        (dropping, "only tested with byte-level BPE"),
        (changed(copy_of(fitted), normalizer=normalizers.NFKC()), "NFKC"),
        (changed(copy_of(fitted), pre_tokenizer=split_by(r"\w{1,7}|\s")), "splitting"),
        (changed(copy_of(fitted), pre_tokenizer=pre_tokenizers.Metaspace()), "splitting"),
    ]
    for inner, message in cases:
        tokenizer = TextTokenizer(inner, 0)
        assert message in (why_not_fast(tokenizer) or "")
        assert isinstance(open_encoder(tokenizer), ReferenceEncoder)
    real = metadata.version

    def missing(name: str) -> str:
        if name == encoders.FAST:
            raise metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "not installed" in (why_not_fast(fitted) or "")
    assert isinstance(open_encoder(fitted), ReferenceEncoder)


class Slip:
    """Encodes like another encoder, except for one text."""

    name = "slip 1.0"

    def __init__(self, encoder: Any, text: str, error: BaseException | None = None) -> None:
        self.encoder, self.text, self.error = encoder, text, error

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        ids, lengths = self.encoder.encode(texts)
        if self.text not in texts:
            return ids, lengths
        if self.error:
            raise self.error
        return ids[::-1], lengths


def test_a_difference_is_found_and_named(fitted: TextTokenizer) -> None:
    reference = ReferenceEncoder(fitted)
    samples = [NamedText(f"text {number}", f"The mill {number}") for number in range(5)]
    assert first_difference(open_encoder(fitted), reference, samples) is None
    assert first_difference(Slip(reference, "The mill 3"), reference, samples) == samples[3]
    assert first_difference(Slip(reference, "The mill 4", ValueError("no")), reference, samples) == samples[4]
    with pytest.raises(KeyboardInterrupt):
        first_difference(Slip(reference, "The mill 4", KeyboardInterrupt()), reference, samples)


def test_no_texts_give_no_ids(fitted: TextTokenizer) -> None:
    for encoder in (open_encoder(fitted), ReferenceEncoder(fitted)):
        for texts in ([], ["", ""]):
            ids, lengths = encoder.encode(texts)
            assert (len(ids), lengths.tolist(), lengths.dtype) == (0, [0] * len(texts), np.int64)
