"""Builds the web application: API routes and the page, behind the request log and access control.

Starlette's router without FastAPI, which would triple the cost of a small request (60 -> 190 us). What it would add,
the OpenAPI description, is made in openapi.py.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from textmill.generation.messages import replace_surrogates
from textmill.server.errors import HttpError, error_response, quote_value, routing_error_response
from textmill.server.openapi import describe_api, render_reference
from textmill.server.replies import DROPPED_MESSAGES, to_json_bytes
from textmill.server.routes import new_routes
from textmill.server.served_models import ServedModels
from textmill.server.service import queue_full_error, stopping_error

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


def _static(content: bytes, media_type: str, headers: dict[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return endpoint


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

        async def send_and_note(message: Message) -> None:
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
