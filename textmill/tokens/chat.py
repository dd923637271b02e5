"""The one chat template: messages to ids and which of them bear loss, and its twin in Jinja for whoever opens the tokenizer elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config.chat import END, WORDS, tokens_in
from textmill.corpus.document import Turn
from textmill.tokens.encoders import Encoder

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """For each role the special tokens before and after what it says."""

    turns: tuple[tuple[str, str], ...]
    """A role and its turn: `<|user|>{content}<|endoftext|>`."""

    @property
    def tokens(self) -> list[str]:
        """Every special token in it, each once."""
        return list(dict.fromkeys(token for _, text in self.turns for token in tokens_in(text)))

    @property
    def stop(self) -> str:
        """The token with which the assistant stops."""
        return tokens_in(dict(self.turns)["assistant"])[-1]

    @property
    def prompt(self) -> str:
        """What asks the assistant to answer."""
        return dict(self.turns)["assistant"].partition(WORDS)[0]

    def form_of(self, ids: Mapping[str, int]) -> Form:
        """The template in the ids that a tokenizer has for its tokens."""

        def ids_in(half: str) -> Ids:
            return tuple(ids[token] for token in tokens_in(half))

        halves = ((role, *text.split(WORDS)) for role, text in self.turns)
        return Form(tuple((role, ids_in(before), ids_in(after)) for role, before, after in halves))

    def jinja(self) -> str:
        """The same in the language of transformers' `chat_template`; what it has no turn for, it refuses as we do."""
        lines, word = [], "if"
        for role, text in self.turns:
            before, _, after = text.partition(WORDS)
            said = " + ".join([_quoted(before), "message['content']", *([_quoted(after)] if after else [])])
            lines.append(f"{{% {word} message['role'] == '{role}' %}}{{{{ {said} }}}}")
            word = "elif"
        refusal = "{% else %}{{ raise_exception('this template has no turn of the ' + message['role']) }}{% endif %}"
        prompt = f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.prompt)} }}}}{{% endif %}}"
        return f"{{% for message in messages %}}{''.join(lines)}{refusal}{{% endfor %}}{prompt}"


def new_template(turns: Mapping[str, str], end: str) -> Template:
    """A template for a tokenizer whose end-of-text token is `end`."""
    return Template(tuple((role, text.replace(END, end)) for role, text in turns.items()))


@dataclass(frozen=True)
class Form:
    """A template in the ids of a tokenizer."""

    turns: tuple[tuple[str, Ids, Ids], ...]
    """A role, and the ids before and after its words."""

    def around(self, role: str) -> tuple[Ids, Ids]:
        """The ids before and after what a role says."""
        for name, before, after in self.turns:
            if name == role:
                return before, after
        raise ValueError(f"the chat template has no turn of the {role}; take another tokenizer.chat, or leave such turns out")


@dataclass(frozen=True)
class Rendered:
    """Conversations as ids, one after the other."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    """Of each conversation."""
    asked: NDArray[np.uint8]
    """1 where loss is asked: what the assistant says, and the tokens that end it."""


def render(conversations: Sequence[Sequence[Turn]], form: Form, encoder: Encoder, prompt: bool = False) -> Rendered:
    """The ids of conversations; `prompt`: each goes on with what asks the assistant to answer.

    What looks like a special token in what is said is plain text."""
    flat, counts = encoder.encode([text for turns in conversations for _, text in turns])
    words = iter(np.split(np.asarray(flat, np.int64), np.cumsum(counts)[:-1]) if len(counts) else [])
    ids, asked, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)], []
    for turns in conversations:
        parts: list[tuple[Sequence[int] | NDArray[np.int64], bool]] = []
        for role, _ in turns:
            before, after = form.around(role)
            answers = role == "assistant"
            parts += [(before, False), (next(words), answers), (after, answers)]
        if prompt:
            parts.append((form.around("assistant")[0], False))
        ids += [np.asarray(part, np.int64) for part, _ in parts]
        asked += [np.full(len(part), answers, np.uint8) for part, answers in parts]
        lengths.append(sum(len(part) for part, _ in parts))
    return Rendered(np.concatenate(ids), np.array(lengths, np.int64), np.concatenate(asked))


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
