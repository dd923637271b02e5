"""Routes with a JSON body: FastAPI documents them, and this module parses their bodies in one fast pass."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from textmill.server.bodies import BODIES, Body
from textmill.server.errors import STATUS_MESSAGES, HttpError, describe_validation_error, error_response

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class JsonRoute(APIRoute):
    """A route whose endpoint receives the parsed body and the request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return `handle_json` to FastAPI, for requests that do not come through JsonDispatcher."""
        return self.handle_json

    async def handle_json(self, http: Request) -> Response:
        """Parse the body and call the endpoint."""
        raw = await _read_body(http.receive)
        if not raw or not _is_json(Headers(scope=http.scope).get("content-type", "")):
            raise HttpError(400, describe_validation_error([{"type": "missing", "loc": ()}], self.path)[0])
        response: Response = await self.endpoint(parse_body(raw, self.path), http)
        return response


def post(routes: APIRouter, path: str) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that adds a JsonRoute to a router."""

    def add(endpoint: Endpoint) -> Endpoint:
        routes.add_api_route(path, endpoint, methods=["POST"], response_model=None, route_class_override=JsonRoute)
        return endpoint

    return add


class JsonDispatcher:
    """Passes POST requests straight to their route.

    FastAPI's own dispatch costs more than everything else this process does for a text.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[JsonRoute]) -> None:
        self.app = app
        self.routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a POST to a known path; pass everything else to FastAPI."""
        route = self.routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            return await self.app(scope, receive, send)
        try:
            response = await route.handle_json(Request(scope, receive, send))
        except HttpError as error:
            response = error_response(error)
        await response(scope, receive, send)


async def _read_body(receive: Receive) -> bytes:
    """Return the complete body; raise HttpError if the client disconnects before."""
    parts = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, STATUS_MESSAGES[400])
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def parse_body(raw: bytes, path: str) -> Body:
    """Parse and validate a route's body.

    Invalid bodies are parsed a second time by Python's json, which accepts every encoding and reports the position.
    """
    body_type = BODIES[path]
    try:
        return body_type.model_validate_json(raw)
    except ValidationError:
        pass
    try:
        return body_type.model_validate(json.loads(raw))
    except json.JSONDecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValidationError as error:
        message, field = describe_validation_error(error.errors(include_url=False), path)
        raise HttpError(400, message, field=field) from None
    except (ValueError, RecursionError):  # not UTF-8, a number with thousands of digits, deeply nested lists
        raise HttpError(400, STATUS_MESSAGES[400]) from None
