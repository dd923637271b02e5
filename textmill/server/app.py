"""Builds the web application: API routes and the page, behind the middleware.

Starlette's router without FastAPI, which would triple the cost of a small request (60 -> 190 us). What it would add,
the OpenAPI description, is made in openapi.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from textmill.server.middleware import AccessControl, RequestLog
from textmill.server.openapi import describe_api, render_reference
from textmill.server.replies import to_json_bytes
from textmill.server.routes import new_routes
from textmill.server.service import Service

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


def new_app(service: Service) -> ASGIApp:
    """Return the application that serves one model."""
    api_routes = new_routes(service)
    description = describe_api(api_routes)
    routes = [
        *api_routes,
        Route("/openapi.json", _static(to_json_bytes(description), "application/json", {})),
        Route("/docs", _static(render_reference(description).encode(), "text/html", PAGE_HEADERS)),
    ]
    for path, (name, media_type) in PAGE_FILES.items():
        routes.append(Route(path, _static((PAGE_FOLDER / name).read_bytes(), media_type, PAGE_HEADERS)))
    app: ASGIApp = AccessControl(Router(routes), service)
    if service.config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    return RequestLog(app, service)


def _static(content: bytes, media_type: str, headers: dict[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return endpoint
