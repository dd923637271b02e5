"""The OpenAPI description of the routes, and the same as the page /docs, in HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from textmill import __version__
from textmill.server.bodies import BODIES

JsonObject = dict[str, Any]
QUERY_PARAMETERS = {"/generate": ["sentence"]}
SCHEMAS = "#/components/schemas/"


def describe_api(routes: Iterable[Route]) -> JsonObject:
    """Return the OpenAPI description: the docstrings of the endpoints, and the schemas of the JSON bodies."""
    _, schemas = models_json_schema(
        [(body, "validation") for body in BODIES.values()], ref_template=SCHEMAS + "{model}"
    )
    paths = {route.path_format: _describe_route(route) for route in routes}
    info = {"title": "textmill", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}


def _describe_route(route: Route) -> JsonObject:
    text = {"type": "string"}
    in_path = [{"name": name, "in": "path", "required": True, "schema": text} for name in route.param_convertors]
    in_query = [{"name": name, "in": "query", "schema": text} for name in QUERY_PARAMETERS.get(route.path, [])]
    description: JsonObject = {
        "summary": route.name,
        "description": route.endpoint.__doc__,
        "operationId": route.name,
        "parameters": in_path + in_query,
        "responses": {"200": {"description": "OK"}},
    }
    body = BODIES.get(route.path)
    if body is None:
        return {"get": description}
    content = {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}}
    return {"post": {**description, "requestBody": {"required": True, "content": content}}}


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
