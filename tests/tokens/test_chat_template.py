"""Conversations are rendered as transformers renders them from the same folder, up to the stop token."""

from __future__ import annotations

from pathlib import Path

import pytest

from textmill.config import TokenizerConfig
from textmill.errors import TextmillError
from textmill.tokens.chat import open_template
from textmill.tokens.vocabulary.tokenizer import fit

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "물레방아는 어디에? <|assistant|> is plain text"},
    {"role": "assistant", "content": "By the river. 😀"},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize("prompt", [False, True])
def test_a_conversation_is_rendered_as_by_transformers(tmp_path: Path, prompt: bool) -> None:
    from transformers import AutoTokenizer

    fit(iter([["the mill by the river"] * 4]), TokenizerConfig(vocab=300, chat="default")).save(tmp_path)
    template = open_template(tmp_path)
    assert template is not None
    plain = [{**turn, "content": turn["content"].replace("<|assistant|> ", "")} for turn in CONVERSATION]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        plain, add_generation_prompt=prompt, return_dict=False
    )
    assert template.render(plain, add_generation_prompt=prompt) == theirs
    (stop,) = template.stop_ids
    written = template.render(CONVERSATION[:3], add_generation_prompt=False)
    assert written[-1] == stop
    assert written.count(template.turn_tokens.tokens_around("assistant")[0][0]) == 1, (
        "text that looks like a special token is plain text"
    )


def test_a_missing_template_and_a_missing_turn(tmp_path: Path) -> None:
    for name in ("plain", "chat"):
        (tmp_path / name).mkdir()
    fit(iter([["the mill by the river"] * 4]), TokenizerConfig(vocab=300)).save(tmp_path / "plain")
    assert open_template(tmp_path / "plain") is None
    fit(iter([["the mill by the river"] * 4]), TokenizerConfig(vocab=300, chat="dsgpt2")).save(tmp_path / "chat")
    template = open_template(tmp_path / "chat")
    assert template is not None
    with pytest.raises(TextmillError, match="no turn of the tool"):
        template.render([{"role": "tool", "content": "x"}], add_generation_prompt=True)
