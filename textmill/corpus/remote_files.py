"""Files behind URLs, through fsspec: s3://, gs://, https:// and whatever else it knows."""

from __future__ import annotations

from typing import Any

from textmill.corpus.source import EXTENSIONS, Source, format_from_name
from textmill.errors import TextmillError

VERSION_FIELDS = (
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


def find_remote_sources(url: str) -> list[Source]:
    """The files that a URL, a URL with a pattern, or the URL of a folder names."""
    files, path = _open_filesystem(url)
    try:
        if any(character in path for character in "*["):  # a '?' is a query in a URL
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) and not format_from_name(path.partition("?")[0]) else [path]
        if found == [path]:
            files.info(path)
    except FileNotFoundError:
        found = []
    except Exception as error:  # each protocol raises its own kinds
        raise TextmillError(
            f"corpus.sources: {url}: cannot be reached ({_first_line(error)}); check the address, the network and your access"
        ) from None
    if not found:
        raise TextmillError(f"corpus.sources: nothing at '{url}'; check the address")
    formats = {path_found: format_from_name(path_found.partition("?")[0]) for path_found in found}
    if len(found) == 1 and None in formats.values():
        raise TextmillError(f"{url}: its name does not tell a format; textmill reads {EXTENSIONS}")
    urls = {
        path_found: path_found if "://" in path_found else files.unstrip_protocol(path_found) for path_found in found
    }
    return [
        Source(urls[path_found], urls[path_found], format_name)
        for path_found, format_name in formats.items()
        if format_name
    ]


def open_url(url: str) -> Any:
    """A binary file; it can be sought in where the protocol can."""
    files, path = _open_filesystem(url)
    try:
        return files.open(path, "rb")
    except Exception as error:
        raise TextmillError(
            f"{url}: cannot be opened ({_first_line(error)}); check the address, the network and your access"
        ) from None


def remote_state(url: str) -> tuple[int, str]:
    """Size and mark: what is known of a file's content without reading it; a server that tells neither says 0 and nothing."""
    files, path = _open_filesystem(url)
    try:
        info = files.info(path)
    except Exception as error:
        raise TextmillError(
            f"{url}: cannot be reached ({_first_line(error)}); check the address, the network and your access"
        ) from None
    return int(info.get("size") or 0), next((f"{name} {info[name]}" for name in VERSION_FIELDS if info.get(name)), "")


def _open_filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise TextmillError(
            f"corpus.sources: {url}: its protocol is not there ({_first_line(error)}); install the package that reads it"
        ) from None
    return files, path


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
