"""Malformed requests: bodies generated from the OpenAPI description and then damaged, and broken HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

Tree = dict[str, Any]
STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**64),
    10**30,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "강",
    "👩‍👩‍👧",
    "a" * 3000,
    "'; DROP TABLE",
    "{{7*7}}",
    "../../etc/passwd",
    [],
    [[]],
    [None],
    ["x"],
    [1],
    [[1]],
    [1, "x"],
    {},
    {"a": 1},
    {"": None},
    {"\ud800": 1},
    {"5": 1.0},
    [{"role": "user", "content": "x"}],
    [{"role": "user"}],
    [{"role": None, "content": []}],
]


def random_value(schema: Tree, schemas: Tree, dice: random.Random, depth: int = 0) -> Any:
    """Return a random value that mostly fits a schema."""
    if depth > 4 or dice.random() < 0.06:
        return dice.choice(STRANGE)
    if "$ref" in schema:
        return random_value(schemas[schema["$ref"].rpartition("/")[2]], schemas, dice, depth + 1)
    if "anyOf" in schema:
        return random_value(dice.choice(schema["anyOf"]), schemas, dice, depth)
    if "enum" in schema or "const" in schema:
        return dice.choice(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object":
        names = schema.get("properties", {})
        tree = {
            name: random_value(field, schemas, dice, depth + 1)
            for name, field in names.items()
            if name in schema.get("required", []) or dice.random() < 0.2
        }
        if isinstance(schema.get("additionalProperties"), dict):
            tree |= {
                str(dice.choice([0, 5, 299, 300, -1, "x"])): random_value(
                    schema["additionalProperties"], schemas, dice, depth + 1
                )
            }
        return tree
    if kind == "array":
        return [
            random_value(schema.get("items", {}), schemas, dice, depth + 1)
            for _ in range(dice.choice([0, 1, 1, 2, 5, 40]))
        ]
    if kind in ("integer", "number"):
        ends = [schema.get("minimum", -3), schema.get("maximum", 400)]
        number = dice.choice([*ends, ends[0] - 1, ends[1] + 1, dice.randint(0, 320), dice.random()])
        return int(number) if kind == "integer" and dice.random() < 0.95 else number
    if kind == "string":
        return dice.choice(["x", "The mill", "강가에", "", "mill", "\n\n", "\u202e", "a" * dice.choice([1, 30, 700])])
    return {"boolean": dice.random() < 0.5, "null": None}.get(str(kind), dice.choice(STRANGE))


def damage_body(body: Any, dice: random.Random) -> bytes:
    """Return a body as bytes, sometimes damaged."""
    if isinstance(body, dict) and dice.random() < 0.25:
        body = {**body, dice.choice([*body, "unknown", "max_tokens", "prompt"]): dice.choice(STRANGE)}
    data = json.dumps(body, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    if data and dice.random() < 0.12:
        place = dice.randrange(len(data))
        data = dice.choice(
            [data[:place], data[:place] + dice.randbytes(3) + data[place:], data * 2, b"[" * 3000 + data]
        )
    return data


def random_request(api: Tree, dice: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """Return method, path, headers and body of a request."""
    path = dice.choice(list(api["paths"]))
    method = dice.choice(list(api["paths"][path])).upper()
    route = api["paths"][path][method.lower()]
    schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    body = damage_body(random_value(schema, api["components"]["schemas"], dice), dice) if schema else b""
    path = path.replace("{name}", dice.choice(["mill", "none", "%00", "a/b", "%ff", "..%2f..%2fkey"]))
    if path == "/generate" and dice.random() < 0.9:
        path += "?sentence=" + dice.choice(
            ["x", "%EA%B0%95", "%ff%fe", "", "a" * 4000, "%00", "x&sentence=y", "%ED%A0%80"]
        )
    headers = {
        "Content-Type": dice.choice(
            ["application/json"] * 9
            + ["text/plain", "application/json; charset=utf-16", "a/b/c", "multipart/form-data"]
        )
    }
    if dice.random() < 0.05:
        method = dice.choice(["PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "GET", "POST"])
    return method, path, headers, body


def random_bytes(dice: random.Random) -> bytes:
    """Return bytes that are not valid HTTP."""
    good = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 15\r\n\r\n{"prompt": "x"}'
    )
    swaps = [
        (b"15", b"-5"),
        (b"15", b"99"),
        (b"15", b"1e3"),
        (b"15", b"15\r\nContent-Length: 16"),
        (b"15", b"15\r\nTransfer-Encoding: chunked"),
        (b"HTTP/1.1", b"HTTP/9.9"),
        (b"Host: localhost\r\n", b""),
        (b"/v1", b"/" + b"a" * 70_000),
        (b"localhost", b"[::1"),
        (b"Host", b"X: " + b"b" * 70_000 + b"\r\nHost"),
        (b"localhost", b"\xff\xff"),
        (b"Content-Type", b"Transfer-Encoding: chunked\r\nA"),
        (b"Content-Type", b"Expect: 100-continue\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nContent-Type"),
    ]
    paths = [b"/\xff\xfe", b"http://[", b"/generate?%zz=%u1234&sentence=%C3", b"*", b"/" + b"%00" * 50]
    strange = [
        dice.randbytes(dice.randint(1, 400)),
        b"\x16\x03\x01\x02\x00\x01" + dice.randbytes(100),
        b"\r\n" * 50,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    lines = [b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths]
    made = dice.choice([*(good.replace(*swap) for swap in swaps), *lines, *strange])
    if dice.random() < 0.4:
        place = dice.randrange(len(made))
        made = made[:place] + dice.randbytes(2) + made[place + 1 :]
    return made
