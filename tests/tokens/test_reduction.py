"""A vocabulary reduced to what a text uses gives that text the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.reduction import keep_tokens
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit
from textmill.where import PACKAGE

KINDS: list[dict[str, Any]] = [
    {"kind": "bpe", "chat": "default"},
    {"kind": "wordpiece"},
    {"kind": "unigram"},
    {"kind": "unigram", "byte_fallback": False},
]
FOREIGN = [
    "물레방아는 강가에 서 있다. 물레방아는 돈다.",
    "Değirmen ırmağın kıyısında duruyor, değirmen.",
    "天地玄黃，宇宙洪荒。",
]


def lines() -> list[str]:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:120_000]
    return [line for line in text.split("\n") if line] + FOREIGN * 20


def used_in(tokenizer: TextTokenizer, texts: list[str]) -> Any:
    used = np.zeros(tokenizer.vocab, bool)
    used[[id_ for text in texts for id_ in tokenizer.encode(text)]] = True
    return used


@pytest.mark.parametrize("settings", [*KINDS[:2], *(pytest.param(one, marks=pytest.mark.long) for one in KINDS[2:])])
def test_text_of_kept_tokens_is_encoded_as_before(settings: dict[str, Any]) -> None:
    text = lines()
    tokenizer = fit(iter([text]), TokenizerConfig(vocab=1800, **settings))
    small = text[:150] + FOREIGN[:1]
    found = keep_tokens(tokenizer, used_in(tokenizer, small))
    assert 300 < len(found.kept) == found.tokenizer.vocab < 0.8 * tokenizer.vocab
    for line in small:
        ids = found.tokenizer.encode(line)
        assert found.kept[ids].tolist() == tokenizer.encode(line)
        assert found.tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(line))
    for role in ("eos_id", "bos_id", "pad_id", "unk_id", "mask_id"):
        old, new = getattr(tokenizer, role), getattr(found.tokenizer, role)
        assert (None if new is None else found.kept[new]) == old
    around = [one.inner.encode("mill", "river", add_special_tokens=True).ids for one in (found.tokenizer, tokenizer)]
    if set(around[1]) <= set(found.kept.tolist()):
        assert found.kept[around[0]].tolist() == around[1], "the special tokens around a text"
    if settings["kind"] == "bpe" or settings.get("byte_fallback", settings["kind"] == "unigram"):
        other = "Another text 天地 with emoji 🙂 and Значок"
        assert found.tokenizer.decode(found.tokenizer.encode(other)) == other, "bytes encode any other text"
    assert found.tokenizer.chat == tokenizer.chat
