"""Builds the web application: API routes, page, health checks and metrics, behind the middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from textmill import __version__
from textmill.server.errors import add_error_handlers
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


JsonObject = dict[str, Any]


def render_reference(api: JsonObject) -> str:
    """Return an OpenAPI description as an HTML page."""
    schemas: dict[str, JsonObject] = api.get("components", {}).get("schemas", {})
    sections = []
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            title = f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            description = escape(route.get("description") or route.get("summary", ""))
            sections.append(f"{title}<p>{description}</p>{_render_parameters(route)}{_render_body(route, schemas)}")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>textmill: reference</title><link rel="stylesheet" href="/page.css">'
    )
    intro = (
        '<p>The same for machines: <a href="/openapi.json">/openapi.json</a>. If the server has a key, send it as '
        "<code>Authorization: Bearer KEY</code>. An error is "
        "<code>{&quot;error&quot;: {&quot;message&quot;, &quot;type&quot;, "
        "&quot;param&quot;, &quot;code&quot;}}</code>.</p>"
    )
    body = f'<main class="reference"><h1>textmill</h1>{intro}{"".join(sections)}</main>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body class="plain">{body}</body></html>'


def _render_parameters(route: JsonObject) -> str:
    parameters = route.get("parameters", [])
    return _render_table(
        [_render_row(one["name"], one.get("schema", {}), one.get("required", False)) for one in parameters]
    )


def _render_body(route: JsonObject, schemas: dict[str, JsonObject]) -> str:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schemas.get(content.get("$ref", "").rpartition("/")[2], {})
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    return _render_table([_render_row(name, field, name in required) for name, field in fields.items()])


def _render_table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _render_row(name: str, field: JsonObject, required: bool) -> str:
    cells = [
        f"<code>{escape(name)}</code>{' (required)' if required else ''}",
        escape(_describe_type(field)),
        escape(field.get("description", "")),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _describe_type(field: JsonObject) -> str:
    """Describe a field's type in a few words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(name for one in field["anyOf"] if (name := _describe_type(one)) != "null"))
    if "$ref" in field:
        return "object"
    if field.get("type") == "array":
        return f"list of {_describe_type(field.get('items', {}))}"
    limits = [
        f"{word} {field[key]:g}"
        for key, word in (("minimum", "from"), ("maximum", "to"))
        if abs(field.get(key, 1e18)) < 1e18
    ]
    return " ".join([str(field.get("type", "anything")), *limits])
