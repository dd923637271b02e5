"""Conversations as token ids: with a loss mask for training, and as the prompt of the next answer.

A model that textmill finetuned has a `ChatTemplate` of special tokens around each turn, whose ids are joined without
going through text. A model of others has a `JinjaTemplate`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from textmill.corpus.document import Turn
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.encoders import Encoder, ReferenceEncoder
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, TurnTokens, open_tokenizer

AnyTemplate: TypeAlias = "ChatTemplate | JinjaTemplate"
Message = dict[str, str]
"""One message of a conversation, with the keys "role" and "content"."""

MARK = "\ue000{}\ue001"
"""In place of a message while its template is rendered; characters for private use, which no template has."""
MARKS = re.compile("\ue000([0-9]+)\ue001")
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of transformers around what the assistant wrote; they write nothing."""
STEPS = "textmill steps"
MAX_STEPS = 200_000
"""Turns of loops and calls in one rendering: a template that would never end is refused."""
MAX_LENGTH = 10_000_000
"""Of a text or a list that a template repeats."""


def open_template(folder: Path) -> AnyTemplate | None:
    """The chat template of the tokenizer in a folder: textmill's own, or Jinja of another origin."""
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat is not None and tokenizer.turn_tokens is not None:
        return ChatTemplate(tokenizer, tokenizer.turn_tokens, tokenizer.chat.jinja())
    return JinjaTemplate(tokenizer, tokenizer.jinja) if tokenizer.jinja is not None else None


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

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """The conversation as ids, followed by the tokens that start the assistant's answer if requested.

        The template does not know `tools`.
        """
        turns = [(message["role"], message["content"]) for message in messages]
        try:
            rendered = render([turns], self.turn_tokens, ReferenceEncoder(self.tokenizer), prompt=add_generation_prompt)
        except ValueError as error:  # a role that the template has no turn for
            raise TextmillError(str(error)) from None
        ids: list[int] = rendered.ids.tolist()
        return ids


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


@dataclass(frozen=True)
class Rendered:
    """Conversations as ids, concatenated."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    """The number of tokens in each conversation."""
    loss_mask: NDArray[np.uint8]
    """1 for tokens with loss: the content of the assistant's turns and the tokens after it."""


@dataclass(frozen=True)
class JinjaTemplate:
    """The chat template that came with a model, run in Jinja's sandbox: it reaches no file, module or private name."""

    tokenizer: TextTokenizer
    jinja: str

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the ends of a text, and the special token after an assistant's message."""
        special = {id_ for id_, token in self._with_special.get_added_tokens_decoder().items() if token.special}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK.format(0)}]
        try:
            after = self.text(turns, False).rpartition(MARK.format(0))[2]
        except TextmillError:  # it wants more turns, or other ones
            after = ""
        found = [id_ for id_ in self._encode(after) if id_ in special][:1]
        return tuple(dict.fromkeys([*found, *self.tokenizer.end_ids]))

    def render(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """The conversation as ids, as transformers renders it; special tokens in messages are plain text."""
        contents = [message["content"] for message in messages]
        special = [token.content for token in self._with_special.get_added_tokens_decoder().values()]
        if not any(token in content for content in contents for token in special):
            return self._encode(self.text(messages, add_generation_prompt, tools))
        marked = [
            {**message, "content": message["content"] and MARK.format(number)}
            for number, message in enumerate(messages)
        ]
        pieces = MARKS.split(self.text(marked, add_generation_prompt, tools))
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self.tokenizer.encode(contents[int(piece)]) if place % 2 else self._encode(piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._with_special.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _with_special(self) -> Tokenizer:
        """The tokenizer, finding special tokens in a text."""
        inner = Tokenizer.from_str(self.tokenizer.inner.to_str())
        inner.encode_special_tokens = False
        return inner

    def text(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The conversation as the template writes it."""
        roles = {**self.tokenizer.roles, "eos_token": self.tokenizer.inner.id_to_token(self.tokenizer.eos_id)}
        given: dict[str, Any] = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
        }
        given[STEPS] = iter(range(MAX_STEPS))
        try:
            return str(self._compiled.render(**roles, **given, documents=None))
        except Exception as error:  # what a template can raise has no limit
            raise TextmillError(f"the model's chat template cannot render this: {error}") from None

    def _to_json(self, value: Any, indent: int | None = None) -> str:
        """The filter of templates; special tokens in the arguments of a call are escaped, and so plain text."""
        written = json.dumps(value, ensure_ascii=False, indent=indent)
        for token in self._with_special.get_added_tokens_decoder().values():
            if token.special and token.content in written:
                first = token.content[0]
                escaped = f"\\u{ord(first):04x}" if first.isascii() else json.dumps(first)[1:-1]
                written = written.replace(token.content, escaped + token.content[1:])
        return written

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = self._to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
        return environment.from_string(_bound(environment, GENERATION.sub("", self.jinja)))


def _bound(environment: Any, jinja: str) -> Any:
    """The parsed template; its loops, calls and products have limits."""
    from jinja2 import nodes, pass_context

    call = environment.call
    compute = environment.call_binop

    def count(context: Any) -> None:
        if next(context.parent[STEPS], None) is None:
            raise ValueError(f"it takes more than {MAX_STEPS:,} steps")

    @pass_context
    def counted(context: Any, values: Any) -> Iterator[Any]:
        for value in values:
            count(context)
            yield value

    def counted_call(context: Any, called: Any, *given: Any, **named: Any) -> Any:
        count(context)
        return call(context, called, *given, **named)

    def checked_product(context: Any, sign: str, left: Any, right: Any) -> Any:
        length = max((len(one) for one in (left, right) if hasattr(one, "__len__")), default=0)
        times = min((one for one in (left, right) if isinstance(one, int)), default=0)
        if length * times > MAX_LENGTH or (sign == "**" and max(abs(left), abs(right)) > 1000):
            raise ValueError(f"a result of {sign} is too large")
        return compute(context, sign, left, right)

    environment.intercepted_binops = frozenset({"*", "**"})
    environment.call = counted_call
    environment.call_binop = checked_product
    environment.filters[STEPS] = counted
    tree = environment.parse(jinja)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, STEPS, [], [], None, None, lineno=loop.lineno)
    return tree.set_environment(environment)


def _refuse(message: str) -> None:
    raise ValueError(message)
