"""Builds the web application: API routes, page, health checks and metrics, behind the middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from textmill import __version__
from textmill.server.docs_page import render_reference
from textmill.server.error_replies import add_error_handlers
from textmill.server.json_routes import JsonDispatcher
from textmill.server.middleware import AccessControl, BodyLimit, RequestLog
from textmill.server.routes import new_routes
from textmill.server.service import Service

FOLDER = Path(__file__).parent / "page"
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
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def new_app(service: Service) -> ASGIApp:
    """Return the application that serves one model."""
    app = FastAPI(title="textmill", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    routes, json_routes = new_routes(service)
    app.include_router(routes)
    _add_page(app)
    _add_health(app, service)
    guarded: ASGIApp = AccessControl(BodyLimit(JsonDispatcher(app, json_routes), service), service)
    if service.config.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    return RequestLog(guarded, service)


def _add_page(app: FastAPI) -> None:
    for path, (name, media_type) in PAGE_FILES.items():
        app.add_api_route(
            path, _file_endpoint(FOLDER / name, media_type), methods=["GET", "HEAD"], include_in_schema=False
        )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(render_reference(app.openapi()), headers=PAGE_HEADERS)


def _file_endpoint(path: Path, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = path.read_bytes()

    async def file() -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return file


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the server is alive and its model works; 503 if the server needs a restart."""
        problem = service.problem()
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Whether the server accepts requests; 503 if it is stopping or its model does not work."""
        problem = "stopping" if service.stopping else service.problem()
        return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Counts and times in Prometheus format."""
        return PlainTextResponse(
            service.metrics.to_text(service.model.stats(), service.name, service.step), media_type=METRICS_TYPE
        )
