"""The one chat template: messages to ids and which of them bear loss, and its twin in Jinja for whoever opens the tokenizer elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config.chat import CONTENT, END, tokens_in
from textmill.corpus.document import Turn
from textmill.tokens.batches.layout import gathered
from textmill.tokens.vocabulary.encoder import Encoder

Ids = tuple[int, ...]
PROMPT = ""
"""In place of a role: what asks the assistant to answer."""


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
        return dict(self.turns)["assistant"].partition(CONTENT)[0]

    def form_of(self, ids: Mapping[str, int]) -> Form:
        """The template in the ids that a tokenizer has for its tokens."""

        def ids_in(half: str) -> Ids:
            return tuple(ids[token] for token in tokens_in(half))

        halves = ((role, *text.split(CONTENT)) for role, text in self.turns)
        return Form(tuple((role, ids_in(before), ids_in(after)) for role, before, after in halves))

    def jinja(self) -> str:
        """The same in the language of transformers' `chat_template`; what it has no turn for, it refuses as we do."""
        lines, word = [], "if"
        for role, text in self.turns:
            before, _, after = text.partition(CONTENT)
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
        raise ValueError(
            f"the chat template has no turn of the {role}; take another tokenizer.chat, or leave such turns out"
        )


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
    # Who speaks in each turn; the prompt is a turn of the assistant that says nothing yet and does not end.
    roles = [role for turns in conversations for role in (*(role for role, _ in turns), *([PROMPT] if prompt else []))]
    around = {
        role: (form.around("assistant")[0], ()) if role == PROMPT else form.around(role)
        for role in dict.fromkeys(roles)
    }
    flat, said = encoder.encode([text for turns in conversations for _, text in turns])
    words = np.zeros(len(roles), np.int64)
    words[np.array([role != PROMPT for role in roles], np.bool_)] = said
    # All that can stand in a conversation in one array: what is said, then what stands around it; a turn is three stretches of it.
    places: dict[str, list[tuple[int, int]]] = {}
    ids = [np.asarray(flat, np.int64)]
    for role, halves in around.items():
        for half in halves:
            places.setdefault(role, []).append((sum(map(len, ids)), len(half)))
            ids.append(np.asarray(half, np.int64))
    before, after = (np.array([places[role][side] for role in roles], np.int64).reshape(-1, 2) for side in (0, 1))
    starts = np.stack([before[:, 0], np.cumsum(words) - words, after[:, 0]], axis=1)
    counts = np.stack([before[:, 1], words, after[:, 1]], axis=1)
    answers = np.zeros(counts.shape, np.uint8)
    answers[np.array([role == "assistant" for role in roles], np.bool_), 1:] = 1
    turns_in = np.array([len(turns) + prompt for turns in conversations], np.int64)
    sizes, ends = np.cumsum(counts.sum(1)), np.cumsum(turns_in)
    lengths = np.diff(np.concatenate([[0], sizes])[np.concatenate([[0], ends])])
    made = gathered(np.concatenate(ids), starts.ravel(), counts.ravel())
    return Rendered(made, lengths, np.repeat(answers.ravel(), counts.ravel()))


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
