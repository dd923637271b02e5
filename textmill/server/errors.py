"""Error replies: one sentence, in the format that OpenAI's clients read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from textmill.generation.messages import replace_surrogates
from textmill.server.bodies import expected_value, known_fields

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
STATUS_MESSAGES = {
    400: "the request cannot be read; send JSON in UTF-8, as described at /docs",
    404: "{path}: unknown path; /docs lists all paths",
    405: "{path}: does not accept {method}; see /docs",
}
PYDANTIC_PHRASES = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be greater than": "must be more than",
    "Input should be less than": "must be less than",
    "Input should be": "must be",
}
"""From pydantic's phrases to ours."""
MAX_QUOTED = 60
"""Characters of a wrong value that a message quotes."""


class HttpError(Exception):
    """A request that is rejected: an HTTP status and one sentence."""

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
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        self.retry_after = retry_after


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    # A message may quote a lone surrogate from the request, which cannot be sent.
    return {"error": {"message": replace_surrogates(message), "type": error_type, "param": field, "code": code}}


def error_response(error: HttpError) -> Response:
    """Return an error as a response."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error.status, error.message, error.field, error.code), error.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of the app a reply in the same format."""

    @app.exception_handler(HttpError)
    async def on_http_error(_: Request, error: HttpError) -> Response:
        return error_response(error)

    @app.exception_handler(StarletteHTTPException)
    async def on_framework_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in STATUS_MESSAGES:
            path = quote_value(request.url.path, quoted=False)
            message = STATUS_MESSAGES[error.status_code].format(path=path, method=request.method)
        response = error_response(HttpError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(_: Request, __: Exception) -> Response:
        return error_response(internal_error())


def internal_error() -> HttpError:
    """Return the error for a bug in the server."""
    return HttpError(500, "internal server error; see the server's log")


def describe_validation_error(errors: Sequence[Mapping[str, Any]], path: str) -> tuple[str, str | None]:
    """Describe the first of pydantic's errors in one sentence; return it and the field's name."""
    error = errors[0]
    location = list(error["loc"])
    if not location:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    top = str(location[0])
    same_field = [other for other in errors if list(other["loc"][:1]) == location[:1]]
    if error["type"] == "extra_forbidden" and len(location) == 1:
        similar = difflib.get_close_matches(top, known_fields(path), n=1, cutoff=0.6)
        name = quote_value(top, quoted=False)
        advice = f"did you mean '{similar[0]}'?" if similar else "remove it"
        return f"{name}: unknown field; {advice}", name
    name = ".".join(quote_value(str(part), quoted=False) for part in location if not _is_type_tag(str(part)))
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown field; remove it", top
    if error["type"] == "none_required" and len(same_field) == 1:
        return f"{name}: is not supported; remove it", top
    if error["type"] == "missing":
        return f"{'.'.join(map(str, location))}: is missing", top
    if len(same_field) > 1 and (value := expected_value(path, top)):  # one error for each type of a union
        return f"{top}: must be {value}", top
    message = str(error["msg"])
    for phrase, plain_phrase in PYDANTIC_PHRASES.items():
        message = message.replace(phrase, plain_phrase)
    return f"{name}: {message}; found {quote_value(error.get('input'))}", top


def _is_type_tag(part: str) -> bool:
    """Whether a part of pydantic's location names one type of a union instead of a field."""
    return "[" in part or part in ("str", "int", "float", "bool")


def quote_value(value: Any, *, quoted: bool = True) -> str:
    """Return a value that is short and printable, for use in a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_QUOTED:
        return "a very large number"
    if value is None or isinstance(value, bool):
        text = {True: "true", False: "false", None: "null"}[value]
    else:
        text = str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: MAX_QUOTED + 1])
    text = text[:MAX_QUOTED] + "..." if len(text) > MAX_QUOTED else text
    return f"'{text}'" if quoted and isinstance(value, str) else text
