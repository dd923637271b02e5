"""deploy/nginx.conf in front of a server: answers, streams, limits and disconnects pass through a real nginx."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.conftest import ROOT
from tests.support import web
from tests.support.live_server import Live
from tests.support.programs import find_program
from tests.support.waiting import wait_for
from textmill.verification.launcher import free_port

pytestmark = pytest.mark.long

ENDLESS = 10_000_000
"""Tokens of an answer that no test waits for."""
HOST = {"Host": "models.example"}
MAIN = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/textmill.conf;
}}
"""


@pytest.fixture(scope="module")
def live(new_live: Callable[..., Live]) -> Live:
    find_program("nginx")
    return new_live({"serve": {"allowed_hosts": ["models.example"], "max_tokens": ENDLESS}})


@pytest.fixture(scope="module")
def proxy(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx, with the shipped file; only its two ports are other ones."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    text = (ROOT / "deploy" / "nginx.conf").read_text(encoding="utf-8")
    for old, new in (("127.0.0.1:8000", f"127.0.0.1:{live.port}"), ("listen 80;", f"listen 127.0.0.1:{port};")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "textmill.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder), encoding="utf-8")
    words = [
        find_program("nginx"),
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "start.log"),
    ]
    checked = subprocess.run([*words, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(words)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(address))
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return web.get(f"{address}/health", headers=HOST).status_code == 200
    except httpx.TransportError:
        return False


def test_page_and_answers(proxy: str) -> None:
    page = web.get(f"{proxy}/", headers=HOST)
    assert page.status_code == 200
    assert "<html" in page.text
    assert web.get(f"{proxy}/generate", params={"sentence": "물레방아"}, headers=HOST).status_code == 200
    reply = web.post(f"{proxy}/v1/completions", json={"prompt": "mill", "max_tokens": 4}, headers=HOST)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_metrics_stay_behind_the_proxy(proxy: str, live: Live) -> None:
    assert web.get(f"{proxy}/metrics", headers=HOST).status_code == 403
    assert web.get(f"{live.url}/metrics").status_code == 200


def test_another_host_name_is_refused(proxy: str) -> None:
    assert web.get(f"{proxy}/v1/models", headers={"Host": "other.example"}).status_code == 403


def test_large_body_is_refused(proxy: str) -> None:
    body = {"prompt": "x" * 1_100_000}
    assert web.post(f"{proxy}/v1/completions", json=body, headers=HOST).status_code == 413


def test_a_stream_arrives_while_it_is_made_and_ends_with_its_client(proxy: str, live: Live) -> None:
    body = {"prompt": "mill", "max_tokens": ENDLESS, "stream": True}
    with web.stream("POST", f"{proxy}/v1/completions", json=body, headers=HOST) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
        assert live.stats()["active"] == 1
    live.wait_idle()
