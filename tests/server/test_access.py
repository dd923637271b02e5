"""Access control: API key, Host header, CORS."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST
from textmill.config import ServeConfig
from textmill.errors import TextmillError
from textmill.server.app import PUBLIC_PATHS
from textmill.server.lifecycle import read_api_key

KEY = "a-long-secret"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
GUARDED: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/mill", None),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/tokenize", {"text": "x"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("GET", "/generate?sentence=x", None),
    ("GET", "/metrics", None),
    ("GET", "/tokenizer_info", None),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/fill", {"prompt": "[MASK]"}),
    ("POST", "/preferences", {"prompt": "x", "chosen": "y", "rejected": "z"}),
]
NOT_FOR_THE_ECHO_MODEL = ("/v1/embeddings", "/fill", "/preferences")


@pytest.fixture(scope="module")
def guarded(new_live: Callable[..., Live], tmp_path_factory: pytest.TempPathFactory) -> Live:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(f"{KEY}\n", encoding="utf-8")
    return new_live({"serve": {"key_file": str(file)}, "sample": {"max_tokens": 2}})


@pytest.mark.parametrize(("method", "path", "body"), GUARDED, ids=[path for _, path, _ in GUARDED])
def test_missing_wrong_and_right_key(guarded: Live, method: str, path: str, body: Any) -> None:
    for header in (
        None,
        "",
        KEY,
        f"Basic {KEY}",
        "Bearer",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \u00fc\u00fc".encode("latin-1"),
    ):
        headers = {} if header is None else {"Authorization": header}
        reply = web.request(method, guarded.url + path, json=body, headers=headers)  # type: ignore[arg-type]
        assert reply.status_code == 401, header
        assert reply.headers["www-authenticate"] == "Bearer"
        assert KEY not in reply.text
    reply = web.request(method, guarded.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == (400 if path in NOT_FOR_THE_ECHO_MODEL else 200)


def test_every_route_needs_the_key_or_is_listed_as_open(guarded: Live) -> None:
    api = web.get(f"{guarded.url}/openapi.json").json()
    covered = {path.partition("?")[0] for _, path, _ in GUARDED}
    assert {path.replace("{name}", "mill") for path in api["paths"]} - PUBLIC_PATHS == covered
    for path in PUBLIC_PATHS:
        assert web.get(guarded.url + path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/Metrics", "//metrics", "/metrics/", "/health/../metrics", "/%6detrics", "/./metrics"]
)
def test_path_spelling_cannot_bypass_the_key(guarded: Live, path: str) -> None:
    import http.client

    line = http.client.HTTPConnection("127.0.0.1", guarded.port)
    line.request("GET", path)  # unlike httpx, it sends the path as it stands
    assert line.getresponse().status == 401


def test_local_server_accepts_local_host_names_only(live: Live, new_live: Callable[..., Live]) -> None:
    def status(server: Live, name: str) -> int:
        return web.get(f"{server.url}/v1/models", headers={"Host": name}).status_code

    for name in ("localhost", f"localhost:{live.port}", "127.0.0.1", "[::1]:80"):
        assert status(live, name) == 200
    for name in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example"):
        assert status(live, name) == 403
    named = new_live({"serve": {"allowed_hosts": ["mill.example"], "allowed_origins": ["https://app.example"]}})
    assert status(named, "mill.example") == 200
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert (
        web.options(f"{named.url}/v1/completions", headers=headers).headers["access-control-allow-origin"]
        == "https://app.example"
    )
    preflight = {**headers, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-any"}
    accepted = web.options(f"{named.url}/v1/chat/completions", headers=preflight)
    assert accepted.status_code == 200
    assert "x-stainless-lang" in accepted.headers["access-control-allow-headers"]
    other = {**headers, "Origin": "https://evil.example"}
    assert "access-control-allow-origin" not in web.options(f"{named.url}/v1/completions", headers=other).headers
    for origin, wanted in (("https://app.example", 200), ("https://evil.example", 403)):
        crossing = {"Sec-Fetch-Site": "cross-site", "Origin": origin}
        assert web.get(f"{named.url}/generate?sentence=x", headers=crossing).status_code == wanted


def test_cors_is_off_by_default(live: Live) -> None:
    reply = web.get(f"{live.url}/v1/models", headers={"Origin": "https://app.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    crossing = {"Sec-Fetch-Site": "cross-site", "Origin": "https://app.example"}
    assert web.get(f"{live.url}/generate?sentence=x", headers=crossing).status_code == 403


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://name-of-a-proxy.example"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
    ids=str,
)
def test_page_on_another_port_is_another_site(live: Live, headers: dict[str, str], wanted: int) -> None:
    headers = {name: value.format(port=live.port) for name, value in headers.items()}
    assert web.get(f"{live.url}/generate?sentence=x", headers=headers).status_code == wanted
    assert web.get(f"{live.url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /v1/models HTTP/1.1\r\n", 400),
        ("GET /health HTTP/1.1\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        ("GET /v1/models HTTP/1.0\r\n", 200),
    ],
)
def test_http_1_1_needs_one_host_header(live: Live, head: str, wanted: int) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONGEST) as line:
        line.sendall(f"{head}Connection: close\r\n\r\n".encode())
        assert line.makefile("rb").readline().split()[1] == str(wanted).encode()


def test_key_is_read_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEXTMILL_API_KEY", raising=False)
    assert read_api_key(ServeConfig()) is None
    monkeypatch.setenv("TEXTMILL_API_KEY", "from-the-environment")
    assert read_api_key(ServeConfig()) == "from-the-environment"
    file = tmp_path / "key"
    file.write_text("from-the-file\nanything\n", encoding="utf-8")
    assert read_api_key(ServeConfig(key_file=str(file))) == "from-the-file"
    for bad in ("", "short", "with a space in it", "schlüssel-schlüssel"):
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(TextmillError, match="is not a valid key"):
            read_api_key(ServeConfig(key_file=str(file)))
    with pytest.raises(TextmillError, match="cannot be read"):
        read_api_key(ServeConfig(key_file=str(tmp_path / "none")))
    monkeypatch.setenv("TEXTMILL_API_KEY", "")
    with pytest.raises(TextmillError, match="TEXTMILL_API_KEY: is not a valid key"):
        read_api_key(ServeConfig())
