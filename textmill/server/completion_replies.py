"""The replies of /v1/completions, whole and in pieces."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from textmill.generation.requests import Done
from textmill.generation.text_chunks import TokenLogprob
from textmill.server.in_flight import Event, Text, texts_of
from textmill.server.logprobs import Offsets, completion_logprobs
from textmill.server.request_checks import Prompt
from textmill.server.request_models import CompletionBody
from textmill.server.service import Service

REASONS = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "length", "error": "stop"}
"""How a text ended, in OpenAI's words."""
MORE = {"timeout": "time limit", "cancelled": "server stopping"}
"""What OpenAI has no word for."""

Tree = dict[str, Any]


def usage_of(prompt: int, new: int) -> Tree:
    """Counts of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def ending_of(done: Done) -> Tree:
    """How a text ended, as part of a choice."""
    told = {"finish_reason": REASONS[done.reason]}
    return told | {"ended": MORE[done.reason]} if done.reason in MORE else told


class CompletionReply:
    """One completion's reply."""

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        self.service, self.body, self.prompts, self.each = service, body, prompts, body.n or 1
        self.mute = body.max_tokens == 0
        self.head = self.chunk_head = {
            "id": f"cmpl-{random.getrandbits(96):024x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        self.offsets: dict[int, Offsets] = defaultdict(Offsets)
        """Of each text, by its place."""
        self.prompt_tokens = sum(0 if prompt.empty else len(prompt.ids) for prompt in prompts)
        self.new_tokens = 0
        self.reasons: list[str] = []

    def whole(self, texts: Sequence[Text]) -> Tree:
        """The reply when every text is done."""
        choices = []
        for place, text in enumerate(texts):
            done = self._end(text.done)
            prompt = self.prompts[place // self.each]
            said = ("" if not self.body.echo else prompt.text) + ("" if self.mute else text.text)
            choices.append(
                {"index": place, "text": said, "logprobs": self._logprobs(place, text.entries, done), **ending_of(done)}
            )
        return {**self.head, "choices": choices, "usage": usage_of(self.prompt_tokens, self.new_tokens)}

    def _end(self, done: Done | None) -> Done:
        assert done is not None
        self.new_tokens += 0 if self.mute else done.tokens
        reason = "length" if self.mute and done.reason == "stop" else done.reason
        self.reasons.append(reason)
        return done if reason == done.reason else Done("length", 0, "", prompt_logprobs=done.prompt_logprobs)

    def _logprobs(self, place: int, made: Sequence[TokenLogprob], done: Done | None) -> Tree | None:
        if self.body.logprobs is None:
            return None
        entries = [] if self.mute else list(made)
        prompt = self.prompts[place // self.each]
        if self.body.echo and done is not None and not prompt.empty:
            judged = zip(prompt.ids, done.prompt_logprobs, strict=True)
            entries = [(id_, logprob, top) for id_, (logprob, top) in judged] + entries
        return completion_logprobs(self.service.pieces, entries, self.body.logprobs, self.offsets[place])

    def begin(self) -> Iterator[Tree]:
        """The first chunks of a stream: the prompt, where it is echoed."""
        if self.body.echo:
            for place in range(len(self.prompts) * self.each):
                yield self._chunk(place, self.prompts[place // self.each].text, None)

    def step(self, come: Sequence[Event]) -> Iterator[Tree]:
        """The chunks of what has come; tokens of one text that came together go together."""
        for place, text in texts_of(come):
            logprobs = self._logprobs(place, text.entries, None) if text.entries and not self.mute else None
            said = "" if self.mute else text.text
            if text.done:
                yield self._chunk(place, said, logprobs, ending_of(self._end(text.done)))
            elif said or logprobs:
                yield self._chunk(place, said, logprobs)

    def _chunk(self, place: int, text: str, logprobs: Tree | None, ending: Tree | None = None) -> Tree:
        return {
            "choices": [{"index": place, "text": text, "logprobs": logprobs, **(ending or {"finish_reason": None})}]
        }

    def end(self) -> Iterator[Tree]:
        """The last chunk of a stream: the counts, where they are asked."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {"choices": [], "usage": usage_of(self.prompt_tokens, self.new_tokens)}
