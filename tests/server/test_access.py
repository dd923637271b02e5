"""Who is let in: the key, the host's name, other sites' pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.live_server import Live
from textmill.config import ServeConfig
from textmill.errors import TextmillError
from textmill.server.middleware import PUBLIC_PATHS
from textmill.server.model_setup import read_api_key

KEY = "a-long-secret"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
GUARDED: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None), ("GET", "/v1/models/mill", None), ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("POST", "/v1/chat/completions", CHAT), ("POST", "/tokenize", {"text": "x"}), ("POST", "/detokenize", {"tokens": [1]}),
    ("GET", "/generate?sentence=x", None), ("GET", "/metrics", None), ("GET", "/tokenizer_info", None),
]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(new_live: Callable[..., Live], tmp_path_factory: pytest.TempPathFactory) -> Live:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(f"{KEY}\n", encoding="utf-8")
    return new_live({"serve": {"key_file": str(file)}, "sample": {"max_tokens": 2}})


@pytest.mark.parametrize(("method", "path", "body"), GUARDED, ids=[path for _, path, _ in GUARDED])
def test_no_wrong_and_right_key(guarded: Live, method: str, path: str, body: Any) -> None:
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
    assert (
        web.request(method, guarded.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}).status_code
        == 200
    )


def test_every_route_is_guarded_or_named_open(guarded: Live) -> None:
    api = web.get(f"{guarded.url}/openapi.json").json()
    covered = {path.partition("?")[0] for _, path, _ in GUARDED}
    assert {path.replace("{name}", "mill") for path in api["paths"]} - PUBLIC_PATHS == covered
    for path in PUBLIC_PATHS:
        assert web.get(guarded.url + path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/Metrics", "//metrics", "/metrics/", "/health/../metrics", "/%6detrics", "/./metrics"]
)
def test_no_spelling_goes_round_the_guard(guarded: Live, path: str) -> None:
    import http.client

    line = http.client.HTTPConnection("127.0.0.1", guarded.port)
    line.request("GET", path)  # unlike httpx, it sends the path as it stands
    assert line.getresponse().status == 401


def test_a_local_server_answers_to_local_names_only(live: Live, new_live: Callable[..., Live]) -> None:
    def status(server: Live, name: str) -> int:
        return web.get(f"{server.url}/v1/models", headers={"Host": name}).status_code

    for name in ("localhost", f"localhost:{live.port}", "127.0.0.1", "[::1]:80"):
        assert status(live, name) == 200
    for name in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example"):
        assert status(live, name) == 403
    named = new_live({"serve": {"allowed_hosts": ["mill.example"], "allowed_origins": ["https://app.example"]}})
    assert status(named, "mill.example") == 200
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert (
        web.options(f"{named.url}/v1/completions", headers=asked).headers["access-control-allow-origin"]
        == "https://app.example"
    )
    other = {**asked, "Origin": "https://evil.example"}
    assert "access-control-allow-origin" not in web.options(f"{named.url}/v1/completions", headers=other).headers
    for origin, wanted in (("https://app.example", 200), ("https://evil.example", 403)):
        crossing = {"Sec-Fetch-Site": "cross-site", "Origin": origin}
        assert web.get(f"{named.url}/generate?sentence=x", headers=crossing).status_code == wanted


def test_cors_is_closed_unless_opened(live: Live) -> None:
    reply = web.get(f"{live.url}/v1/models", headers={"Origin": "https://app.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    crossing = {"Sec-Fetch-Site": "cross-site", "Origin": "https://app.example"}
    assert web.get(f"{live.url}/generate?sentence=x", headers=crossing).status_code == 403


def test_the_key_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
