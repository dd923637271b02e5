"""A model's chat template, opened: a talk of messages as the ids that ask for the next answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from textmill.errors import TextmillError
from textmill.tokens.chat_rendering import Form, render
from textmill.tokens.vocabulary.encoders import ReferenceEncoder
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

Message = dict[str, str]
"""A turn of a talk: who speaks ("role") and what is said ("content")."""


@dataclass(frozen=True)
class TalkTemplate:
    """How a model that was finetuned for chat wants a talk written."""

    tokenizer: TextTokenizer
    form: Form
    jinja: str
    """The same as transformers reads it."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.form.around("assistant")[1][-1:]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """The talk as ids; with what asks the assistant to answer, where that is wanted."""
        turns = [(message["role"], message["content"]) for message in messages]
        try:
            rendered = render([turns], self.form, ReferenceEncoder(self.tokenizer), prompt=add_generation_prompt)
        except ValueError as error:  # a role that the template has no turn for
            raise TextmillError(str(error)) from None
        ids: list[int] = rendered.ids.tolist()
        return ids


def open_template(folder: Path) -> TalkTemplate | None:
    """The chat template that stands with a tokenizer, where there is one of ours."""
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat is None or tokenizer.chat_form is None:
        return None
    return TalkTemplate(tokenizer, tokenizer.chat_form, tokenizer.chat.jinja())
