"""From a request's body to what the scheduler is asked, every limit checked on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from textmill.config import SampleConfig
from textmill.generation.requests import Request
from textmill.server.error_replies import HttpError, quote_value
from textmill.server.request_models import ChatBody, CompletionBody, Sampling
from textmill.server.service import Service
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

LONG_STOP = 200
"""Characters of a stop string at most."""
MANY_BIASES = 1024
LEAST = 1e-6
"""What a probability of 0 stands for, which would leave no token at all."""
LONG_TEXT = 20_000
"""Characters, or tokens, from which a text is encoded, decoded and told beside the event loop."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was given and as the model gets it."""

    given: str | None
    """None: as ids."""
    ids: tuple[int, ...]
    tokenizer: TextTokenizer
    empty: bool = False
    """Whether the one id was put there because there was nothing."""

    @property
    def text(self) -> str:
        """The prompt as text, which few replies want."""
        return self.tokenizer.decode(list(self.ids)) if self.given is None else self.given


def check_model(service: Service, name: str | None) -> None:
    """Refuse a model that is not here."""
    if name is not None and name != service.name:
        message = f"model: {quote_value(name)} is not here; this server has '{service.name}'"
        raise HttpError(404, message, field="model", code="model_not_found")


async def encode(service: Service, text: str, field: str = "prompt") -> list[int]:
    """A text's ids; a long one does not hold up the other requests."""
    check_pairs(text, field)
    tokenizer = service.scheduler.tokenizer
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text)
    # The way for many texts lets other threads work meanwhile, unlike the way for one.
    return await asyncio.to_thread(lambda: next(tokenizer.encode_many([text])).tolist())


def check_pairs(text: str, field: str) -> None:
    """Refuse a text that holds half of a character, which no model says and nothing can send."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HttpError(
            400, f"{field}: holds half of a character pair; send it as UTF-8 text", field=field.partition(".")[0]
        ) from None


async def decode(service: Service, ids: list[int]) -> str:
    """The text of ids; a long one does not hold up the other requests."""
    tokenizer = service.scheduler.tokenizer
    if len(ids) < LONG_TEXT:
        return tokenizer.decode(ids)
    return await asyncio.to_thread(lambda: next(tokenizer.decode_many([ids])))


async def prompts_of(service: Service, body: CompletionBody) -> list[Prompt]:
    """Every prompt of a completion."""
    given: list[str | list[int]]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        given = [body.prompt]
    else:
        given = list(body.prompt)  # type: ignore[arg-type]
    if not given:
        raise HttpError(400, "prompt: is empty; give one text or one token at least", field="prompt")
    _check_count(service, len(given) * (body.n or 1))
    return [await prompt_of(service, one) for one in given]


async def prompt_of(service: Service, given: str | list[int], field: str = "prompt") -> Prompt:
    """One prompt, within the limits."""
    tokenizer = service.scheduler.tokenizer
    if isinstance(given, str):
        check_length(service, len(given), field)
        ids = await encode(service, given, field)
        prompt = Prompt(given, tuple(ids or [tokenizer.end]), tokenizer, not ids)
    else:
        if not given:
            raise HttpError(400, f"{field}: is an empty list; give one token at least", field=field)
        _check_room(service, len(given), field)
        check_ids(service, given, field)
        prompt = Prompt(None, tuple(given), tokenizer)
    _check_room(service, len(prompt.ids), field)
    return prompt


def _check_room(service: Service, found: int, field: str) -> None:
    if found > service.longest_prompt:
        message = f"{field}: {found:,} tokens, with room for {service.longest_prompt:,}; send a shorter one"
        raise HttpError(400, message, field=field, code="context_length_exceeded")


def check_length(service: Service, characters: int, field: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before the work of finding them."""
    if characters > service.longest_text:
        message = f"{field}: {characters:,} characters, which {service.longest_prompt:,} tokens cannot hold; send a shorter one"
        raise HttpError(400, message, field=field, code="context_length_exceeded")


def check_ids(service: Service, ids: Sequence[int], field: str) -> None:
    """Refuse ids that are no tokens."""
    vocab = service.scheduler.vocab
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        strange = next(id_ for id_ in ids if not 0 <= id_ < vocab)
        raise HttpError(
            400, f"{field}: {quote_value(strange)} is no token id; they go from 0 to {vocab - 1}", field=field
        )


def _check_count(service: Service, count: int) -> None:
    most = min(service.config.max_choices, service.config.slots + service.config.queue)
    if count > most:
        raise HttpError(
            400, f"n: {quote_value(count)} texts in one request, prompts times n; {most} at most", field="n"
        )


