"""The web application: the API routes and the page, behind the request log and access control.

Starlette's router without FastAPI, which would triple the cost of a small request (60 -> 190 us). What it would add,
the OpenAPI description, is made in openapi.py.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import json
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from textmill.errors import TextmillError
from textmill.generation.embed import EncodedText, TextEncoder, format_vector
from textmill.generation.fill import DEFAULT_CHOICES, MaskedTexts
from textmill.generation.requests import EmbedRequest, EncoderRequest, FillRequest, Request, replace_surrogates
from textmill.server.bodies import (
    BODIES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    FillBody,
    Message,
    PreferenceBody,
    TokenizeBody,
    read_body,
)
from textmill.server.errors import HttpError, error_response, quote_value, routing_error_response
from textmill.server.model_requests import (
    LONG_TEXT,
    chat_requests,
    check_generates,
    check_ids,
    check_surrogates,
    completion_requests,
    decode,
    encode,
    find_template,
    read_chat_prompt,
    read_content,
    read_prompts,
)
from textmill.server.openapi import describe_api, render_reference
from textmill.server.replies import DROPPED_MESSAGES, AnyReply, ChatReply, CompletionReply, EventStream, to_json_bytes
from textmill.server.service import (
    MAX_INPUTS,
    InFlightRequest,
    ServedModels,
    Service,
    queue_full_error,
    start_request,
    stopping_error,
    wait_for_texts,
)
from textmill.server.tools import find_tool_use
from textmill.storage.files import append_line

PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PUBLIC_PATHS = frozenset({"/", "/page.css", "/page.js", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key; all others do."""
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings", "/fill"})
REQUEST_ID = "X-Request-ID"
VALID_REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
to_json = json.JSONEncoder(ensure_ascii=False).encode
MAX_FILL_CHOICES = 100_000
"""Tokens that one request to /fill may ask for, over all of its masks; each takes about 60 bytes of the reply."""
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
JSON = "application/json"
NO_CACHE = {"Cache-Control": "no-cache,no-store,must-revalidate"}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def new_app(models: ServedModels) -> ASGIApp:
    """Return the application that serves these models."""
    api_routes = new_routes(models)
    description = describe_api(api_routes)
    routes = [
        *api_routes,
        Route("/openapi.json", _static(to_json_bytes(description), "application/json", {})),
        Route("/docs", _static(render_reference(description).encode(), "text/html", PAGE_HEADERS)),
    ]
    for path, (name, media_type) in PAGE_FILES.items():
        routes.append(Route(path, _static((PAGE_FOLDER / name).read_bytes(), media_type, PAGE_HEADERS)))
    app: ASGIApp = AccessControl(Router(routes), models)
    if models.config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=models.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends a dozen of its own
            allow_private_network=True,
            expose_headers=["Retry-After", REQUEST_ID, DROPPED_MESSAGES],
        )
    return RequestLog(app, models, {route.path for route in routes})


