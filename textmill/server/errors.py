"""Error replies: one sentence, in the format that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from textmill.generation.requests import replace_surrogates

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ROUTING_MESSAGES = {
    404: "{path}: unknown path; /docs lists all paths",
    405: "{path}: does not accept {method}; see /docs",
}
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
    """Return an error as JSON, with the headers of its status."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error.status, error.message, error.field, error.code), error.status, headers)


def routing_error_response(error: HTTPException, path: str, method: str) -> Response:
    """Return Starlette's error for an unknown path or a wrong method, in the same format."""
    text = ROUTING_MESSAGES.get(error.status_code, error.detail)
    response = error_response(
        HttpError(error.status_code, text.format(path=quote_value(path, quoted=False), method=method))
    )
    response.headers.update(error.headers or {})
    return response


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
