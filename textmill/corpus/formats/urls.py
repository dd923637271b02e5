"""Read lists of web addresses: each line is a page, downloaded only if `corpus.download` is set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from threading import Lock
from urllib import request, robotparser
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import RAW_BYTES, BadRecord, UnreadableRecord, check_line_length, decode_utf8, read_lines
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.streams import is_splittable
from textmill.errors import TextmillError

LINES = 500
"""Addresses in a chunk: what a kill makes the next run download again."""
THREADS = 16
"""Pages that a worker downloads at a time, each from another host."""
TIMEOUT = 20.0
"""Seconds without an answer after which a page counts as unreachable."""
MAX_BYTES = 5_000_000
"""Longer pages are not read."""
AGENT = "textmill"
PAGES = ("text/html", "application/xhtml+xml", "text/plain")
CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w.:-]{1,40})""", re.IGNORECASE)


def ranges(source: Source, document_unit: str) -> Iterator[ChunkRange] | None:
    """Ranges of a few hundred lines."""
    return _line_ranges(source.path) if is_splittable(source) else None


def _line_ranges(path: Path) -> Iterator[ChunkRange]:
    start, first = 0, 1
    with path.open("rb") as stream:
        while lines := list(islice(stream, LINES)):
            stop = start + sum(map(len, lines))
            yield start, stop, first
            start, first = stop, first + len(lines)


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield one record per line; a page that cannot be read is a BadRecord with the reason."""
    if not config.download:
        raise TextmillError(
            f"{chunk.source.name}: a list of web addresses, and nothing is downloaded unless you say so; "
            "set corpus.download=true"
        )
    if "html" not in config.rules:
        raise TextmillError("corpus.rules: web pages need the rule html; add it, or set corpus.preset=web")
    lines = read_lines(chunk)
    with ThreadPoolExecutor(THREADS) as pool:
        while some := list(islice(lines, LINES)):
            yield from pool.map(lambda line: _read_page(chunk.source.name, *line), some)


def _read_page(source: str, number: int, line: bytes, length: int) -> Document | BadRecord:
    place = f"line {number}"
    try:
        check_line_length(length)
        url = decode_utf8(line).strip()
        text = fetch(url) if url else ""
    except UnreadableRecord as error:
        return BadRecord(source, place, str(error)[:RAW_BYTES], line[:RAW_BYTES], length)
    return Document(text, source, place, json.dumps({"url": url}, ensure_ascii=False), url)


def fetch(url: str) -> str:
    """The source text of a page; UnreadableRecord tells why there is none."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UnreadableRecord("not a web address")
    with _turn_of(host):
        if not _rules_of(f"{parts.scheme}://{parts.netloc}").can_fetch(AGENT, url):
            raise UnreadableRecord("robots.txt of the site forbids it")
        try:
            raw, charset = _download(url)
        except HTTPError as error:
            raise UnreadableRecord(f"the server answered {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise UnreadableRecord(f"not reachable: {reason}") from None
    charset = charset or (found[1].decode("ascii") if (found := CHARSET.search(raw[:4096])) else "utf-8")
    try:
        return raw.decode(charset)
    except (LookupError, UnicodeDecodeError):
        raise UnreadableRecord(f"the page is not {charset}, as it claims") from None


def _download(url: str) -> tuple[bytes, str | None]:
    """The bytes of a page and the charset of its header."""
    with _opener().open(request.Request(url, headers={"User-Agent": AGENT}), timeout=TIMEOUT) as reply:
        if (kind := reply.headers.get_content_type()) not in PAGES:
            raise UnreadableRecord(f"not a page but {kind}")
        raw = reply.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UnreadableRecord(f"more than {MAX_BYTES:,} bytes")
        return raw, reply.headers.get_content_charset()


@lru_cache(maxsize=1)
def _opener() -> request.OpenerDirector:
    """Follows redirects, and knows no other scheme than http and https."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(), request.HTTPHandler(), request.HTTPSHandler(), request.HTTPRedirectHandler(),
        request.HTTPDefaultErrorHandler(), request.HTTPErrorProcessor(), request.UnknownHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


@lru_cache(maxsize=10_000)
def _turn_of(host: str) -> Lock:
    """At most one request at a time goes from this process to a host."""
    return Lock()


@lru_cache(maxsize=10_000)
def _rules_of(site: str) -> robotparser.RobotFileParser:
    """The site's robots.txt; all is allowed if there is none, nothing if it is forbidden to read it."""
    lines: list[str] = []
    try:
        raw, _ = _download(f"{site}/robots.txt")
        lines = raw.decode("utf-8", "replace").splitlines()
    except HTTPError as error:
        lines = ["User-agent: *", "Disallow: /"] if error.code in (401, 403) else []
    except (OSError, HTTPException, ValueError, UnreadableRecord):
        pass
    rules = robotparser.RobotFileParser()
    rules.parse(lines)
    return rules
