"""Replies of /v1/chat/completions, as one object or as a stream of chunks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from textmill.errors import TextmillError
from textmill.generation.text_chunks import TokenLogprob
from textmill.server.completion_replies import finish_fields, usage_fields
from textmill.server.error_replies import HttpError
from textmill.server.in_flight import GeneratedText, IndexedChunk, merge_chunks
from textmill.server.logprobs import chat_logprobs
from textmill.server.request_checks import Prompt, check_characters, check_surrogates, read_prompt
from textmill.server.request_models import ChatBody, Message
from textmill.server.service import Service

JsonObject = dict[str, Any]


async def read_chat_prompt(service: Service, messages: Sequence[Message]) -> Prompt:
    """Render a conversation with the model's chat template."""
    if service.template is None:
        raise HttpError(
            400,
            f"'{service.name}' has no chat template; use /v1/completions to continue a text",
            code="no_chat_template",
        )
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": _read_content(message)}
        for message in messages
    ]
    for index, turn in enumerate(turns):
        check_surrogates(turn["content"], f"messages.{index}.content")
    check_characters(service, sum(len(turn["content"]) for turn in turns), "messages")
    try:
        ids = service.template.render(turns, add_generation_prompt=True)
    except TextmillError as error:
        raise HttpError(400, str(error), field="messages") from None
    return await read_prompt(service, list(ids), "messages")


def _read_content(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)


def get_stop_ids(service: Service) -> tuple[int, ...]:
    """Return the tokens that end an assistant's turn, if the template has any."""
    return tuple(getattr(service.template, "stop_ids", ()))


class ChatReply:
    """Builds the reply to one chat request."""

    def __init__(self, service: Service, body: ChatBody, prompt: Prompt) -> None:
        self.service = service
        self.body = body
        self.prompt = prompt
        self.head = {
            "id": f"chatcmpl-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": service.name,
        }
        self.chunk_head = {**self.head, "object": "chat.completion.chunk"}
        self.prompt_tokens = len(prompt.ids)
        self.new_tokens = 0
        self.reasons: list[str] = []

    def build(self, texts: Sequence[GeneratedText]) -> JsonObject:
        """Return the complete reply."""
        choices = []
        for index, text in enumerate(texts):
            message = {"role": "assistant", "content": text.text, "refusal": None}
            logprobs = self._logprobs(text.logprobs)
            choices.append({"index": index, "message": message, "logprobs": logprobs, **self._finish(text)})
        usage = usage_fields(self.prompt_tokens, self.new_tokens)
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _finish(self, text: GeneratedText) -> JsonObject:
        if text.done is None:
            return {"finish_reason": None}
        self.new_tokens += text.done.tokens
        self.reasons.append(text.done.reason)
        return finish_fields(text.done)

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> JsonObject | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.token_texts, logprobs, self.body.top_logprobs or 0)

    def first_chunks(self) -> Iterator[JsonObject]:
        """Yield the first chunk of each answer, which names the role."""
        for index in range(self.body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, {"finish_reason": None})

    def next_chunks(self, received: Sequence[IndexedChunk]) -> Iterator[JsonObject]:
        """Yield one chunk for each answer that has new text."""
        for index, text in merge_chunks(received):
            logprobs = self._logprobs(text.logprobs) if text.logprobs else None
            if text.text or logprobs or text.done:
                yield self._chunk(index, {"content": text.text} if text.text else {}, logprobs, self._finish(text))

    def _chunk(self, index: int, delta: JsonObject, logprobs: JsonObject | None, finish: JsonObject) -> JsonObject:
        return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, **finish}]}

    def last_chunks(self) -> Iterator[JsonObject]:
        """Yield the last chunk: the token counts, if the request has `include_usage`."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {"choices": [], "usage": usage_fields(self.prompt_tokens, self.new_tokens)}
