"""Turns request bodies into generation requests, and checks every limit.

`read_prompts` makes token ids of the prompts of a body, `completion_requests` and `chat_requests` make the requests for
the model. Two prompts with n=2 become four requests; the second of a prompt has the next seed. Every wrong value ends
in an HttpError with status 400, which names the field as OpenAI's API does.
"""

from __future__ import annotations

import asyncio
import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation.constraints import choice_grammar, json_grammar, lark_grammar, regex_grammar
from textmill.generation.requests import Request
from textmill.server.bodies import ChatBody, CompletionBody, Message, SamplingBody
from textmill.server.errors import HttpError, quote_value
from textmill.server.service import MAX_CHOICES, Service
from textmill.server.tools import ToolUse, check_tool_use, read_arguments
from textmill.tokens.chat import AnyTemplate
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

MAX_STOPS = 16
MAX_STOP_LENGTH = 200
"""Characters of a stop string."""
MAX_BIASES = 1024
MIN_PROBABILITY = 1e-6
"""Replaces a top_p of 0, which would leave no token."""
LONG_TEXT = 20_000
"""Texts of this many characters or tokens are processed in a thread, so that they do not block the event loop."""
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was sent, and its token ids."""

    sent_text: str | None
    """None if it was sent as token ids."""
    ids: tuple[int, ...]
    tokenizer: TextTokenizer
    empty: bool = False
    """Whether the prompt was empty; `ids` is then the end-of-text token."""
    dropped: int = 0
    """Messages of the conversation that were left out because it is longer than the context."""

    @property
    def text(self) -> str:
        """The prompt as text; few replies need it."""
        return self.tokenizer.decode(list(self.ids)) if self.sent_text is None else self.sent_text


def check_generates(service: Service) -> None:
    """Raise if the model does not continue texts."""
    if not service.generates:
        paths = ["POST /fill"] if service.masked_texts else []
        paths += ["POST /v1/embeddings"] if service.text_encoder else []
        message = "this model predicts masked tokens, not the next one, so it cannot continue texts or chat"
        raise HttpError(400, f"{message}; use {' or '.join(paths)}", code="cannot_generate")


async def encode(service: Service, text: str, field: str = "prompt") -> list[int]:
    """Return a text's token ids."""
    check_surrogates(text, field)
    tokenizer = service.model.tokenizer
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text)
    # encode_many releases the interpreter lock, unlike encode.
    return await asyncio.to_thread(lambda: next(tokenizer.encode_many([text])).tolist())


def check_surrogates(text: str, field: str) -> None:
    """Raise if a text has a lone surrogate, which cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{field}: has a lone surrogate (half of a character); send UTF-8 text"
        raise HttpError(400, message, field=field.partition(".")[0]) from None


async def decode(service: Service, ids: list[int]) -> str:
    """Return the text of token ids."""
    tokenizer = service.model.tokenizer
    if len(ids) < LONG_TEXT:
        return tokenizer.decode(ids)
    return await asyncio.to_thread(lambda: next(tokenizer.decode_many([ids])))


async def read_prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Read all prompts of a completion request."""
    prompts: list[str | list[int]]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        prompts = [body.prompt]
    else:
        prompts = list(body.prompt)  # type: ignore[arg-type]
    if not prompts:
        raise HttpError(400, "prompt: is empty; send at least one text or one token", field="prompt")
    _check_count(service, len(prompts) * (body.n or 1))
    return [await read_prompt(service, prompt) for prompt in prompts]


async def read_prompt(service: Service, text_or_ids: str | list[int], field: str = "prompt") -> Prompt:
    """Read one prompt and check its length."""
    tokenizer = service.model.tokenizer
    if isinstance(text_or_ids, str):
        check_characters(service, len(text_or_ids), field)
        ids = await encode(service, text_or_ids, field)
        prompt = Prompt(text_or_ids, tuple(ids or [tokenizer.eos_id]), tokenizer, not ids)
    else:
        if not text_or_ids:
            raise HttpError(400, f"{field}: is an empty list; send at least one token", field=field)
        _check_tokens(service, len(text_or_ids), field)
        check_ids(service, text_or_ids, field)
        prompt = Prompt(None, tuple(text_or_ids), tokenizer)
    _check_tokens(service, len(prompt.ids), field)
    return prompt


