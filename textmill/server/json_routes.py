"""Routes that take a JSON body: FastAPI tells of them, and what is sent to them is read here, in one pass and without detours."""

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

from textmill.server.error_replies import STATUS_MESSAGES, HttpError, describe_validation_error, error_response
from textmill.server.request_models import BODIES, Body

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class JsonRoute(APIRoute):
    """A route whose endpoint is given the body and the request, in this order."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What FastAPI calls too, where it comes to that."""
        return self.answer

    async def answer(self, http: Request) -> Response:
        """Read what was sent and answer it."""
        raw = await _whole(http.receive)
        if not raw or not _is_json(Headers(scope=http.scope).get("content-type", "")):
            raise HttpError(400, describe_validation_error([{"type": "missing", "loc": ()}], self.path)[0])
        response: Response = await self.endpoint(parse_body(raw, self.path), http)
        return response


def post(routes: APIRouter, path: str) -> Callable[[Endpoint], Endpoint]:
    """Have a router take bodies at a path."""

    def add(endpoint: Endpoint) -> Endpoint:
        routes.add_api_route(path, endpoint, methods=["POST"], response_model=None, route_class_override=JsonRoute)
        return endpoint

    return add


class JsonDispatcher:
    """Takes a posted body to its route: FastAPI's own way there costs more than all that is done for a text in front of the model."""

    def __init__(self, app: ASGIApp, routes: Iterable[JsonRoute]) -> None:
        self.app, self.routes = app, {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on what is none of ours."""
        route = self.routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            return await self.app(scope, receive, send)
        try:
            response = await route.answer(Request(scope, receive, send))
        except HttpError as refusal:
            response = error_response(refusal)
        await response(scope, receive, send)


async def _whole(receive: Receive) -> bytes:
    """The body; a client that leaves before it is whole has sent nothing that can be read."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, STATUS_MESSAGES[400])
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


@lru_cache(maxsize=64)
def _is_json(told: str) -> bool:
    kind, _, rest = told.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (rest == "json" or rest.endswith("+json"))


def parse_body(raw: bytes, path: str) -> Body:
    """A body as its route wants it. What is wrong is looked for by Python's own reader, which says where, and takes every encoding."""
    shape = BODIES[path]
    try:
        return shape.model_validate_json(raw)
    except ValidationError:
        pass
    try:
        return shape.model_validate(json.loads(raw))
    except json.JSONDecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValidationError as error:
        message, field = describe_validation_error(error.errors(include_url=False), path)
        raise HttpError(400, message, field=field) from None
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, lists in lists in lists
        raise HttpError(400, STATUS_MESSAGES[400]) from None