def _static(content: bytes, media_type: str, headers: dict[str, str]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(_: HttpRequest) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return endpoint


def new_routes(models: ServedModels) -> list[Route]:
    """Return the API routes of a server. Their docstrings are the descriptions in /docs and /openapi.json."""
    api = Api(models)

    def post(path: str, answer: Callable[[Any, HttpRequest], Awaitable[Response]]) -> Route:
        @wraps(answer)
        async def endpoint(http: HttpRequest) -> Response:
            return await answer(await read_body(http, BODIES[path], models.config.max_body), http)

        return Route(path, endpoint, methods=["POST"])

    return [
        post("/v1/completions", api.complete),
        post("/v1/chat/completions", api.chat),
        Route("/generate", api.generate),
        post("/v1/embeddings", api.embeddings),
        post("/fill", api.fill),
        post("/preferences", api.prefer),
        post("/tokenize", api.tokenize),
        post("/detokenize", api.detokenize),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
    ]


class Api:
    """The endpoints of a server."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Continue a text."""
        return await _answer(http, *await _prepare_completion(self.models.find(body.model), body), bool(body.stream))

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        return await _answer(http, *await _prepare_chat(self.models.find(body.model), body), bool(body.stream))

    async def generate(self, http: HttpRequest) -> Response:
        """Continue a sentence, or answer it with a chat model, using the server's sampling settings."""
        sentences = http.query_params.getlist("sentence")
        unknown = [name for name in http.query_params if name != "sentence"]
        if unknown:
            name = quote_value(unknown[0])
            message = f"{name}: is not a parameter of GET /generate; send it to POST /v1/completions, or leave it out"
            raise HttpError(400, message, field=unknown[0])
        if len(sentences) != 1:
            found = f"is given {len(sentences)} times" if sentences else "is missing"
            raise HttpError(400, f"sentence: {found}; use /generate?sentence=TEXT", field="sentence")
        [sentence] = sentences
        service = self.models.find(None)
        if service.template is None:
            continued = await _prepare_completion(service, CompletionBody(prompt=sentence, echo=True))
            text = (await _complete(http, *continued))["choices"][0]["text"]
        else:
            answered = await _prepare_chat(service, ChatBody(messages=[Message(role="user", content=sentence)]))
            text = (await _complete(http, *answered))["choices"][0]["message"]["content"]
        return JSONResponse({"input": sentence, "response": text}, headers=NO_CACHE)

    async def embeddings(self, body: EmbeddingBody, http: HttpRequest) -> Response:
        """Return a vector for each text."""
        service = self.models.find(body.model)
        encoder = service.text_encoder
        if encoder is None:
            raise HttpError(400, "this model has no embeddings", code="cannot_embed")
        if body.dimensions is not None and body.dimensions != encoder.dimension:
            message = f"dimensions: {body.dimensions}; this model has {encoder.dimension}; leave it out"
            raise HttpError(400, message, field="dimensions")
        inputs: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input)
        if inputs and isinstance(inputs[0], int):
            inputs = [inputs]
        _check_count(len(inputs), "input")
        encoded = await asyncio.to_thread(_encode, service, encoder, inputs, bool(body.truncate))
        request = EmbedRequest(tuple(tuple(text.ids.tolist()) for text in encoded))
        tokens = sum(len(ids) for ids in request.ids)
        vectors = await _run_encoder(service, http, request, tokens)
        build_reply = partial(_embeddings_json, vectors, encoder.dimension, body.encoding_format or "float")
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = await asyncio.to_thread(build_reply, {"model": service.name, "usage": usage})
        return Response(content, media_type=JSON)

    async def fill(self, body: FillBody, http: HttpRequest) -> Response:
        """Return the most likely tokens for each mask of a text."""
        service = self.models.find(body.model)
        masked_texts = service.masked_texts
        if masked_texts is None:
            advice = "use POST /v1/completions" if service.generates else "use POST /v1/embeddings"
            raise HttpError(400, f"this model does not predict masked tokens; {advice}", code="cannot_fill")
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        _check_count(len(prompts), "prompt")
        tokens = await asyncio.to_thread(_check_prompts, masked_texts, prompts)
        top_k = body.top_k or DEFAULT_CHOICES
        _check_choices(sum(prompt.count(masked_texts.mask) for prompt in prompts), top_k)
        filled = await _run_encoder(service, http, FillRequest(tuple(prompts), top_k), tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = await asyncio.to_thread(_fill_json, filled, {"model": service.name, "usage": usage})
        return Response(content, media_type=JSON)

    async def tokenize(self, body: TokenizeBody, _: HttpRequest) -> Response:
        """Return the tokens of a text."""
        service = self.models.find(body.model)
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
        return Response(content, media_type=JSON)

    async def detokenize(self, body: DetokenizeBody, _: HttpRequest) -> Response:
        """Return the text of token ids."""
        service = self.models.find(body.model)
        check_ids(service, body.tokens, "tokens")
        text = await decode(service, body.tokens)
        return JSONResponse({"text": text, "prompt": text})

    async def tokenizer_info(self, _: HttpRequest) -> Response:
        """Return the special tokens and the chat template, as lm-evaluation-harness expects them."""
        service = self.models.find(None)
        tokenizer = service.model.tokenizer
        roles = {role: tokenizer.roles.get(role) for role in ("bos_token", "pad_token", "unk_token")}
        template = None if service.template is None else service.template.jinja
        return JSONResponse(
            {**roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.eos_id), "chat_template": template}
        )

    async def list_models(self, _: HttpRequest) -> Response:
        """List the served models; the first answers requests that name none."""
        preferences = {"preferences": True} if self.models.preferences else {}
        return JSONResponse({"object": "list", "data": self.models.describe(), **preferences})

    async def prefer(self, body: PreferenceBody, _: HttpRequest) -> Response:
        """Append a preference to the server's file, as a line of JSON in the format that TRL reads."""
        if self.models.preferences is None:
            message = "this server keeps no preferences; start it with --preferences FILE"
            raise HttpError(400, message, code="no_preferences")
        if (body.messages is None) == (body.prompt is None):
            raise HttpError(400, "messages: send either messages or prompt", field="messages")
        line: dict[str, Any]
        if body.messages is None:
            line = {"prompt": body.prompt, "chosen": body.chosen, "rejected": body.rejected}
        else:
            messages = [{"role": one.role, "content": read_content(one)} for one in body.messages]
            answers = {name: [{"role": "assistant", "content": getattr(body, name)}] for name in ("chosen", "rejected")}
            line = {"prompt": messages, **answers}
        line |= {"chosen_by": body.chosen_by, "rejected_by": body.rejected_by}
        try:
            append_line(self.models.preferences, replace_surrogates(json.dumps(line, ensure_ascii=False)))
        except OSError as error:
            raise HttpError(500, f"the preference cannot be written: {error.strerror}") from None
        return JSONResponse({"object": "preference"})

    async def model(self, http: HttpRequest) -> Response:
        """Describe a model; 404 for an unknown name."""
        return JSONResponse(self.models.find(http.path_params["name"]).model_info())

    async def health(self, _: HttpRequest) -> Response:
        """Whether the server is alive and its models work; 503 if the server needs a restart."""
        problem = self.models.problem()
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    async def ready(self, _: HttpRequest) -> Response:
        """Whether the server accepts requests; 503 if it is stopping or a model does not work."""
        problem = "stopping" if self.models.stopping else self.models.problem()
        return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)

    async def metrics(self, _: HttpRequest) -> Response:
        """Counts and times in Prometheus format."""
        content = self.models.metrics.to_text(self.models.stats(), self.models.steps())
        return PlainTextResponse(content, media_type=METRICS_TYPE)


