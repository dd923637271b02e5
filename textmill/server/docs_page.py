"""The page /docs: every route and field of the OpenAPI description, without a script."""

from __future__ import annotations

from html import escape
from typing import Any

Tree = dict[str, Any]


def reference_page(api: Tree) -> str:
    """The description as HTML."""
    schemas: dict[str, Tree] = api.get("components", {}).get("schemas", {})
    parts = []
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            told = escape(route.get("description") or route.get("summary", ""))
            parts.append(
                f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2><p>{told}</p>{_parameters(route)}{_body(route, schemas)}"
            )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>textmill: reference</title>'
    intro = (
        '<p>Machines read the same at <a href="/openapi.json">/openapi.json</a>. A key, where one is set, is sent as '
        "<code>Authorization: Bearer KEY</code>. An error is "
        "<code>{&quot;error&quot;: {&quot;message&quot;, &quot;type&quot;, &quot;param&quot;, &quot;code&quot;}}</code>.</p>"
    )
    style = '<link rel="stylesheet" href="/page.css">'
    body = f'<main class="reference"><h1>textmill</h1>{intro}{"".join(parts)}</main>'
    return f'<!doctype html><html lang="en"><head>{head}{style}</head><body class="plain">{body}</body></html>'


def _parameters(route: Tree) -> str:
    rows = [_row(one["name"], one.get("schema", {}), one.get("required", False)) for one in route.get("parameters", [])]
    return _table(rows)


def _body(route: Tree, schemas: dict[str, Tree]) -> str:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schemas.get(content.get("$ref", "").rpartition("/")[2], {})
    required = schema.get("required", [])
    return _table([_row(name, field, name in required) for name, field in schema.get("properties", {}).items()])


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _row(name: str, field: Tree, required: bool) -> str:
    told = field.get("description", "")
    must = " (needed)" if required else ""
    return f"<tr><td><code>{escape(name)}</code>{must}</td><td>{escape(_kind(field))}</td><td>{escape(told)}</td></tr>"


def _kind(field: Tree) -> str:
    """A field's type in a few words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(kind for one in field["anyOf"] if (kind := _kind(one)) != "null"))
    if "$ref" in field:
        return "object"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    limits = [
        f"{word} {field[key]:g}"
        for key, word in (("minimum", "from"), ("maximum", "to"))
        if abs(field.get(key, 1e18)) < 1e18
    ]
    return " ".join([str(field.get("type", "anything")), *limits])