def completion_requests(service: Service, body: CompletionBody, prompts: Sequence[Prompt]) -> list[Request]:
    """What the scheduler is asked for a completion: each prompt n times."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(
            400, "best_of: choosing among more texts than n is not supported; leave it out", field="best_of"
        )
    if body.stream and body.echo and body.logprobs is not None:
        raise HttpError(
            400,
            "stream: the log-probabilities of an echoed prompt are not streamed; leave out stream, or echo",
            field="stream",
        )
    # A prompt can be judged without a continuation; the model is asked for one token, which is not told.
    most = 1 if body.max_tokens == 0 else body.max_tokens
    sample = sample_of(service, body, most)
    top = 0 if body.logprobs is None else max(body.logprobs, 1)
    return _each(service, body, sample, prompts, top, bool(body.echo) and body.logprobs is not None)


def chat_requests(service: Service, body: ChatBody, prompt: Prompt, stop_ids: Sequence[int]) -> list[Request]:
    """What the scheduler is asked for an answer: the conversation n times."""
    _check_count(service, body.n or 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs: wants logprobs to be true", field="top_logprobs")
    both = body.max_completion_tokens is not None and body.max_tokens is not None
    if both and body.max_completion_tokens != body.max_tokens:
        raise HttpError(400, "max_tokens: differs from max_completion_tokens; send one of them", field="max_tokens")
    sample = sample_of(service, body, body.max_completion_tokens or body.max_tokens)
    top = max(body.top_logprobs or 0, 1) if body.logprobs else 0
    return _each(service, body, sample, [prompt], top, False, stop_ids)


def _each(
    service: Service,
    body: Sampling,
    sample: SampleConfig,
    prompts: Sequence[Prompt],
    top: int,
    echo: bool,
    stop_ids: Sequence[int] = (),
) -> list[Request]:
    stop, bias = _stops(service, body), _biases(service, body)
    check_ids(service, body.stop_token_ids or [], "stop_token_ids")
    stop_ids = tuple(dict.fromkeys([*stop_ids, *(body.stop_token_ids or [])]))
    others = [sample.model_copy(update={"seed": (sample.seed + place) % 2**63}) for place in range(1, body.n or 1)]
    return [
        Request(prompt.ids, seeded, stop, stop_ids, bias, top, echo)
        for prompt in prompts
        for seeded in (sample, *others)
    ]


def sample_of(service: Service, body: Sampling, max_tokens: int | None) -> SampleConfig:
    """The sampling settings of a request: what it says, and the server's own for the rest."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    said = {name: value for name in (*names, "min_tokens") if (value := getattr(body, name)) is not None}
    for name in ("top_p", "typical_p"):
        if name in said:
            said[name] = max(said[name], LEAST)
    most = service.config.max_tokens
    if max_tokens is not None and max_tokens > most:
        raise HttpError(
            400, f"max_tokens: {quote_value(max_tokens)} is above the server's limit of {most}", field="max_tokens"
        )
    said["max_tokens"] = max_tokens or min(service.sample.max_tokens, most)
    least = said.get("min_tokens", 0)
    if least > said["max_tokens"]:
        raise HttpError(
            400, f"min_tokens: {quote_value(least)} is above max_tokens, {said['max_tokens']}", field="min_tokens"
        )
    said["min_tokens"] = least or min(service.sample.min_tokens, said["max_tokens"])
    said["seed"] = random.getrandbits(62) if body.seed is None else body.seed % 2**63
    return service.sample.model_copy(update={**said, "prompt": None, "count": 1})


def _stops(service: Service, body: Sampling) -> tuple[str, ...]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > service.config.max_stops:
        raise HttpError(400, f"stop: {len(given)} texts; {service.config.max_stops} at most", field="stop")
    for text in given:
        if not text:
            raise HttpError(
                400, "stop: holds an empty text, which would end every text at once; leave it out", field="stop"
            )
        if len(text) > LONG_STOP:
            raise HttpError(400, f"stop: a text of {len(text)} characters; {LONG_STOP} at most", field="stop")
        check_pairs(text, "stop")
    return tuple(dict.fromkeys(given))


def _biases(service: Service, body: Sampling) -> tuple[tuple[int, float], ...]:
    given = body.logit_bias or {}
    if len(given) > MANY_BIASES:
        raise HttpError(400, f"logit_bias: {len(given)} tokens; {MANY_BIASES} at most", field="logit_bias")
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise HttpError(
                400,
                f"logit_bias: {quote_value(key)} is no token id; give ids, from 0 to {service.scheduler.vocab - 1}",
                field="logit_bias",
            )
        check_ids(service, [int(key)], "logit_bias")
        biases[int(key)] = float(value)
    return tuple(biases.items())
