"""The routes that answer with text and tokens: OpenAI's, and the ones of the systems before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from textmill.server.chat_replies import ChatReply, chat_prompt, stop_ids_of
from textmill.server.completion_replies import CompletionReply
from textmill.server.error_replies import HttpError
from textmill.server.in_flight import InFlightRequest, finish, start
from textmill.server.json_routes import JsonRoute, post
from textmill.server.request_checks import (
    LONG_TEXT,
    chat_requests,
    check_ids,
    check_model,
    completion_requests,
    decode,
    encode,
    prompt_of,
    prompts_of,
)
from textmill.server.request_models import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody
from textmill.server.service import Service
from textmill.server.sse import EventStream, written

WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
NOT_KEPT = {"Cache-Control": "no-cache,no-store,must-revalidate"}


def new_routes(service: Service) -> tuple[APIRouter, list[JsonRoute]]:
    """The routes of one service, and those among them that take a body."""
    routes = APIRouter()
    _add_texts(routes, service)
    _add_tokens(routes, service)
    return routes, [route for route in routes.routes if isinstance(route, JsonRoute)]


def _add_texts(routes: APIRouter, service: Service) -> None:
    @post(routes, "/v1/completions")
    async def complete(body: CompletionBody, http: Request) -> Response:
        """Continue a text."""
        check_model(service, body.model)
        prompts = await prompts_of(service, body)
        requests = completion_requests(service, body, prompts)
        _note_prompt(service, http, lambda: [prompt.text for prompt in prompts])
        flight = start(service, requests, streamed=bool(body.stream))
        return await _answer(service, http, flight, CompletionReply(service, body, prompts), bool(body.stream))

    @post(routes, "/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        check_model(service, body.model)
        prompt = await chat_prompt(service, body.messages)
        requests = chat_requests(service, body, prompt, stop_ids_of(service))
        _note_prompt(service, http, lambda: [prompt.text])
        flight = start(service, requests, streamed=bool(body.stream))
        return await _answer(service, http, flight, ChatReply(service, body, prompt), bool(body.stream))

    @routes.get("/generate", response_model=None)
    async def generate(http: Request, sentence: str | None = None) -> Response:
        """Continue a sentence, or answer it where the model was trained on conversations; settings are the server's."""
        if sentence is None:
            raise HttpError(400, "sentence: is missing; ask /generate?sentence=TEXT", field="sentence")
        return await _generate(service, http, sentence)


def _add_tokens(routes: APIRouter, service: Service) -> None:
    @post(routes, "/tokenize")
    async def tokenize(body: TokenizeBody, _: Request) -> Response:
        """The tokens of a text."""
        text = body.prompt if body.text is None else body.text
        if text is None or (body.text is not None and body.prompt is not None):
            raise HttpError(400, "text: is missing, or there is a prompt too; give one of them", field="text")
        parts = [text] if body.prompt is None else service.pieces.parts_of(text)
        ids = [
            id_ for part in parts for id_ in ([part] if isinstance(part, int) else await encode(service, part, "text"))
        ]
        content = _told(service, ids) if len(ids) < LONG_TEXT else await asyncio.to_thread(_told, service, ids)
        return Response(content, media_type="application/json")

    @post(routes, "/detokenize")
    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        """The text of tokens."""
        check_ids(service, body.tokens, "tokens")
        text = await decode(service, body.tokens)
        return JSONResponse({"text": text, "prompt": text})

    @routes.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        """The tokenizer's special tokens and its chat template, as lm-evaluation-harness asks for them."""
        tokenizer = service.scheduler.tokenizer
        roles = {role: tokenizer.roles.get(role) for role in ("bos_token", "pad_token", "unk_token")}
        template = None if service.template is None else service.template.jinja
        return JSONResponse(
            {**roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.end), "chat_template": template}
        )

    @routes.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [service.facts()]})

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One model."""
        check_model(service, name)
        return JSONResponse(service.facts())


def _told(service: Service, ids: list[int]) -> bytes:
    """Tokens with their pieces, written bit by bit: all at once would keep every other thread from its work."""
    tree = {"tokens": ids, "pieces": [service.pieces.text_of(id_) for id_ in ids], "count": len(ids)}
    return "".join(WRITER.iterencode({**tree, "max_model_len": service.scheduler.positions})).encode()


async def _answer(
    service: Service, http: Request, flight: InFlightRequest, reply: CompletionReply | ChatReply, streamed: bool
) -> Response:
    def account() -> None:
        service.metrics.add_texts(reply.prompt_tokens, reply.new_tokens, flight.seconds())
        http.scope["told"].update(
            prompt_tokens=reply.prompt_tokens, new_tokens=reply.new_tokens, ended=",".join(reply.reasons)
        )

    if streamed:

        def end() -> Any:
            account()
            return reply.end()

        return EventStream(service, flight, reply.chunk_head, reply.begin(), reply.step, end)
    tree = reply.whole(await finish(service, http, flight))
    account()
    return Response(written(tree), media_type="application/json")


async def _generate(service: Service, http: Request, sentence: str) -> Response:
    if service.template is not None:
        prompt = await chat_prompt(service, [Message(role="user", content=sentence)])
        requests = chat_requests(
            service, ChatBody(messages=[Message(role="user", content=sentence)]), prompt, stop_ids_of(service)
        )
        said = ""
    else:
        prompt = await prompt_of(service, sentence, "sentence")
        requests = completion_requests(service, CompletionBody(prompt=sentence), [prompt])
        said = sentence
    _note_prompt(service, http, lambda: [sentence])
    flight = start(service, requests, streamed=False)
    text = (await finish(service, http, flight))[0]
    assert text.done is not None
    service.metrics.add_texts(len(prompt.ids), text.done.tokens, flight.seconds())
    http.scope["told"].update(prompt_tokens=len(prompt.ids), new_tokens=text.done.tokens, ended=text.done.reason)
    return JSONResponse({"input": sentence, "response": said + text.text}, headers=NOT_KEPT)


def _note_prompt(service: Service, http: Request, prompts: Callable[[], list[str]]) -> None:
    if service.config.log_prompts:
        http.scope["told"]["prompts"] = prompts()
