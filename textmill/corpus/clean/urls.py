"""Check a web page's URL against blocked sites and file extensions."""

from __future__ import annotations

import re
from collections.abc import Collection

_ADDRESS = re.compile(
    r"https?://(?:[^\s/?#@]*@)?([^\s/?#:@]+\.[^\s/?#:@.]+|\[[0-9a-f:.]+\])\.?(?::\d+)?(/[^\s?#]*)?(?:[?#]\S*)?",
    re.IGNORECASE,
)
_IP = re.compile(r"[\d.]+")
_SECOND_LEVEL = frozenset("ac co com edu gen go gob gov gouv gv k12 mil ne net nom or org re".split())


def is_blocked(url: str, domains: Collection[str], extensions: Collection[str]) -> bool:
    """True if the URL is not http(s), or its site or file extension is blocked.

    A domain with a dot (`example.com`) blocks that host and its subdomains. One without (`example`) blocks the
    registered name under any top-level domain: example.org, www.example.co.uk.
    """
    found = _ADDRESS.fullmatch(url.strip())
    if not found:
        return True
    host = found[1].lower()
    path = (found[2] or "").lower()
    if path.endswith(tuple(extensions)):
        return True
    if registered_name(host) in domains:
        return True
    labels = host.split(".")
    return any(".".join(labels[start:]) in domains for start in range(len(labels) - 1))


def registered_name(host: str) -> str:
    """The label before the public suffix: `bbc` for www.bbc.co.uk; '' for an IP address."""
    if _IP.fullmatch(host) or host.startswith("["):
        return ""
    labels = host.split(".")
    ending = 2 if len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in _SECOND_LEVEL else 1
    return labels[-1 - ending] if len(labels) > ending else ""
