"""Lists of web addresses: downloaded only when that is set, each page counted, kept or quarantined with a reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request

import pyarrow.parquet as pq
import pytest

from textmill.config import RunConfig
from textmill.corpus.formats import urls
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError

PAGES: dict[str, tuple[int, str, bytes]] = {
    "/robots.txt": (200, "text/plain", b"User-agent: *\nDisallow: /private\n"),
    "/mill": (200, "text/html; charset=utf-8", "<p>Değirmen <b>döner</b>.</p><script>x</script>".encode()),
    "/latin": (200, "text/html; charset=latin-1", "<p>Mühle</p>".encode("latin-1")),
    "/korean": (200, "text/html", '<meta charset="cp949"><p>물레방아</p>'.encode("cp949")),
    "/wrong": (200, "text/html; charset=utf-8", b"<p>\xff\xfe</p>"),
    "/picture": (200, "image/png", b"png"),
    "/long": (200, "text/html", b"x" * 2000),
    "/moved": (302, "/mill2", b""),
    "/mill2": (200, "text/html", b"<p>It has moved.</p>"),
    "/file": (302, "file:///etc/hostname", b""),
    "/undefined": (200, "text/html; charset=undefined", b"<p>x</p>"),
    "/de%C4%9Firmen%20a?q=%C5%9F%26": (200, "text/html", b"<p>By the river.</p>"),
    "/private/a": (200, "text/html", b"<p>secret</p>"),
}


class Site(BaseHTTPRequestHandler):
    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        code, kind, body = PAGES.get(self.path, (404, "text/html", b""))
        self.send_response(code)
        self.send_header("Location" if code == 302 else "Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    Site.seen.clear()
    urls._rules_of.cache_clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def config(folder: Path, lines: list[str], **corpus: object) -> RunConfig:
    (folder / "list.urls").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    own = {"sources": [str(folder / "list.urls")], "rules": ["html", "spaces"], "split": [1, 0, 0], "max_unreadable": 1}
    return RunConfig.model_validate({"folder": str(folder / "out"), "corpus": {**own, **corpus}})


def test_nothing_is_downloaded_unless_it_is_set(site: str, tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match=r"list\.urls: a list of web addresses.*set corpus\.download=true"):
        prepare(config(tmp_path, [f"{site}/mill"]))
    with pytest.raises(TextmillError, match=r"corpus\.rules: web pages need the rule html"):
        prepare(config(tmp_path, [f"{site}/mill"], download=True, rules=["spaces"]))
    assert Site.seen == []


def test_pages(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_BYTES", 1000)
    monkeypatch.setattr(urls, "LINES", 5)
    good = ["/mill", "/latin", "/korean", "/moved", "/değirmen a?q=ş%26"]
    bad = ["/none", "/picture", "/wrong", "/undefined", "/long", "/file", "/private/a"]
    lines = [f"{site}{path}" for path in [*good, *bad]] + ["not an address", "file:///etc/hostname", "http://[::1"]
    folder = prepare(config(tmp_path, lines, download=True))
    rows = pq.read_table(folder / "train-00000.parquet").to_pylist()
    assert {row["id"]: row["text"] for row in rows} == {
        "line 1": "Değirmen döner.",
        "line 2": "Mühle",
        "line 3": "물레방아",
        "line 4": "It has moved.",
        "line 5": "By the river.",
    }
    assert json.loads(next(row for row in rows if row["id"] == "line 1")["meta"]) == {"url": f"{site}/mill"}
    reasons = {row["place"]: row["reason"] for row in map(json.loads, (folder / "quarantine.jsonl").open())}
    wanted = [
        "answered 404",
        "image/png",
        "not utf-8",
        "not undefined",
        "more than 1,000 bytes",
        "",
        "robots.txt",
        "not a web address",
        "not a web address",
        "not a web address",
    ]
    assert len(reasons) == len(wanted)
    for number, reason in enumerate(wanted, 6):
        assert reason in reasons[f"line {number}"], reasons
    assert "/private/a" not in Site.seen
    assert Site.seen.count("/robots.txt") == 1


def test_unreachable_host_is_named(tmp_path: Path, site: str) -> None:
    port = site.rpartition(":")[2]
    folder = prepare(config(tmp_path, [f"{site}/mill", f"https://127.0.0.1:{port}/"], download=True))
    (row,) = map(json.loads, (folder / "quarantine.jsonl").open())
    assert row["reason"].startswith("not reachable: ")


@pytest.mark.parametrize("line", ["Crawl-delay: \u00b2", "Disallow: //["])
def test_a_robots_file_that_cannot_be_parsed_forbids(site: str, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    robots = f"User-agent: *\nDisallow: /private\n{line}\n".encode()
    monkeypatch.setitem(PAGES, "/robots.txt", (200, "text/plain", robots))
    with pytest.raises(urls.UnreadableRecord, match=r"robots\.txt of the site forbids it"):
        urls.fetch(f"{site}/private/a")


def test_a_page_has_a_limit_of_time(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_SECONDS", -1.0)
    with pytest.raises(urls.UnreadableRecord, match="not complete after"):
        urls.fetch(f"{site}/mill")


@pytest.mark.parametrize(
    ("page", "target", "followed"),
    [
        ("http://8.8.8.8/", "http://169.254.169.254/latest", False),
        ("http://8.8.8.8/", "http://[::1]/", False),
        ("http://8.8.8.8/", "http://127.1:9000/", False),
        ("http://8.8.8.8/", "https://1.1.1.1/", True),
        ("http://127.0.0.1/", "http://127.0.0.1:81/", True),
    ],
)
def test_a_page_of_the_internet_leads_to_no_address_inside(page: str, target: str, followed: bool) -> None:
    ask = partial(urls.Redirects().redirect_request, Request(page), None, 302, "", {}, target)
    if followed:
        assert getattr(ask(), "full_url", None) == target
    else:
        with pytest.raises(urls.UnreadableRecord, match="not on the internet"):
            ask()
