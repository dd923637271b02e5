"""Replies of /v1/completions and /v1/chat/completions: one JSON object, or a stream of server-sent events.

A client that requests the text " mill." as a stream reads, for instance:

    data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":" mill","finish_reason":null,...}]}

    data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":".","finish_reason":"stop",...}]}

    data: [DONE]
"""

from __future__ import annotations

import asyncio
import codecs
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from textmill.generation.requests import Done, TokenLogprob
from textmill.server.bodies import ChatBody, CompletionBody, SamplingBody
from textmill.server.errors import HttpError, error_body
from textmill.server.model_requests import Prompt
from textmill.server.service import (
    IndexedChunk,
    InFlightRequest,
    ReceivedText,
    Service,
    merge_chunks,
    wait_for_disconnect,
)
from textmill.server.token_text import TokenTexts
from textmill.server.tools import CallParser, ToolUse

FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}
"""From our reason to OpenAI's `finish_reason`. A text that fails or is cancelled has none, but an error."""
TIME_LIMIT = {"ended": "time limit"}
"""An additional field of a text that reached its time limit, a reason that OpenAI does not have."""
DROPPED_MESSAGES = "X-Dropped-Messages"
"""The header that says how many of the oldest messages of a conversation were left out."""
MIN_LOGPROB = -9999.0
"""Reported for an impossible token, because JSON has no infinity."""
STALLED_SECONDS = 60.0
"""How long a client may leave an event unread."""

JsonObject = dict[str, Any]


