"""The routes /v1/embeddings, with OpenAI's fields, and /fill, for the masks of a text."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.generation.encoders.embedding_texts import EncodedText, TextEncoder, format_vector
from textmill.generation.encoders.fill_texts import MaskedTexts
from textmill.generation.requests import EmbedRequest, EncoderRequest, FillRequest
from textmill.server.error_replies import HttpError
from textmill.server.in_flight import start_request, wait_for_texts
from textmill.server.json_routes import post
from textmill.server.request_checks import check_ids, check_model, check_surrogates
from textmill.server.request_models import EmbeddingBody, FillBody
from textmill.server.service import Service

DEFAULT_CHOICES = 5
MAX_CHOICES = 100_000
"""Tokens that one request may ask for, over all of its masks; each takes about 60 bytes of the reply."""
JSON = "application/json"


def add_encoding(routes: APIRouter, service: Service) -> None:
    """Add both routes."""

    @post(routes, "/v1/embeddings")
    async def embeddings(body: EmbeddingBody, http: Request) -> Response:
        """Return a vector for each text."""
        check_model(service, body.model)
        encoder = service.text_encoder
        if encoder is None:
            raise HttpError(400, "this model has no embeddings", code="cannot_embed")
        if body.dimensions is not None and body.dimensions != encoder.dimension:
            message = f"dimensions: {body.dimensions}; this model has {encoder.dimension}; leave it out"
            raise HttpError(400, message, field="dimensions")
        encoded = await _read_inputs(service, encoder, body)
        request = EmbedRequest(tuple(tuple(text.ids.tolist()) for text in encoded))
        tokens = sum(len(ids) for ids in request.ids)
        _log(service, http, [body.input] if isinstance(body.input, str) else body.input)
        vectors = await _run(service, http, request, tokens)
        build_reply = partial(_embeddings_json, vectors, encoder.dimension, body.encoding_format or "float")
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = await asyncio.to_thread(build_reply, {"model": service.name, "usage": usage})
        return Response(content, media_type=JSON)

    @post(routes, "/fill")
    async def fill(body: FillBody, http: Request) -> Response:
        """Return the most likely tokens for each mask of a text."""
        check_model(service, body.model)
        if service.masked_texts is None:
            advice = "use POST /v1/completions" if service.generates else "use POST /v1/embeddings"
            raise HttpError(400, f"this model does not predict masked tokens; {advice}", code="cannot_fill")
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        _check_count(service, len(prompts), "prompt")
        tokens = await asyncio.to_thread(_check_prompts, service.masked_texts, prompts)
        _check_choices(
            sum(prompt.count(service.masked_texts.mask) for prompt in prompts), body.top_k or DEFAULT_CHOICES
        )
        _log(service, http, prompts)
        request = FillRequest(tuple(prompts), body.top_k or DEFAULT_CHOICES)
        filled = await _run(service, http, request, tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = await asyncio.to_thread(_fill_json, filled, {"model": service.name, "usage": usage})
        return Response(content, media_type=JSON)


async def _run(service: Service, http: Request, request: EncoderRequest, tokens: int) -> str:
    """Run a request of this many tokens; return its result: JSON for masks, base64 of the numbers for embeddings."""
    in_flight = start_request(service, [request], streamed=False)
    [text] = await wait_for_texts(service, http, in_flight)
    service.metrics.add_texts(tokens, 0, in_flight.seconds())
    http.scope["log_fields"].update(prompt_tokens=tokens)
    return text.text


async def _read_inputs(service: Service, encoder: TextEncoder, body: EmbeddingBody) -> list[EncodedText]:
    inputs: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input)
    if inputs and isinstance(inputs[0], int):
        inputs = [inputs]
    _check_count(service, len(inputs), "input")
    return await asyncio.to_thread(_encode, service, encoder, inputs, bool(body.truncate))


def _encode(service: Service, encoder: TextEncoder, inputs: list[Any], truncate: bool) -> list[EncodedText]:
    """The tokens of texts, or of token ids; either all are texts or none is."""
    for number, text_or_ids in enumerate(inputs):
        place = f"input.{number}"
        if not text_or_ids:
            raise HttpError(400, f"{place}: is empty; send a text or a token", field="input")
        if isinstance(text_or_ids, str):
            check_surrogates(text_or_ids, place)
        else:
            check_ids(service, text_or_ids, place)
    if isinstance(inputs[0], str):
        encoded = encoder.encode(inputs)
    else:
        encoded = [encoder.surround(np.array(ids, np.int64)) for ids in inputs]
    for number, result in enumerate(encoded):
        if result.truncated and not truncate:
            message = f"input.{number}: {result.tokens:,} tokens; the limit is {encoder.longest:,}; send a shorter one"
            message += ", or truncate: true"
            raise HttpError(400, message, field="input", code="context_length_exceeded")
    return encoded


def _check_prompts(texts: MaskedTexts, prompts: list[str]) -> int:
    """The number of tokens of all prompts; each is checked."""
    tokens = 0
    for number, prompt in enumerate(prompts):
        place = f"prompt.{number}" if len(prompts) > 1 else "prompt"
        check_surrogates(prompt, place)
        try:
            tokens += texts.check(prompt, place)
        except TextmillError as error:
            raise HttpError(400, str(error), field="prompt") from None
    return tokens


def _check_count(service: Service, count: int, field: str) -> None:
    if not count:
        raise HttpError(400, f"{field}: is empty; send at least one text", field=field)
    if count > service.config.max_inputs:
        message = f"{field}: {count:,} texts in one request; the limit is {service.config.max_inputs:,}; send fewer"
        raise HttpError(400, message, field=field)


def _check_choices(masks: int, top_k: int) -> None:
    if masks * top_k > MAX_CHOICES:
        message = f"top_k: {top_k:,} tokens for each of {masks:,} masks; the limit is {MAX_CHOICES:,} in one request; "
        raise HttpError(400, message + "lower top_k, or send fewer texts", field="top_k")


def _fill_json(filled: str, other_fields: dict[str, object]) -> bytes:
    """The reply as JSON, from the filled texts as JSON."""
    data = [{"index": index, **text} for index, text in enumerate(json.loads(filled))]
    return json.dumps({"object": "list", "data": data, **other_fields}, ensure_ascii=False).encode()


def _embeddings_json(numbers: str, dimension: int, encoding: str, other_fields: dict[str, object]) -> bytes:
    """The reply as JSON; numbers are formatted directly, which is faster than a list of Python floats."""
    vectors = np.frombuffer(base64.b64decode(numbers), "<f4").reshape(-1, dimension)
    format_embedding: Callable[[NDArray[np.float32]], str] = format_vector if encoding == "float" else _to_base64
    data = ", ".join(
        f'{{"object": "embedding", "index": {index}, "embedding": {format_embedding(vector)}}}'
        for index, vector in enumerate(vectors)
    )
    end = json.dumps(other_fields, ensure_ascii=False).removeprefix("{")
    return f'{{"object": "list", "data": [{data}], {end}'.encode()


def _to_base64(vector: NDArray[np.float32]) -> str:
    return f'"{base64.b64encode(vector.tobytes()).decode()}"'


def _log(service: Service, http: Request, prompts: object) -> None:
    if service.config.log_prompts:
        http.scope["log_fields"]["prompts"] = prompts
