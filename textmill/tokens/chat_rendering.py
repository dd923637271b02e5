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
        branches = []
        keyword = "if"
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
    roles = dict.fromkeys(role for turns in conversations for role, _ in turns)  # in their order, for the error
    if prompt:
        roles["assistant"] = None
    around = {role: [np.array(half, np.int32) for half in turn_tokens.tokens_around(role)] for role in roles}
    flat, lengths = encoder.encode([text for turns in conversations for _, text in turns])
    ends = np.cumsum(lengths)
    edges = iter(zip((ends - lengths).tolist(), ends.tolist(), strict=True))  # of each content in `flat`
    # Every turn is three arrays of ids: before its content, the content, and after it.
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    has_loss: list[bool] = [False]
    arrays_in = []
    for turns in conversations:
        for role, _ in turns:
            before, after = around[role]
            start, stop = next(edges)
            ids += [before, flat[start:stop], after]
            has_loss += [False, role == "assistant", role == "assistant"]
        if prompt:
            ids.append(around["assistant"][0])
            has_loss.append(False)
        arrays_in.append(3 * len(turns) + prompt)
    counts = np.fromiter(map(len, ids), np.int64, len(ids))
    conversation_ends = np.cumsum(counts)[np.cumsum([0, *arrays_in])]
    joined = np.concatenate(ids).astype(np.int32)
    return Rendered(joined, np.diff(conversation_ends), np.repeat(np.array(has_loss, np.uint8), counts))


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'").replace('\\"', '"') + "'"