async def _prepare_completion(service: Service, body: CompletionBody) -> tuple[list[Request], CompletionReply]:
    """The requests for the model, and the reply that will be made of its texts."""
    check_generates(service)
    prompts = await read_prompts(service, body)
    return completion_requests(service, body, prompts), CompletionReply(service, body, prompts)


async def _prepare_chat(service: Service, body: ChatBody) -> tuple[list[Request], ChatReply]:
    """The same for a conversation."""
    check_generates(service)
    tool_use = find_tool_use(body, find_template(service))
    prompt = await read_chat_prompt(service, body.messages, tool_use, body.max_completion_tokens or body.max_tokens)
    return chat_requests(service, body, prompt, tool_use), ChatReply(service, body, prompt, tool_use)


async def _answer(http: HttpRequest, requests: list[Request], reply: AnyReply, streamed: bool) -> Response:
    """Submit the requests to the model; reply with a stream, or with all texts once they are complete."""
    if not streamed:
        body = await _complete(http, requests, reply)
        return Response(to_json_bytes(body), headers=reply.headers, media_type=JSON)
    in_flight = await start_request(reply.service, requests, streamed=True)
    return EventStream(in_flight, reply, on_end=lambda: _log_end(http, reply, in_flight))


async def _complete(http: HttpRequest, requests: list[Request], reply: AnyReply) -> dict[str, Any]:
    """Submit the requests to the model and wait for all of its texts; return the body of the reply."""
    in_flight = await start_request(reply.service, requests, streamed=False)
    body = reply.build(await wait_for_texts(http, in_flight))
    _log_end(http, reply, in_flight)
    return body


def _log_end(http: HttpRequest, reply: AnyReply, in_flight: InFlightRequest) -> None:
    reply.service.metrics.add_texts(reply.prompt_tokens, reply.new_tokens, in_flight.seconds(), reply.reused_tokens)
    http.scope["log_fields"].update(
        prompt_tokens=reply.prompt_tokens,
        reused_tokens=reply.reused_tokens,
        new_tokens=reply.new_tokens,
        ended=",".join(reply.reasons),
    )


async def _run_encoder(service: Service, http: HttpRequest, request: EncoderRequest, tokens: int) -> str:
    """Run a request of this many tokens; return its result: JSON for masks, numbers in base64 for embeddings."""
    in_flight = await start_request(service, [request], streamed=False)
    [text] = await wait_for_texts(http, in_flight)
    service.metrics.add_texts(tokens, 0, in_flight.seconds())
    http.scope["log_fields"].update(prompt_tokens=tokens)
    return text.text


def _tokens_json(service: Service, ids: list[int]) -> bytes:
    """Return tokens and their texts as JSON. iterencode lets other threads run; encoding all at once would not."""
    fields = {"tokens": ids, "pieces": [service.token_texts.get_text(id_) for id_ in ids], "count": len(ids)}
    return "".join(ENCODER.iterencode({**fields, "max_model_len": service.model.positions})).encode()


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


def _check_count(count: int, field: str) -> None:
    if not count:
        raise HttpError(400, f"{field}: is empty; send at least one text", field=field)
    if count > MAX_INPUTS:
        message = f"{field}: {count:,} texts in one request; the limit is {MAX_INPUTS:,}; send fewer"
        raise HttpError(400, message, field=field)


def _check_choices(masks: int, top_k: int) -> None:
    if masks * top_k > MAX_FILL_CHOICES:
        message = (
            f"top_k: {top_k:,} tokens for each of {masks:,} masks; the limit is {MAX_FILL_CHOICES:,} in one request"
        )
        raise HttpError(400, f"{message}; lower top_k, or send fewer texts", field="top_k")


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


