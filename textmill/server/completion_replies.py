"""Replies of /v1/completions, as one object or as a stream of chunks."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from textmill.generation.requests import Done
from textmill.generation.text_chunks import TokenLogprob
from textmill.server.in_flight import GeneratedText, IndexedChunk, merge_chunks
from textmill.server.logprobs import TextOffsets, completion_logprobs
from textmill.server.request_checks import Prompt
from textmill.server.request_models import CompletionBody
from textmill.server.service import Service

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
