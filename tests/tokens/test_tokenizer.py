"""Any text survives the tokenizer, and transformers reads the same ids from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.config import TokenizerConfig
from textmill.errors import TextmillError
from textmill.tokens.tokenizer import END, TextTokenizer, fit, open_tokenizer
from textmill.where import PACKAGE


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:200_000]
    return fit(iter([text.split("\n\n"), ["물레방아는 강가에 서 있다. Değirmen ırmağın kıyısında."] * 3]), TokenizerConfig(vocab=700))


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=60)
    | st.text(st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF))
    | st.sampled_from([END, f"a{END}b", "é", "​‍"])
)
def test_decode_undoes_encode(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids, "text that looks like a special token is plain text"


def test_transformers_opens_the_folder(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path, longest=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("KING RICHARD:\nNow is the winter", "물레방아 İstanbul 🙂", "  two  spaces\n\n\n"):
        assert theirs(text).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end
    assert theirs.model_max_length == 64
    assert len(theirs) == tokenizer.vocab


def test_opened_again_it_is_the_same(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for where in (tmp_path, tmp_path / "tokenizer.json"):
        again = open_tokenizer(where)
        assert (again.fingerprint, again.vocab, again.end) == (tokenizer.fingerprint, tokenizer.vocab, tokenizer.end)
    other = fit(iter([["another text altogether"]]), TokenizerConfig(vocab=270))
    assert other.fingerprint != tokenizer.fingerprint


def test_gpt2s_own_files(shared_data: Path) -> None:
    gpt2 = open_tokenizer(shared_data / "gpt2_bpe")
    assert (gpt2.vocab, gpt2.end) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]


def test_special_tokens_come_after_the_end() -> None:
    tokenizer = fit(iter([["some text"]]), TokenizerConfig(vocab=300, special_tokens=["<usr>", "<sys>"]))
    assert [tokenizer.inner.token_to_id(token) for token in (END, "<usr>", "<sys>")] == [0, 1, 2]


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="no tokenizer there"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextmillError, match=r"not a tokenizer\.json"):
        open_tokenizer(tmp_path)