def find_template(service: Service) -> AnyTemplate:
    """Return the model's chat template; raise if it has none."""
    if service.template is None:
        raise HttpError(
            400,
            f"'{service.name}' has no chat template; use /v1/completions to continue a text",
            code="no_chat_template",
        )
    return service.template


async def read_chat_prompt(
    service: Service, messages: Sequence[Message], tool_use: ToolUse, max_tokens: int | None = None
) -> Prompt:
    """Render a conversation with the model's chat template; leave out its oldest turns if it is too long."""
    template = find_template(service)
    turns = [read_turn(message, f"messages.{index}") for index, message in enumerate(messages)]
    tools = tool_use.descriptions()
    check_surrogates(json.dumps(tools, ensure_ascii=False), "tools")
    conversation = Conversation(turns)
    starts = conversation.list_starts(service.longest_text) if service.config.drop_oldest else [0]
    check_characters(service, conversation.count_characters(starts[0]), "messages")

    def render(dropped: int) -> list[int]:
        return template.render(
            tool_use.to_messages(conversation.without(dropped)), True, tools if tool_use.known else ()
        )

    space = min(max_tokens or service.sample.max_tokens, service.model.positions // 4)
    longest = service.model.positions - max(space, 1)
    try:
        dropped = starts[0]
        ids = render(dropped)
        if len(ids) > longest and len(starts) > 1:
            place = bisect_left(starts, True, lo=1, hi=len(starts) - 1, key=lambda start: len(render(start)) <= longest)
            dropped = starts[place]
            ids = render(dropped)
    except TextmillError as error:
        raise HttpError(400, str(error), field="messages") from None
    return replace(await read_prompt(service, ids, "messages"), dropped=dropped)


class Conversation:
    """Messages whose oldest turns may be dropped. System messages at the start stay."""

    def __init__(self, turns: Sequence[dict[str, Any]]) -> None:
        self._turns = turns
        self._system = next((index for index, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
        self._characters_before = [0, *accumulate(len(turn["content"]) for turn in turns)]

    def list_starts(self, characters: float) -> list[int]:
        """Return how many messages may be dropped: none, or all before a later one of the user.

        Without those that leave more than this many characters; at least one.
        """
        roles = [turn["role"] for turn in self._turns[self._system :]]
        starts = [0, *(index for index in range(1, len(roles)) if roles[index] == "user")]
        return [start for start in starts if self.count_characters(start) <= characters] or starts[-1:]

    def count_characters(self, dropped: int) -> int:
        """Return the characters of what is left."""
        before = self._characters_before
        return before[-1] - before[self._system + dropped] + before[self._system]

    def without(self, dropped: int) -> list[dict[str, Any]]:
        """Return what is left if this many messages are dropped."""
        return [*self._turns[: self._system], *self._turns[self._system + dropped :]]


def read_turn(message: Message, place: str) -> dict[str, Any]:
    """Return a message as a chat template reads it; `place` names it in errors."""
    if message.content is None and not message.tool_calls:
        raise HttpError(400, f"{place}.content: is missing", field="messages")
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = read_content(message)
    check_surrogates(turn["content"], f"{place}.content")
    if message.tool_calls:
        calls = []
        for number, call in enumerate(message.tool_calls):
            field = f"{place}.tool_calls.{number}.function"
            arguments = read_arguments(call.function.arguments, f"{field}.arguments")
            function = {"name": call.function.name, "arguments": arguments}
            check_surrogates(json.dumps(function, ensure_ascii=False), field)
            calls.append({"id": call.id, "type": "function", "function": function})
        turn["tool_calls"] = calls
    return {**turn, "tool_call_id": message.tool_call_id} if message.tool_call_id else turn


def read_content(message: Message) -> str:
    """Return the text of a message."""
    if message.content is None:
        return ""
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)


def _check_tokens(service: Service, tokens: int, field: str) -> None:
    if tokens > service.longest_prompt:
        message = f"{field}: {tokens:,} tokens; the limit is {service.longest_prompt:,}; send a shorter one"
        raise HttpError(400, message, field=field, code="context_length_exceeded")


def check_characters(service: Service, characters: int, field: str) -> None:
    """Raise if a text is too long whatever its tokens are, without the work of encoding it."""
    if characters > service.longest_text:
        limit = f"more than {service.longest_prompt:,} tokens can hold"
        message = f"{field}: {characters:,} characters, {limit}; send a shorter one"
        raise HttpError(400, message, field=field, code="context_length_exceeded")


def check_ids(service: Service, ids: Sequence[int], field: str) -> None:
    """Raise if an id is not a token."""
    vocab = service.model.vocab
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        unknown = next(id_ for id_ in ids if not 0 <= id_ < vocab)
        message = f"{field}: {quote_value(unknown)} is not a token id; ids are from 0 to {vocab - 1}"
        raise HttpError(400, message, field=field)


def _check_count(service: Service, count: int) -> None:
    limit = min(MAX_CHOICES, service.config.slots + service.config.queue)
    if count > limit:
        message = f"n: {quote_value(count)} texts in one request (prompts times n); the limit is {limit}"
        raise HttpError(400, message, field="n")


def completion_requests(service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> list[Request]:
    """Return the generation requests of a completion: each prompt n times."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of: is only supported with the value of n; remove it", field="best_of")
    if body.stream and body.echo and body.logprobs is not None:
        message = "stream: log-probabilities of an echoed prompt cannot be streamed; remove stream or echo"
        raise HttpError(400, message, field="stream")
    # max_tokens 0 scores the prompt only. The model still generates one token, which the reply leaves out.
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    sample = sampling_settings(service, body, max_tokens)
    logprobs = 0 if body.logprobs is None else max(body.logprobs, 1)
    return _build_requests(service, body, sample, prompts, logprobs, bool(body.echo) and body.logprobs is not None)


def chat_requests(service: Service, body: ChatBody, prompt: Prompt, tool_use: ToolUse) -> list[Request]:
    """Return the generation requests of a chat completion: the conversation n times."""
    _check_count(service, body.n or 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs: needs logprobs to be true", field="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise HttpError(400, "max_tokens: differs from max_completion_tokens; send one of them", field="max_tokens")
    sample = sampling_settings(service, body, body.max_completion_tokens or body.max_tokens)
    logprobs = max(body.top_logprobs or 0, 1) if body.logprobs else 0
    stop_ids = () if service.template is None else service.template.stop_ids
    grammar = check_tool_use(body, tool_use)
    requests = _build_requests(service, body, sample, [prompt], logprobs, False, stop_ids)
    return [replace(request, grammar=grammar) for request in requests] if grammar else requests


def _build_requests(
    service: Service,
    body: SamplingBody,
    sample: SampleConfig,
    prompts: Sequence[Prompt],
    logprobs: int,
    echo: bool,
    stop_ids: Sequence[int] = (),
) -> list[Request]:
    """Each prompt n times; `logprobs`: so many of the likeliest tokens at each place; `echo`: of the prompt too."""
    stop = _read_stops(service, body)
    bias = _read_biases(service, body)
    check_ids(service, body.stop_token_ids or [], "stop_token_ids")
    stop_ids = tuple(dict.fromkeys([*stop_ids, *(body.stop_token_ids or [])]))
    samples = [sample]
    for number in range(1, body.n or 1):
        samples.append(sample.model_copy(update={"seed": (sample.seed + number) % 2**63}))
    grammar = _read_grammar(body)
    return [
        Request(prompt.ids, seeded, stop, stop_ids, bias, logprobs, echo, grammar)
        for prompt in prompts
        for seeded in samples
    ]


def _read_grammar(body: SamplingBody) -> str:
    """Return the grammar that the text must follow; empty if there is none."""
    wanted = body.response_format
    json_format = wanted if wanted is not None and wanted.type != "text" else None
    given = {"choices": body.choices, "regex": body.regex, "grammar": body.grammar, "response_format": json_format}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise HttpError(400, f"{names[0]}: not together with {names[1]}; send one of them", field=names[0])
    try:
        if body.choices is not None:
            return choice_grammar(body.choices, "choices")
        if body.regex is not None:
            return regex_grammar(body.regex, "regex")
        if body.grammar is not None:
            return lark_grammar(body.grammar, "grammar")
        if json_format is None:
            return ""
        if json_format.type == "json_object":
            return json_grammar({"type": "object"}, "response_format")
        if json_format.json_schema is None:
            raise HttpError(400, "response_format.json_schema: is missing", field="response_format")
        return json_grammar(json_format.json_schema.schema_, "response_format.json_schema.schema")
    except TextmillError as error:
        raise HttpError(400, str(error), field=names[0]) from None


def sampling_settings(service: Service, body: SamplingBody, max_tokens: int | None) -> SampleConfig:
    """Return the sampling settings of a request; what it leaves out comes from the server's settings."""
    settings = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    if "top_p" in settings:
        settings["top_p"] = max(settings["top_p"], MIN_PROBABILITY)
    limit = service.config.max_tokens
    if max_tokens is not None and max_tokens > limit:
        message = f"max_tokens: {quote_value(max_tokens)} is above the server's limit of {limit}"
        raise HttpError(400, message, field="max_tokens")
    settings["max_tokens"] = max_tokens or min(service.sample.max_tokens, limit)
    if body.min_tokens is None:
        settings["min_tokens"] = min(service.sample.min_tokens, settings["max_tokens"])
    elif body.min_tokens > settings["max_tokens"]:
        message = f"min_tokens: {quote_value(body.min_tokens)} is above max_tokens, {settings['max_tokens']}"
        raise HttpError(400, message, field="min_tokens")
    settings["seed"] = random.getrandbits(62) if body.seed is None else body.seed % 2**63
    return service.sample.model_copy(update={**settings, "prompt": None, "json_schema": None, "count": 1})


def _read_stops(service: Service, body: SamplingBody) -> tuple[str, ...]:
    if body.stop is None:
        return tuple(service.sample.stop)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(stops) > MAX_STOPS:
        raise HttpError(400, f"stop: {len(stops)} stop strings; the limit is {MAX_STOPS}", field="stop")
    for text in stops:
        if not text:
            raise HttpError(400, "stop: has an empty string, which would end every text at once", field="stop")
        if len(text) > MAX_STOP_LENGTH:
            message = f"stop: a string of {len(text)} characters; the limit is {MAX_STOP_LENGTH}"
            raise HttpError(400, message, field="stop")
        check_surrogates(text, "stop")
    return tuple(dict.fromkeys(stops))


def _read_biases(service: Service, body: SamplingBody) -> tuple[tuple[int, float], ...]:
    """JSON has token ids as texts: {"50256": -100} -> ((50256, -100.0),)."""
    bias_by_key = body.logit_bias or {}
    if len(bias_by_key) > MAX_BIASES:
        raise HttpError(400, f"logit_bias: {len(bias_by_key)} tokens; the limit is {MAX_BIASES}", field="logit_bias")
    biases: dict[int, float] = {}
    for key, value in bias_by_key.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            vocab = service.model.vocab
            message = f"logit_bias: {quote_value(key)} is not a token id; ids are from 0 to {vocab - 1}"
            raise HttpError(400, message, field="logit_bias")
        check_ids(service, [int(key)], "logit_bias")
        biases[int(key)] = float(value)
    return tuple(biases.items())