class RequestLog:
    """Counts requests and writes one log line per request, without prompts.

    Routes add fields to the line through `scope["log_fields"]`. Its `id` is in the reply too: the client's, or a new
    one.
    """

    def __init__(self, app: ASGIApp, models: ServedModels, paths: set[str]) -> None:
        self.app = app
        self.models = models
        self.paths = paths
        """Other paths are logged and counted as "other"."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request and log it."""
        started = time.monotonic()
        status = 0
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        if not VALID_REQUEST_ID.fullmatch(request_id):
            request_id = f"req-{random.getrandbits(64):016x}"
        fields = scope["log_fields"] = {"id": request_id}

        async def send_and_note(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID.lower().encode(), request_id.encode())]
                if self.models.stopping:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if not status:
                error = HttpError(500, "internal server error; see the server's log")
                await error_response(error)(scope, receive, send_and_note)
            raise
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.models.metrics.requests[method, path, status] += 1
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            seconds = f"{time.monotonic() - started:.3f}s"
            route_fields = [f"{key}={to_json(value)}" for key, value in fields.items()]
            line = " ".join([when, method, path, str(status), seconds, *route_fields])
            print(replace_surrogates(line), file=sys.stderr, flush=True)


class AccessControl:
    """Rejects requests with a foreign host name, from another site's page, without the key, or to a full queue.

    Also turns the errors of the routes into replies.
    """

    def __init__(self, app: ASGIApp, models: ServedModels) -> None:
        self.app = app
        self.models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it on."""
        scope["app"] = self  # then Starlette raises its own errors, instead of replying in plain text
        try:
            error = self._find_error(scope, Headers(scope=scope))
            if error is None:
                return await self.app(scope, receive, send)
            response = error_response(error)
        except HttpError as raised:
            response = error_response(raised)
        except HTTPException as raised:
            response = routing_error_response(raised, scope["path"], scope["method"])
        await response(scope, receive, send)

    def _find_error(self, scope: Scope, headers: Headers) -> HttpError | None:
        """The first check that fails; public paths are checked for the host only."""
        error = _check_host_header(scope, headers) or self._check_host(headers)
        if error or scope["path"] in PUBLIC_PATHS:
            return error
        return self._check_origin(headers) or self._check_key(headers) or self._check_queue(scope["path"])

    def _check_host(self, headers: Headers) -> HttpError | None:
        """A server on localhost accepts local host names only. This prevents DNS rebinding."""
        if not _is_local(self.models.config.host):
            return None
        name = _remove_port(headers.get("host", ""))
        if _is_local(name) or _is_address(name) or name in self.models.config.allowed_hosts:
            return None
        return HttpError(
            403, f"{quote_value(name)} is not a name of this server; add it to serve.allowed_hosts", code="host"
        )

    def _check_origin(self, headers: Headers) -> HttpError | None:
        """Accept the server's own page, allowed origins, and clients that are no browser. Another port is another site.

        A browser sets Sec-Fetch-Site, but not over http to another machine; then the Origin must be the server's own.
        """
        allowed = self.models.config.allowed_origins
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site")
        if "*" in allowed or origin in allowed or site in ("same-origin", "none"):
            return None
        if site is None and (origin is None or _has_host(origin, headers.get("host", ""))):
            return None
        return HttpError(
            403,
            "the request is from another site's page; to allow it, add its origin to serve.allowed_origins",
            code="origin",
        )

    def _check_key(self, headers: Headers) -> HttpError | None:
        if self.models.key is None:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.models.key.encode()):
            return None
        problem = "the key is wrong" if key else "a key is needed"
        return HttpError(401, f"{problem}; send it as the header Authorization: Bearer KEY", code="invalid_api_key")

    def _check_queue(self, path: str) -> HttpError | None:
        """Backpressure: a full or stopping server rejects a request before reading its body, which costs little."""
        if path not in GENERATING_PATHS:
            return None
        if self.models.stopping:
            return stopping_error()
        stats = self.models.stats()
        full = stats.active + stats.waiting >= stats.slots + stats.queue
        return queue_full_error(stats, self.models.metrics) if full else None


def _check_host_header(scope: Scope, headers: Headers) -> HttpError | None:
    """HTTP/1.1 requires exactly one Host header (RFC 9112, 3.2)."""
    count = len(headers.getlist("host"))
    if count == 1 or (count == 0 and scope["http_version"] == "1.0"):
        return None
    return HttpError(400, f"the request has {count} Host headers; send one", code="host")


def _remove_port(host: str) -> str:
    """localhost:8000 -> localhost, [::1]:8000 -> ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _has_host(origin: str, host: str) -> bool:
    """Whether a page's origin has this Host header; both may leave out the default port of the scheme."""
    scheme, _, origin_host = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return origin_host.removesuffix(port) == host.lower().removesuffix(port)


@lru_cache(maxsize=64)
def _is_local(name: str) -> bool:
    return name in ("localhost", "") or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
