"""What every request passes before a route sees it: the log, the caller's host and page, the key, the size of the body."""

from __future__ import annotations

import hmac
import ipaddress
import json
import sys
import time
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from textmill.generation.messages import replace_surrogates
from textmill.server.error_replies import HttpError, error_response, internal_error, quote_value
from textmill.server.in_flight import queue_full_error, stopping_error
from textmill.server.service import Service

OPEN = frozenset({"/", "/page.css", "/page.js", "/health", "/ready", "/docs", "/openapi.json"})
"""What is answered without the key; everything else needs it."""
PLACES = OPEN | {
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/generate",
    "/metrics",
}
TEXTS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
WRITE = json.JSONEncoder(ensure_ascii=False).encode
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class RequestLog:
    """Counts requests and writes a line about each, without prompts unless asked."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follow one request to its end."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, status = time.monotonic(), 0
        told = scope["told"] = {}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.service.stopping:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            if not status:
                await error_response(internal_error())(scope, receive, noting)
            raise
        finally:
            path = scope["path"] if scope["path"] in PLACES else "other"
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.service.metrics.requests[method, path, status] += 1
            words = [f"{key}={WRITE(value)}" for key, value in told.items()]
            line = " ".join(
                [
                    time.strftime("%Y-%m-%d %H:%M:%S"),
                    method,
                    path,
                    str(status),
                    f"{time.monotonic() - begun:.3f}s",
                    *words,
                ]
            )
            print(replace_surrogates(line), file=sys.stderr, flush=True)


class AccessControl:
    """Lets in who may: the right host name, no page of another site, the right key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._host(headers)
            if scope["path"] not in OPEN:
                refusal = refusal or self._site(headers) or self._key(headers) or self._full(scope["path"])
            if refusal:
                return await error_response(refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def _host(self, headers: Headers) -> HttpError | None:
        """A server of this machine only answers to this machine's names, so that no name elsewhere can be pointed at it."""
        host = headers.get("host", "")
        name = host.rsplit("]", 1)[0].lstrip("[") if "[" in host else host.split(":")[0]
        if (
            not _is_local(self.service.config.host)
            or _is_local(name)
            or _is_address(name)
            or name in self.service.config.allowed_hosts
        ):
            return None
        return HttpError(
            403, f"the host name {quote_value(name)} is not this server's; add it to serve.allowed_hosts", code="host"
        )

    def _site(self, headers: Headers) -> HttpError | None:
        allowed = self.service.config.allowed_origins
        if headers.get("sec-fetch-site") != "cross-site" or "*" in allowed or headers.get("origin") in allowed:
            return None
        return HttpError(
            403, "a page of another site asks; add its origin to serve.allowed_origins if it may", code="origin"
        )

    def _key(self, headers: Headers) -> HttpError | None:
        if self.service.key is None:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.service.key.encode()):
            return None
        told = "the key is wrong" if given else "a key is needed"
        return HttpError(401, f"{told}; send it as the header Authorization: Bearer KEY", code="invalid_api_key")

    def _full(self, path: str) -> HttpError | None:
        """A full server says so before it reads the body, and so does one that stops: refusing must cost less than asking."""
        if path not in TEXTS:
            return None
        if self.service.stopping:
            return stopping_error()
        stats = self.service.scheduler.stats()
        return (
            queue_full_error(self.service)
            if stats["active"] + stats["waiting"] >= stats["slots"] + stats["queue"]
            else None
        )


@lru_cache(maxsize=64)
def _is_local(name: str) -> bool:
    return name in ("localhost", "") or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class BodyLimit:
    """Refuses bodies that are too large."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.most = app, service.config.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body while it is read."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        told = Headers(scope=scope).get("content-length", "0")
        if not told.isascii() or not told.isdigit() or len(told) > 18 or int(told) > self.most:
            return await error_response(self._refusal())(scope, receive, send)
        found, whole = 0, False

        async def counting() -> Message:
            nonlocal found, whole
            if whole:
                return await receive()
            message = await receive()
            found += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if found > self.most:
                raise self._refusal()
            return message

        await self.app(scope, counting, send)

    def _refusal(self) -> HttpError:
        return HttpError(
            413, f"the body is larger than the server's limit of {self.most:,} bytes; send less", code="body_too_large"
        )
