"""Renders conversations with the chat template: token ids and a loss mask, and the same template in Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config.chat import CONTENT, END, tokens_in
from textmill.corpus.document import Turn
from textmill.tokens.batches.layout import gather_ranges
from textmill.tokens.vocabulary.encoder import Encoder

Ids = tuple[int, ...]
PROMPT = ""
"""Used as a role: the generation prompt, that is the tokens before an answer of the assistant."""


@dataclass(frozen=True)
class TurnTemplates:
    """The chat template as text: for each role the special tokens before and after its content."""

    turns: tuple[tuple[str, str], ...]
    """A role and its turn, such as `<|user|>{content}<|endoftext|>`."""

    @property
    def tokens(self) -> list[str]:
        """Every special token of the template, once."""
        return list(dict.fromkeys(token for _, text in self.turns for token in tokens_in(text)))

    @property
    def stop(self) -> str:
        """The stop token: the last token of the assistant's turn."""
        return tokens_in(dict(self.turns)["assistant"])[-1]

    @property
    def prompt(self) -> str:
        """The generation prompt: what comes before the content of the assistant's turn."""
        return dict(self.turns)["assistant"].partition(CONTENT)[0]

    def to_turn_tokens(self, vocab: Mapping[str, int]) -> TurnTokens:
        """The template as token ids of a vocabulary."""

        def ids_in(half: str) -> Ids:
            return tuple(vocab[token] for token in tokens_in(half))

        halves = ((role, *text.split(CONTENT)) for role, text in self.turns)
        return TurnTokens(tuple((role, ids_in(before), ids_in(after)) for role, before, after in halves))

    def jinja(self) -> str:
        """The same template as transformers' `chat_template`; it raises an error for the same roles as `render`."""
        branches, keyword = [], "if"
        for role, text in self.turns:
            before, _, after = text.partition(CONTENT)
            turn = " + ".join([_quoted(before), "message['content']", *([_quoted(after)] if after else [])])
            branches.append(f"{{% {keyword} message['role'] == '{role}' %}}{{{{ {turn} }}}}")
            keyword = "elif"
        refusal = "{% else %}{{ raise_exception('this template has no turn of the ' + message['role']) }}{% endif %}"
        prompt = f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.prompt)} }}}}{{% endif %}}"
        return f"{{% for message in messages %}}{''.join(branches)}{refusal}{{% endfor %}}{prompt}"


def build_turn_templates(turns: Mapping[str, str], end: str) -> TurnTemplates:
    """The template of a tokenizer whose end-of-text token is `end`."""
    return TurnTemplates(tuple((role, text.replace(END, end)) for role, text in turns.items()))


@dataclass(frozen=True)
class TurnTokens:
    """The chat template as token ids of one tokenizer."""

    turns: tuple[tuple[str, Ids, Ids], ...]
    """A role, and the ids before and after its content."""

    def tokens_around(self, role: str) -> tuple[Ids, Ids]:
        """The ids before and after the content of a role."""
        for name, before, after in self.turns:
            if name == role:
                return before, after
        raise ValueError(
            f"the chat template has no turn of the {role}; use another tokenizer.chat, or leave such turns out"
        )


@dataclass(frozen=True)
class Rendered:
    """Conversations as ids, concatenated."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    """The number of tokens in each conversation."""
    loss_mask: NDArray[np.uint8]
    """1 for tokens with loss: the content of the assistant's turns and the tokens after it."""


def render(
    conversations: Sequence[Sequence[Turn]], turn_tokens: TurnTokens, encoder: Encoder, prompt: bool = False
) -> Rendered:
    """Encode conversations; `prompt`: end each one with the generation prompt.

    Content that looks like a special token is encoded as plain text.
    """
    # The role of every turn; the generation prompt is an assistant's turn without content and without tokens after it.
    roles = [role for turns in conversations for role in (*(role for role, _ in turns), *([PROMPT] if prompt else []))]
    around = {
        role: (turn_tokens.tokens_around("assistant")[0], ()) if role == PROMPT else turn_tokens.tokens_around(role)
        for role in dict.fromkeys(roles)
    }
    flat, content_lengths = encoder.encode([text for turns in conversations for _, text in turns])
    contents = np.zeros(len(roles), np.int64)
    contents[np.array([role != PROMPT for role in roles], np.bool_)] = content_lengths
    # One array with the ids of all contents, then those before and after each role; a turn is three ranges of it.
    ranges: dict[str, list[tuple[int, int]]] = {}
    ids = [np.asarray(flat, np.int64)]
    for role, halves in around.items():
        for half in halves:
            ranges.setdefault(role, []).append((sum(map(len, ids)), len(half)))
            ids.append(np.asarray(half, np.int64))
    before, after = (np.array([ranges[role][half] for role in roles], np.int64).reshape(-1, 2) for half in (0, 1))
    starts = np.stack([before[:, 0], np.cumsum(contents) - contents, after[:, 0]], axis=1)
    counts = np.stack([before[:, 1], contents, after[:, 1]], axis=1)
    has_loss = np.zeros(counts.shape, np.uint8)
    has_loss[np.array([role == "assistant" for role in roles], np.bool_), 1:] = 1
    turns_in = np.array([len(turns) + prompt for turns in conversations], np.int64)
    turn_ends, last_turns = np.cumsum(counts.sum(1)), np.cumsum(turns_in)
    lengths = np.diff(np.concatenate([[0], turn_ends])[np.concatenate([[0], last_turns])])
    rendered = gather_ranges(np.concatenate(ids), starts.ravel(), counts.ravel())
    return Rendered(rendered, lengths, np.repeat(has_loss.ravel(), counts.ravel()))


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
