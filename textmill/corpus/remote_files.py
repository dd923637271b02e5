"""Files behind URLs, through fsspec: s3://, gs://, https:// and whatever else it knows."""

from __future__ import annotations

from typing import Any

from textmill.corpus.source import EXTENSIONS, Source, format_named
from textmill.errors import TextmillError

MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
"""What file systems call the thing that changes with a file's content; the first that is there counts."""


def sources_of(word: str) -> list[Source]:
    """The files that a URL, a URL with a pattern, or the URL of a folder names."""
    files, path = _system(word)
    try:
        if any(sign in path for sign in "*["):  # a '?' is a query in a URL
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) and not format_named(path.partition("?")[0]) else [path]
        if found == [path]:
            files.info(path)
    except FileNotFoundError:
        found = []
    except Exception as error:  # each protocol raises its own kinds
        raise TextmillError(
            f"corpus.sources: {word}: cannot be reached ({_said(error)}); check the address, the network and your access"
        ) from None
    if not found:
        raise TextmillError(f"corpus.sources: nothing at '{word}'; check the address")
    kinds = {one: format_named(one.partition("?")[0]) for one in found}
    if len(found) == 1 and None in kinds.values():
        raise TextmillError(f"{word}: its name does not tell a format; textmill reads {EXTENSIONS}")
    urls = {one: one if "://" in one else files.unstrip_protocol(one) for one in found}
    return [Source(urls[one], urls[one], kind) for one, kind in kinds.items() if kind]


def open_url(url: str) -> Any:
    """A binary file; it can be sought in where the protocol can."""
    files, path = _system(url)
    try:
        return files.open(path, "rb")
    except Exception as error:
        raise TextmillError(
            f"{url}: cannot be opened ({_said(error)}); check the address, the network and your access"
        ) from None


def state_of(url: str) -> tuple[int, str]:
    """Size and mark: what is known of a file's content without reading it; a server that tells neither says 0 and nothing."""
    files, path = _system(url)
    try:
        facts = files.info(path)
    except Exception as error:
        raise TextmillError(
            f"{url}: cannot be reached ({_said(error)}); check the address, the network and your access"
        ) from None
    return int(facts.get("size") or 0), next((f"{name} {facts[name]}" for name in MARKS if facts.get(name)), "")


def _system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise TextmillError(
            f"corpus.sources: {url}: its protocol is not there ({_said(error)}); install the package that reads it"
        ) from None
    return files, path


def _said(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
