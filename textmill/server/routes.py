"""The API routes: OpenAI's, /generate, and those of the tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from textmill.generation.requests import Request as TextRequest
from textmill.server.chat_replies import ChatReply, get_stop_ids, read_chat_prompt
from textmill.server.completion_replies import CompletionReply
from textmill.server.encoding_routes import add_encoding
from textmill.server.error_replies import HttpError, quote_value
from textmill.server.in_flight import start_request, wait_for_texts
from textmill.server.json_routes import JsonRoute, post
from textmill.server.request_checks import (
    LONG_TEXT,
    chat_requests,
    check_generates,
    check_ids,
    check_model,
    completion_requests,
    decode,
    encode,
    read_prompt,
    read_prompts,
)
from textmill.server.request_models import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody
from textmill.server.service import Service
from textmill.server.sse import EventStream, to_json_bytes

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
