"""The API routes: OpenAI's, /generate, and those of the tokenizer."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.generation.embed import EncodedText, TextEncoder, format_vector
from textmill.generation.fill import MaskedTexts
from textmill.generation.requests import EmbedRequest, EncoderRequest, FillRequest
from textmill.generation.requests import Request as TextRequest
from textmill.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    FillBody,
    Message,
    TokenizeBody,
)
from textmill.server.errors import HttpError, quote_value
from textmill.server.json_routes import JsonRoute, post
from textmill.server.replies import (
    ChatReply,
    CompletionReply,
    EventStream,
    get_stop_ids,
    read_chat_prompt,
    to_json_bytes,
)
from textmill.server.request_checks import (
    LONG_TEXT,
    chat_requests,
    check_generates,
    check_ids,
    check_model,
    check_surrogates,
    completion_requests,
    decode,
    encode,
    read_prompt,
    read_prompts,
)
from textmill.server.service import Service, start_request, wait_for_texts

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
NO_CACHE = {"Cache-Control": "no-cache,no-store,must-revalidate"}


def new_routes(service: Service) -> tuple[APIRouter, list[JsonRoute]]:
    """Return the routes of one service, and those of them that have a JSON body."""
    routes = APIRouter()
    _add_generation(routes, service)
    add_encoding(routes, service)
    _add_tokenizer(routes, service)
    _add_models(routes, service)
    return routes, [route for route in routes.routes if isinstance(route, JsonRoute)]


def _add_generation(routes: APIRouter, service: Service) -> None:
    @post(routes, "/v1/completions")
    async def complete(body: CompletionBody, http: Request) -> Response:
        """Continue a text."""
        check_generates(service)
        check_model(service, body.model)
        prompts = await read_prompts(service, body)
        requests = completion_requests(service, body, prompts)
        _log_prompts(service, http, lambda: [prompt.text for prompt in prompts])
        return await _answer(service, http, requests, CompletionReply(service, body, prompts), bool(body.stream))

    @post(routes, "/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        check_generates(service)
        check_model(service, body.model)
        prompt = await read_chat_prompt(service, body.messages)
        requests = chat_requests(service, body, prompt, get_stop_ids(service))
        _log_prompts(service, http, lambda: [prompt.text])
        return await _answer(service, http, requests, ChatReply(service, body, prompt), bool(body.stream))

    @routes.get("/generate", response_model=None)
    async def generate(http: Request, sentence: str | None = None) -> Response:
        """Continue a sentence, or answer it with a chat model, using the server's sampling settings."""
        unknown = [name for name in http.query_params if name != "sentence"]
        if unknown:
            name = quote_value(unknown[0])
            message = f"{name}: is not a parameter of GET /generate; send it to POST /v1/completions, or leave it out"
            raise HttpError(400, message, field=unknown[0])
        given = http.query_params.getlist("sentence")
        if sentence is None or len(given) > 1:
            found = "is missing" if sentence is None else f"is given {len(given)} times"
            raise HttpError(400, f"sentence: {found}; use /generate?sentence=TEXT", field="sentence")
        check_generates(service)
        return await _generate(service, http, sentence)


async def _answer(
    service: Service, http: Request, requests: list[TextRequest], reply: CompletionReply | ChatReply, streamed: bool
) -> Response:
    """Submit the requests to the model; reply with a stream, or with all texts once they are complete."""
    in_flight = start_request(service, requests, streamed=streamed)

    def log_end() -> None:
        service.metrics.add_texts(reply.prompt_tokens, reply.new_tokens, in_flight.seconds())
        http.scope["log_fields"].update(
            prompt_tokens=reply.prompt_tokens, new_tokens=reply.new_tokens, ended=",".join(reply.reasons)
        )

    if streamed:
        return EventStream(service, in_flight, reply, on_end=log_end)
    body = reply.build(await wait_for_texts(service, http, in_flight))
    log_end()
    return Response(to_json_bytes(body), media_type="application/json")


async def _generate(service: Service, http: Request, sentence: str) -> Response:
    if service.template is not None:
        body = ChatBody(messages=[Message(role="user", content=sentence)])
        prompt = await read_chat_prompt(service, body.messages)
        requests = chat_requests(service, body, prompt, get_stop_ids(service))
        start = ""
    else:
        prompt = await read_prompt(service, sentence, "sentence")
        requests = completion_requests(service, CompletionBody(prompt=sentence), [prompt])
        start = sentence
    _log_prompts(service, http, lambda: [sentence])
    in_flight = start_request(service, requests, streamed=False)
    text = (await wait_for_texts(service, http, in_flight))[0]
    assert text.done is not None
    service.metrics.add_texts(len(prompt.ids), text.done.tokens, in_flight.seconds())
    http.scope["log_fields"].update(prompt_tokens=len(prompt.ids), new_tokens=text.done.tokens, ended=text.done.reason)
    return JSONResponse({"input": sentence, "response": start + text.text}, headers=NO_CACHE)


def _log_prompts(service: Service, http: Request, prompts: Callable[[], list[str]]) -> None:
    if service.config.log_prompts:
        http.scope["log_fields"]["prompts"] = prompts()


def _add_tokenizer(routes: APIRouter, service: Service) -> None:
    @post(routes, "/tokenize")
    async def tokenize(body: TokenizeBody, _: Request) -> Response:
        """Return the tokens of a text."""
        text = body.prompt if body.text is None else body.text
        if text is None or (body.text is not None and body.prompt is not None):
            raise HttpError(400, "text: send either text or prompt", field="text")
        parts = [text] if body.prompt is None else service.token_texts.split_special_tokens(text)
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else await encode(service, part, "text")
        if len(ids) < LONG_TEXT:
            content = _tokens_json(service, ids)
        else:
            content = await asyncio.to_thread(_tokens_json, service, ids)
        return Response(content, media_type="application/json")

    @post(routes, "/detokenize")
    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        """Return the text of token ids."""
        check_ids(service, body.tokens, "tokens")
        text = await decode(service, body.tokens)
        return JSONResponse({"text": text, "prompt": text})

    @routes.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        """Return the special tokens and the chat template, as lm-evaluation-harness expects them."""
        tokenizer = service.model.tokenizer
        roles = {role: tokenizer.roles.get(role) for role in ("bos_token", "pad_token", "unk_token")}
        template = None if service.template is None else service.template.jinja
        return JSONResponse(
            {**roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.end), "chat_template": template}
        )


def _tokens_json(service: Service, ids: list[int]) -> bytes:
    """Return tokens and their texts as JSON. iterencode lets other threads run; encoding all at once would not."""
    fields = {"tokens": ids, "pieces": [service.token_texts.get_text(id_) for id_ in ids], "count": len(ids)}
    return "".join(ENCODER.iterencode({**fields, "max_model_len": service.model.positions})).encode()


def _add_models(routes: APIRouter, service: Service) -> None:
    @routes.get("/v1/models", response_model=None)
    async def models() -> Response:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [service.model_info()]})

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """Describe one model."""
        check_model(service, name)
        return JSONResponse(service.model_info())


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
