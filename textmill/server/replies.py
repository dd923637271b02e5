"""Replies of /v1/completions, as one object or as a stream of chunks."""

from __future__ import annotations

import asyncio
import codecs
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from textmill.generation.requests import Done, TokenLogprob
from textmill.server.bodies import ChatBody, CompletionBody
from textmill.server.errors import HttpError, error_body
from textmill.server.request_checks import Prompt
from textmill.server.service import (
    GeneratedText,
    IndexedChunk,
    InFlightRequest,
    Service,
    merge_chunks,
    wait_for_disconnect,
)
from textmill.server.token_text import TokenTexts

FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "length", "error": "stop"}
"""From our reason to OpenAI's `finish_reason`."""
ENDED = {"timeout": "time limit", "cancelled": "server stopping"}
"""The additional field `ended`, for reasons that OpenAI does not have."""

JsonObject = dict[str, Any]


def usage_fields(prompt: int, new: int) -> JsonObject:
    """Return the token counts of a reply."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def finish_fields(done: Done) -> JsonObject:
    """Return the fields of a choice that state why its text ended."""
    fields = {"finish_reason": FINISH_REASONS[done.reason]}
    return fields | {"ended": ENDED[done.reason]} if done.reason in ENDED else fields


class CompletionReply:
    """Builds the reply to one completion request."""

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        self.service = service
        self.body = body
        self.prompts = prompts
        self.texts_per_prompt = body.n or 1
        self.prompt_only = body.max_tokens == 0
        """Whether only the prompt is scored; the model's one new token is left out."""
        self.head = self.chunk_head = {
            "id": f"cmpl-{random.getrandbits(96):024x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        self.offsets: dict[int, TextOffsets] = defaultdict(TextOffsets)
        """By the text's index."""
        self.prompt_tokens = sum(0 if prompt.empty else len(prompt.ids) for prompt in prompts)
        self.new_tokens = 0
        self.reasons: list[str] = []

    def build(self, texts: Sequence[GeneratedText]) -> JsonObject:
        """Return the complete reply."""
        choices = []
        for index, text in enumerate(texts):
            done = self._finish(text.done)
            prompt = self.prompts[index // self.texts_per_prompt]
            full_text = (prompt.text if self.body.echo else "") + ("" if self.prompt_only else text.text)
            logprobs = self._logprobs(index, text.logprobs, done)
            choices.append({"index": index, "text": full_text, "logprobs": logprobs, **finish_fields(done)})
        return {**self.head, "choices": choices, "usage": usage_fields(self.prompt_tokens, self.new_tokens)}

    def _finish(self, done: Done | None) -> Done:
        assert done is not None
        self.new_tokens += 0 if self.prompt_only else done.tokens
        reason = "length" if self.prompt_only and done.reason == "stop" else done.reason
        self.reasons.append(reason)
        return done if reason == done.reason else Done("length", 0, "", prompt_logprobs=done.prompt_logprobs)

    def _logprobs(self, index: int, new: Sequence[TokenLogprob], done: Done | None) -> JsonObject | None:
        if self.body.logprobs is None:
            return None
        logprobs = [] if self.prompt_only else list(new)
        prompt = self.prompts[index // self.texts_per_prompt]
        if self.body.echo and done is not None and not prompt.empty:
            pairs = zip(prompt.ids, done.prompt_logprobs, strict=True)
            logprobs = [(id_, logprob, top) for id_, (logprob, top) in pairs] + logprobs
        return completion_logprobs(self.service.token_texts, logprobs, self.body.logprobs, self.offsets[index])

    def first_chunks(self) -> Iterator[JsonObject]:
        """Yield the prompts if they are echoed."""
        if self.body.echo:
            for index in range(len(self.prompts) * self.texts_per_prompt):
                yield self._chunk(index, self.prompts[index // self.texts_per_prompt].text, None)

    def next_chunks(self, received: Sequence[IndexedChunk]) -> Iterator[JsonObject]:
        """Yield one chunk for each text that has new tokens."""
        for index, text in merge_chunks(received):
            logprobs = self._logprobs(index, text.logprobs, None) if text.logprobs and not self.prompt_only else None
            new_text = "" if self.prompt_only else text.text
            if text.done:
                yield self._chunk(index, new_text, logprobs, finish_fields(self._finish(text.done)))
            elif new_text or logprobs:
                yield self._chunk(index, new_text, logprobs)

    def _chunk(
        self, index: int, text: str, logprobs: JsonObject | None, finish: JsonObject | None = None
    ) -> JsonObject:
        return {
            "choices": [{"index": index, "text": text, "logprobs": logprobs, **(finish or {"finish_reason": None})}]
        }

    def last_chunks(self) -> Iterator[JsonObject]:
        """Yield the last chunk: the token counts, if the request has `include_usage`."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {"choices": [], "usage": usage_fields(self.prompt_tokens, self.new_tokens)}


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


MIN_LOGPROB = -9999.0
"""Reported for an impossible token, because JSON has no infinity."""


class TextOffsets:
    """Computes where in the text each token starts, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, raw: bytes) -> int:
        """Return the offset of the next token, which has these bytes."""
        offset = self._characters
        self._characters += len(self._decoder.decode(raw))
        return offset


def completion_logprobs(
    texts: TokenTexts, logprobs: Iterable[TokenLogprob], count: int, offsets: TextOffsets
) -> dict[str, list[Any]]:
    """Return the format of /v1/completions: four lists with one item per token."""
    fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for id_, logprob, top in logprobs:
        fields["tokens"].append(texts.get_text(id_))
        fields["token_logprobs"].append(None if logprob is None else _finite(logprob))
        fields["top_logprobs"].append(None if logprob is None else _by_text(texts, [*top[:count], (id_, logprob)]))
        fields["text_offset"].append(offsets.next(texts.get_bytes(id_)))
    return fields


def _by_text(texts: TokenTexts, logprobs: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Return log-probabilities by the token's text; if two tokens have the same text, the second by its id."""
    found: dict[str, float] = {}
    for id_, logprob in dict(logprobs).items():
        text = texts.get_text(id_)
        found[f"token_id:{id_}" if text in found else text] = _finite(logprob)
    return found


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[TokenLogprob], count: int) -> dict[str, Any]:
    """Return the format of /v1/chat/completions: a list with one object per token."""
    content = []
    for id_, logprob, top in logprobs:
        most_likely = [_chat_token(texts, other, value) for other, value in top[:count]]
        token = _chat_token(texts, id_, MIN_LOGPROB if logprob is None else logprob)
        content.append({**token, "top_logprobs": most_likely})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, id_: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.get_text(id_), "logprob": _finite(logprob), "bytes": list(texts.get_bytes(id_))}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


STALLED_SECONDS = 60.0
"""How long a client may leave an event unread."""


class StreamedReply(Protocol):
    """The events of one request, in the format of its route."""

    chunk_head: JsonObject
    """The fields with which every chunk starts."""

    def first_chunks(self) -> Iterable[JsonObject]: ...
    def next_chunks(self, received: list[IndexedChunk]) -> Iterable[JsonObject]: ...
    def last_chunks(self) -> Iterable[JsonObject]: ...


class EventStream(Response):
    """Streams an in-flight request: the first chunks, those of new text, the last chunks, then `[DONE]`.

    `on_end` is called when all texts have ended, before the last chunks.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, in_flight: InFlightRequest, reply: StreamedReply, on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service = service
        self.in_flight = in_flight
        self.reply = reply
        self.on_end = on_end
        self.head = to_json_bytes(reply.chunk_head).removesuffix(b"}") + b","  # encoded once for all chunks
        self.send_started = math.inf
        """When the current send started. It blocks while the client does not read (backpressure).

        One check every 15 s replaces a timer per event, which would cost as much as the event.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancel the texts if the client disconnects or stops reading."""
        sender = asyncio.create_task(self._send_all(send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        ended: set[asyncio.Task[None]] = set()
        try:
            while not ended and not self._is_stalled():
                ended, _ = await asyncio.wait(
                    {sender, disconnect}, timeout=STALLED_SECONDS / 4, return_when=asyncio.FIRST_COMPLETED
                )
            error = sender.exception() if sender.done() else None
            if not sender.done() or isinstance(error, OSError):  # the client has left, or does not read
                self.service.metrics.disconnects += 1
                scope.setdefault("log_fields", {})["ended"] = "left"
            elif error is not None:
                raise error
        finally:
            sender.cancel()
            disconnect.cancel()
            if not self.in_flight.complete:
                self.in_flight.cancel()

    def _is_stalled(self) -> bool:
        return time.monotonic() - self.send_started > STALLED_SECONDS

    async def _send_all(self, send: Send) -> None:
        async def send_data(data: bytes, more: bool = True) -> None:
            self.send_started = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self.send_started = math.inf

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send_data(_format_events(self.reply.first_chunks(), self.head))
        first = True
        try:
            async for received in self.in_flight.chunks():
                if not received:  # a keep-alive comment, so that no proxy closes the connection
                    await send_data(b": waiting\n\n")
                    continue
                if first:
                    first = False
                    self.service.metrics.first_token.add(self.in_flight.seconds())
                events = _format_events(self.reply.next_chunks(received), self.head)
                await send_data(events + _format_events(self._find_errors(received)))
        except HttpError as error:
            await send_data(_format_events([error_body(error.status, error.message, code=error.code)]))
        self.on_end()
        await send_data(_format_events(self.reply.last_chunks(), self.head) + b"data: [DONE]\n\n", more=False)

    def _find_errors(self, received: list[IndexedChunk]) -> Iterable[JsonObject]:
        """Yield an error event if the model failed or the server is stopping."""
        for done in [chunk.done for _, chunk in received if chunk.done is not None]:
            if done.reason == "error":
                yield error_body(500, done.message or "the model failed; see the server's log", code="model_error")
            elif done.reason == "cancelled":
                yield error_body(503, "the server is stopping; the text was ended early", code="stopping")
            elif done.reason == "timeout":
                self.service.metrics.timeouts += 1


def to_json_bytes(value: JsonObject) -> bytes:
    """Encode an object as JSON; NaN and infinity become null."""
    return to_json(value, inf_nan_mode="null")


def _format_events(objects: Iterable[JsonObject], head: bytes = b"{") -> bytes:
    """Return objects as events; `head` replaces the opening brace of each."""
    return b"".join([b"data: %b%b\n\n" % (head, to_json_bytes(one)[1:]) for one in objects])
