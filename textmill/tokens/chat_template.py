"""The chat template of a model: turns a conversation into the token ids that prompt the next answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from textmill.errors import TextmillError
from textmill.tokens.chat_rendering import TurnTokens, render
from textmill.tokens.jinja_template import JinjaTemplate
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

AnyTemplate: TypeAlias = "ChatTemplate | JinjaTemplate"
Message = dict[str, str]
"""One message of a conversation, with the keys "role" and "content"."""


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations are written for a model that textmill finetuned for chat."""

    tokenizer: TextTokenizer
    turn_tokens: TurnTokens
    jinja: str
    """The same template in Jinja, as transformers reads it."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.turn_tokens.tokens_around("assistant")[1][-1:]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """The conversation as ids, followed by the tokens that start the assistant's answer if requested."""
        turns = [(message["role"], message["content"]) for message in messages]
        try:
            rendered = render([turns], self.turn_tokens, ReferenceEncoder(self.tokenizer), prompt=add_generation_prompt)
        except ValueError as error:  # a role that the template has no turn for
            raise TextmillError(str(error)) from None
        ids: list[int] = rendered.ids.tolist()
        return ids


def open_template(folder: Path) -> AnyTemplate | None:
    """The chat template of the tokenizer in a folder: textmill's own, or Jinja of another origin."""
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat is not None and tokenizer.turn_tokens is not None:
        return ChatTemplate(tokenizer, tokenizer.turn_tokens, tokenizer.chat.jinja())
    return JinjaTemplate(tokenizer, tokenizer.jinja) if tokenizer.jinja is not None else None
