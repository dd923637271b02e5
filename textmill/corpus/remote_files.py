"""Read files behind URLs (s3://, gs://, https:// ...) with fsspec."""

from __future__ import annotations

from typing import Any

from textmill.corpus.source import EXTENSIONS, Source, format_from_name
from textmill.errors import TextmillError
from textmill.storage.remote_folders import ADVICE, first_line, open_filesystem, version_of


def find_remote_sources(url: str, setting: str, skipped: list[str]) -> list[Source]:
    """The files at a URL, matching a URL pattern, or in the folder at a URL; those that cannot be read are added to
    `skipped`. `setting`: where the user gave the URL."""
    files, path = open_filesystem(url, f"{setting}: ")
    try:
        if any(character in path for character in "*["):  # in a URL a '?' starts the query
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) and not format_from_name(path.partition("?")[0]) else [path]
        if found == [path]:
            files.info(path)
    except FileNotFoundError:
        found = []
    except Exception as error:  # each protocol raises its own exceptions
        raise TextmillError(f"{setting}: {url}: cannot be reached ({first_line(error)}); {ADVICE}") from None
    if not found:
        raise TextmillError(f"{setting}: nothing at '{url}'; check the address")
    formats = {path_found: format_from_name(path_found.partition("?")[0]) for path_found in found}
    if len(found) == 1 and None in formats.values():
        raise TextmillError(f"{url}: unknown format; textmill reads {EXTENSIONS}")
    urls = {
        path_found: path_found if "://" in path_found else files.unstrip_protocol(path_found) for path_found in found
    }
    skipped += sorted(urls[path_found] for path_found, format_name in formats.items() if format_name is None)
    return [
        Source(urls[path_found], urls[path_found], format_name)
        for path_found, format_name in formats.items()
        if format_name
    ]


def open_url(url: str) -> Any:
    """Open a binary file; whether it can seek depends on the protocol."""
    files, path = open_filesystem(url)
    try:
        return files.open(path, "rb")
    except Exception as error:
        raise TextmillError(f"{url}: cannot be opened ({first_line(error)}); {ADVICE}") from None


def remote_state(url: str) -> tuple[int, str]:
    """The size and fingerprint of a file, without reading it; 0 and '' if the server reports neither."""
    files, path = open_filesystem(url)
    try:
        info = files.info(path)
    except Exception as error:
        raise TextmillError(f"{url}: cannot be reached ({first_line(error)}); {ADVICE}") from None
    return int(info.get("size") or 0), version_of(info)