class Reply:
    """What both kinds of reply have: the first fields, and the counts of the texts that have ended."""

    def __init__(self, service: Service, body: SamplingBody, kind: str, id_prefix: str, prompt_tokens: int) -> None:
        self.service = service
        self.head: JsonObject = {
            "id": f"{id_prefix}-{random.getrandbits(96):024x}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self.headers: dict[str, str] = {}
        self.streams_usage = body.stream_options is not None and body.stream_options.include_usage
        self.prompt_tokens = prompt_tokens
        self.new_tokens = 0
        self._reused = 0
        self.reasons: list[str] = []

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed again; with `n` each counts once, as in `prompt_tokens`."""
        return min(self._reused, self.prompt_tokens)

    def usage(self) -> JsonObject:
        """Return the token counts."""
        total = self.prompt_tokens + self.new_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}
        reused = {"prompt_tokens_details": {"cached_tokens": self.reused_tokens}} if self.reused_tokens else {}
        return {**counts, **reused}

    def last_chunks(self) -> Iterator[JsonObject]:
        """Yield the last chunk: the token counts, if the request has `include_usage`."""
        if self.streams_usage:
            yield {"choices": [], "usage": self.usage()}

    def _finish(self, done: Done | None) -> JsonObject:
        """Return the fields of a choice that state why its text ended, and count it."""
        if done is None:
            return {"finish_reason": None}
        self.new_tokens += done.tokens
        self._reused += done.reused
        self.reasons.append(done.reason)
        fields = {"finish_reason": FINISH_REASONS.get(done.reason)}
        return {**fields, **TIME_LIMIT} if done.reason == "timeout" else fields


class CompletionReply(Reply):
    """The reply to a completion request."""

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        prompt_tokens = sum(0 if prompt.empty else len(prompt.ids) for prompt in prompts)
        super().__init__(service, body, "text_completion", "cmpl", prompt_tokens)
        self.chunk_head = self.head
        self.body = body
        self.prompts = prompts
        self.texts_per_prompt = body.n or 1
        self.prompt_only = body.max_tokens == 0
        """Whether only the prompt is scored; the model's one new token is left out."""
        self.offsets: dict[int, TextOffsets] = defaultdict(TextOffsets)
        """By the text's index."""

    def build(self, texts: Sequence[ReceivedText]) -> JsonObject:
        """Return the complete reply."""
        choices = []
        for index, text in enumerate(texts):
            assert text.done is not None
            prompt = self._prompt_of(index)
            logprobs = [] if self.prompt_only else list(text.logprobs)
            if self.body.echo and self.body.logprobs is not None and not prompt.empty:
                pairs = zip(prompt.ids, text.done.prompt_logprobs, strict=True)
                logprobs = [(id_, logprob, top) for id_, (logprob, top) in pairs] + logprobs
            start = prompt.text if self.body.echo else ""
            choices.append(self._choice(index, text, self._logprobs(index, logprobs), start))
        return {**self.head, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> Iterator[JsonObject]:
        """Yield the prompts if they are echoed."""
        if self.body.echo:
            for index in range(len(self.prompts) * self.texts_per_prompt):
                yield {"choices": [self._choice(index, ReceivedText(), None, self._prompt_of(index).text)]}

    def next_chunks(self, received: Sequence[IndexedChunk]) -> Iterator[JsonObject]:
        """Yield one chunk for each text that has new tokens."""
        for index, text in merge_chunks(received):
            with_logprobs = text.logprobs and not self.prompt_only
            choice = self._choice(index, text, self._logprobs(index, text.logprobs) if with_logprobs else None)
            if choice["text"] or choice["logprobs"] or text.done:
                yield {"choices": [choice]}

    def _choice(self, index: int, text: ReceivedText, logprobs: JsonObject | None, start: str = "") -> JsonObject:
        new_text = "" if self.prompt_only else text.text
        done = text.done
        if self.prompt_only and done is not None:
            done = replace(done, tokens=0, reason="length" if done.reason == "stop" else done.reason)
        return {"index": index, "text": start + new_text, "logprobs": logprobs, **self._finish(done)}

    def _prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.texts_per_prompt]

    def _logprobs(self, index: int, logprobs: Iterable[TokenLogprob]) -> JsonObject | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(self.service.token_texts, logprobs, self.body.logprobs, self.offsets[index])


class ChatReply(Reply):
    """The reply to a chat request."""

    def __init__(self, service: Service, body: ChatBody, prompt: Prompt, tool_use: ToolUse) -> None:
        super().__init__(service, body, "chat.completion", "chatcmpl", len(prompt.ids))
        self.dropped = prompt.dropped
        if prompt.dropped:
            self.headers[DROPPED_MESSAGES] = str(prompt.dropped)
        self.chunk_head = {**self.head, "object": "chat.completion.chunk"}
        self.body = body
        self.parsers = [CallParser(tool_use.format) for _ in range(body.n or 1)] if tool_use.tools else []
        """Of each text, if there are tools."""
        self.calls: Counter[int] = Counter()
        """How many calls each text has so far."""

    def build(self, texts: Sequence[ReceivedText]) -> JsonObject:
        """Return the complete reply."""
        choices = []
        for index, text in enumerate(texts):
            content, calls = self._find_calls(index, text)
            answer: JsonObject = {"content": content}
            if calls:
                answer = {"content": content.strip() or None, "tool_calls": calls}
            message = {"role": "assistant", **answer, "refusal": None}
            logprobs = self._logprobs(text.logprobs)
            choices.append({"index": index, "message": message, "logprobs": logprobs, **self._end(index, text.done)})
        return {**self.head, "choices": choices, "usage": self.usage()}

    def usage(self) -> JsonObject:
        """Return the token counts, and how many messages were dropped."""
        return {**super().usage(), "dropped_messages": self.dropped} if self.dropped else super().usage()

    def first_chunks(self) -> Iterator[JsonObject]:
        """Yield the first chunk of each answer, which names the role."""
        for index in range(self.body.n or 1):
            delta = {"role": "assistant", "content": ""}
            yield {"choices": [{"index": index, "delta": delta, "logprobs": None, **self._finish(None)}]}

    def next_chunks(self, received: Sequence[IndexedChunk]) -> Iterator[JsonObject]:
        """Yield one chunk for each answer that has new text."""
        for index, text in merge_chunks(received):
            logprobs = self._logprobs(text.logprobs) if text.logprobs else None
            content, calls = self._find_calls(index, text)
            if content or calls or logprobs or text.done:
                delta: JsonObject = {"content": content} if content else {}
                if calls:
                    first = self.calls[index] - len(calls)
                    delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, first)]
                end = self._end(index, text.done)
                yield {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, **end}]}

    def _find_calls(self, index: int, text: ReceivedText) -> tuple[str, list[JsonObject]]:
        """Return the content of a text's next part, and its calls."""
        if not self.parsers:
            return text.text, []
        content, calls = self.parsers[index].add(text.text, ended=text.done is not None)
        self.calls[index] += len(calls)
        return content, [
            {"id": f"call_{random.getrandbits(96):024x}", "type": "function", "function": call._asdict()}
            for call in calls
        ]

    def _end(self, index: int, done: Done | None) -> JsonObject:
        fields = self._finish(done)
        has_called = fields["finish_reason"] == "stop" and self.calls[index]
        return {**fields, "finish_reason": "tool_calls"} if has_called else fields

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> JsonObject | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.token_texts, logprobs, self.body.top_logprobs or 0)


AnyReply = CompletionReply | ChatReply


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


class EventStream(Response):
    """Streams an in-flight request: the first chunks, those of new text, the last chunks, then `[DONE]`.

    `on_end` is called when all texts have ended, before the last chunks.
    """

    media_type = "text/event-stream"

    def __init__(self, in_flight: InFlightRequest, reply: AnyReply, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **reply.headers})
        del self.headers["content-length"]
        self.metrics = reply.service.metrics
        self.in_flight = in_flight
        self.reply = reply
        self.on_end = on_end
        # What all chunks begin with, encoded once.
        self.head = to_json_bytes(reply.chunk_head).removesuffix(b"}") + b","
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
                self.metrics.disconnects += 1
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
                    self.metrics.first_token.add(self.in_flight.seconds())
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
                self.metrics.timeouts += 1


def to_json_bytes(value: JsonObject) -> bytes:
    """Encode an object as JSON; NaN and infinity become null."""
    return to_json(value, inf_nan_mode="null")


def _format_events(objects: Iterable[JsonObject], head: bytes = b"{") -> bytes:
    """Return objects as events; `head` replaces the opening brace of each."""
    return b"".join([b"data: %b%b\n\n" % (head, to_json_bytes(one)[1:]) for one in objects])
