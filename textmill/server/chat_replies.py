"""The replies of /v1/chat/completions, whole and in pieces."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from textmill.errors import TextmillError
from textmill.generation.text_chunks import TokenLogprob
from textmill.server.completion_replies import ending_of, usage_of
from textmill.server.error_replies import HttpError
from textmill.server.in_flight import Event, Text, texts_of
from textmill.server.logprobs import chat_logprobs
from textmill.server.request_checks import Prompt, check_length, check_pairs, prompt_of
from textmill.server.request_models import ChatBody, Message
from textmill.server.service import Service

Tree = dict[str, Any]


async def chat_prompt(service: Service, messages: Sequence[Message]) -> Prompt:
    """A conversation as the model's template writes it."""
    if service.template is None:
        raise HttpError(
            400,
            f"'{service.name}' has no chat template; it continues texts: ask /v1/completions",
            code="no_chat_template",
        )
    turns = [
        {"role": "system" if turn.role == "developer" else turn.role, "content": _text_of(turn)} for turn in messages
    ]
    for place, turn in enumerate(turns):
        check_pairs(turn["content"], f"messages.{place}.content")
    check_length(service, sum(len(turn["content"]) for turn in turns), "messages")
    try:
        ids = service.template.render(turns, add_generation_prompt=True)
    except TextmillError as error:
        raise HttpError(400, str(error), field="messages") from None
    return await prompt_of(service, list(ids), "messages")


def _text_of(turn: Message) -> str:
    return turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content)


def stop_ids_of(service: Service) -> tuple[int, ...]:
    """The tokens that end an assistant's turn, where the template names them."""
    return tuple(getattr(service.template, "stop_ids", ()))


class ChatReply:
    """One answer's reply."""

    def __init__(self, service: Service, body: ChatBody, prompt: Prompt) -> None:
        self.service, self.body, self.prompt = service, body, prompt
        self.head = {
            "id": f"chatcmpl-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": service.name,
        }
        self.chunk_head = {**self.head, "object": "chat.completion.chunk"}
        self.prompt_tokens, self.new_tokens = len(prompt.ids), 0
        self.reasons: list[str] = []

    def whole(self, texts: Sequence[Text]) -> Tree:
        """The reply when every text is done."""
        choices = []
        for place, text in enumerate(texts):
            said = {"role": "assistant", "content": text.text, "refusal": None}
            choices.append(
                {"index": place, "message": said, "logprobs": self._logprobs(text.entries), **self._ending(text)}
            )
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(self.prompt_tokens, self.new_tokens),
        }

    def _ending(self, text: Text) -> Tree:
        if text.done is None:
            return {"finish_reason": None}
        self.new_tokens += text.done.tokens
        self.reasons.append(text.done.reason)
        return ending_of(text.done)

    def _logprobs(self, made: Iterable[TokenLogprob]) -> Tree | None:
        return chat_logprobs(self.service.pieces, made, self.body.top_logprobs or 0) if self.body.logprobs else None

    def begin(self) -> Iterator[Tree]:
        """The first chunk of each answer: who speaks."""
        for place in range(self.body.n or 1):
            yield self._chunk(place, {"role": "assistant", "content": ""}, None, {"finish_reason": None})

    def step(self, come: Sequence[Event]) -> Iterator[Tree]:
        """The chunks of what has come; tokens of one answer that came together go together."""
        for place, text in texts_of(come):
            logprobs = self._logprobs(text.entries) if text.entries else None
            if text.text or logprobs or text.done:
                yield self._chunk(place, {"content": text.text} if text.text else {}, logprobs, self._ending(text))

    def _chunk(self, place: int, delta: Tree, logprobs: Tree | None, ending: Tree) -> Tree:
        return {"choices": [{"index": place, "delta": delta, "logprobs": logprobs, **ending}]}

    def end(self) -> Iterator[Tree]:
        """The last chunk of a stream: the counts, where they are asked."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {"choices": [], "usage": usage_of(self.prompt_tokens, self.new_tokens)}
