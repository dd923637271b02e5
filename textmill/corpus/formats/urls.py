"""Read lists of web addresses: each line is a page, downloaded only if `corpus.download` is set.

Most of it is manners and safety that no HTTP library has of its own: robots.txt, one request at a time per host, a
limit on bytes and on time, and no redirect from the internet into this network. urllib does the rest.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any
from urllib import request, robotparser
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import BadRecord, UnreadableRecord, check_line_length, decode_utf8, read_lines
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.streams import is_splittable
from textmill.errors import TextmillError

LINES = 500
"""Addresses in a chunk: what a kill makes the next run download again."""
THREADS = 16
"""Pages that a worker downloads at a time, each from another host."""
TIMEOUT = 20.0
"""Seconds without an answer after which a page counts as unreachable."""
MAX_SECONDS = 120.0
"""For a whole page: a server that sends a byte now and then is not waited for."""
MAX_BYTES = 5_000_000
"""Longer pages are not read."""
AGENT = "textmill"
FORBIDDEN = ["User-agent: *", "Disallow: /"]
"""A robots.txt that allows nothing."""
PAGES = ("text/html", "application/xhtml+xml", "text/plain")
CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w.:-]{1,40})""", re.IGNORECASE)


def ranges(source: Source, document_unit: str, chunk_bytes: int) -> Iterator[ChunkRange] | None:
    """Ranges of a few hundred lines."""
    return _line_ranges(source.path) if is_splittable(source) else None


def _line_ranges(path: Path) -> Iterator[ChunkRange]:
    start = 0
    first = 1
    with path.open("rb") as stream:
        while lines := list(islice(stream, LINES)):
            stop = start + sum(map(len, lines))
            yield start, stop, first
            start = stop
            first = first + len(lines)


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
        return BadRecord(source, place, str(error), line, length)
    return Document(text, source, place, json.dumps({"url": url}, ensure_ascii=False), url)


def fetch(url: str) -> str:
    """The source text of a page; UnreadableRecord tells why there is none."""
    try:
        parts = urlsplit(_to_ascii(url))
        host = parts.hostname
        _ = parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UnreadableRecord("not a web address")
    with _turn_of(host):
        if not _rules_of(f"{parts.scheme}://{parts.netloc}").can_fetch(AGENT, parts.geturl()):
            raise UnreadableRecord("robots.txt of the site forbids it")
        try:
            raw, charset = _download(parts.geturl())
        except HTTPError as error:
            raise UnreadableRecord(f"the server answered {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise UnreadableRecord(f"not reachable: {reason}") from None
    charset = charset or (found[1].decode("ascii") if (found := CHARSET.search(raw[:4096])) else "utf-8")
    try:
        return raw.decode(charset)
    except (LookupError, ValueError):  # a charset such as "undefined" raises other errors than those of decoding
        raise UnreadableRecord(f"the page is not {charset}, as it claims") from None


def _to_ascii(url: str) -> str:
    """An address as a request has it: people write letters of any script, and spaces."""
    parts = urlsplit(url)
    host = parts.netloc.encode("idna").decode("ascii")
    return quote(parts._replace(netloc=host).geturl(), safe=string.punctuation)


def _download(url: str) -> tuple[bytes, str | None]:
    """The bytes of a page and the charset of its header."""
    with _opener().open(request.Request(url, headers={"User-Agent": AGENT}), timeout=TIMEOUT) as reply:
        if (kind := reply.headers.get_content_type()) not in PAGES:
            raise UnreadableRecord(f"not a page but {kind}")
        raw = bytearray()
        stop = time.monotonic() + MAX_SECONDS
        while piece := reply.read1(MAX_BYTES):
            raw += piece
            if len(raw) > MAX_BYTES:
                raise UnreadableRecord(f"more than {MAX_BYTES:,} bytes")
            if time.monotonic() > stop:
                raise UnreadableRecord(f"not complete after {MAX_SECONDS:.0f} s")
        return bytes(raw), reply.headers.get_content_charset()


class Redirects(request.HTTPRedirectHandler):
    """Follows a redirect, unless a page of the internet leads to an address of this machine or its network."""

    def redirect_request(
        self, req: request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> request.Request | None:
        """The request to send next."""
        if _is_internal(urlsplit(newurl).hostname) and not _is_internal(urlsplit(req.full_url).hostname):
            raise UnreadableRecord("it redirects to an address that is not on the internet")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_internal(host: str | None) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # the request will say so, or a proxy knows the name
        return False
    return any(not ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_global for one in found)


@lru_cache(maxsize=1)
def _opener() -> request.OpenerDirector:
    """Follows redirects, and knows no other scheme than http and https."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        Redirects(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


@lru_cache(maxsize=10_000)
def _turn_of(host: str) -> Lock:
    """At most one request at a time goes from this process to a host."""
    return Lock()


@lru_cache(maxsize=10_000)
def _rules_of(site: str) -> robotparser.RobotFileParser:
    """The site's robots.txt; all is allowed if there is none, nothing if it is forbidden to read it, or damaged."""
    lines: list[str] = []
    try:
        raw, _ = _download(f"{site}/robots.txt")
        lines = raw.decode("utf-8", "replace").splitlines()
    except HTTPError as error:
        lines = FORBIDDEN if error.code in (401, 403) else []
    except (OSError, HTTPException, ValueError, UnreadableRecord):
        pass
    try:
        return _parse_rules(lines)
    except ValueError:  # the parser trips over an address or a number in the file
        return _parse_rules(FORBIDDEN)


def _parse_rules(lines: list[str]) -> robotparser.RobotFileParser:
    rules = robotparser.RobotFileParser()
    rules.parse(lines)
    return rules
