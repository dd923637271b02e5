"""What the server says when it does not do what was asked: one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from textmill.generation.messages import replace_surrogates
from textmill.server.request_models import EXPECTED, known_fields

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
STATUS_MESSAGES = {
    400: "the request cannot be read; send JSON as the documentation at /docs says",
    404: "{path}: no such place; the documentation at /docs lists them",
    405: "{path}: does not take {method}; the documentation at /docs says what it takes",
}
WORDS = {
    "Input should be greater than or equal to": "wants at least", "Input should be less than or equal to": "wants at most",
    "Input should be greater than": "wants more than", "Input should be less than": "wants less than", "Input should be": "wants",
}  # fmt: skip
"""Pydantic's words and ours."""
SHOWN = 60
"""Characters of a wrong value that are quote_value."""


class HttpError(Exception):
    """A request that is not done: an HTTP status and one sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.retry_after = status, message, field, code, retry_after


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # Half of a character pair, quoted from the request, cannot be sent back.
    told = replace_surrogates(message)
    return {"error": {"message": told, "type": kind, "param": field, "code": code}}


def error_response(refusal: HttpError) -> Response:
    """A refusal as a response."""
    headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after is not None else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(
        error_body(refusal.status, refusal.message, refusal.field, refusal.code), refusal.status, headers
    )


def add_error_handlers(app: FastAPI) -> None:
    """Have every error of the app said in one shape."""

    @app.exception_handler(HttpError)
    async def refused(_: Request, refusal: HttpError) -> Response:
        return error_response(refusal)

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        told = STATUS_MESSAGES.get(error.status_code, str(error.detail))
        message = (
            told.format(path=quote_value(request.url.path, quoted=False), method=request.method)
            if told is not error.detail
            else told
        )
        reply = error_response(HttpError(error.status_code, message))
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:
        return error_response(internal_error())


def internal_error() -> HttpError:
    """What is said of a mistake of ours."""
    return HttpError(500, "something went wrong inside the server; its log says what")


def describe_validation_error(errors: Sequence[Mapping[str, Any]], path: str) -> tuple[str, str | None]:
    """One sentence for what is wrong first with a body, and the field it is about."""
    error = errors[0]
    place = list(error["loc"])
    if not place:
        return "the body wants a JSON object, sent with Content-Type: application/json", None
    top = str(place[0])
    same = [other for other in errors if list(other["loc"][:1]) == place[:1]]
    if error["type"] == "extra_forbidden" and len(place) == 1:
        near = difflib.get_close_matches(top, known_fields(path), n=1, cutoff=0.6)
        name = quote_value(top, quoted=False)
        return f"{name}: no such field; " + (f"did you mean '{near[0]}'?" if near else "leave it out"), name
    name = ".".join(quote_value(str(part), quoted=False) for part in place if not _is_tag(str(part)))
    if error["type"] == "extra_forbidden":
        return f"{name}: no such field; leave it out", top
    if error["type"] == "none_required" and len(same) == 1:
        return f"{name}: is not supported; leave it out", top
    if error["type"] == "missing":
        return f"{'.'.join(map(str, place))}: is missing", top
    if len(same) > 1 and top in EXPECTED:
        return f"{top}: wants {EXPECTED[top]}", top
    wanted = str(error["msg"])
    for word, ours in WORDS.items():
        wanted = wanted.replace(word, ours)
    return f"{name}: {wanted}; found {quote_value(error.get('input'))}", top


def _is_tag(part: str) -> bool:
    """Whether a part of a place is the name that pydantic gives to one of several types."""
    return "[" in part or part in ("str", "int", "float", "bool")


def quote_value(value: Any, *, quoted: bool = True) -> str:
    """A value short enough for a sentence, in characters that can be printed."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN:
        return "a very large number"
    text = (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: SHOWN + 1])
    text = text[:SHOWN] + "..." if len(text) > SHOWN else text
    return f"'{text}'" if quoted and isinstance(value, str) else text
