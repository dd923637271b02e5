"""Folders behind URLs (s3://, gs://, memory:// ...) with fsspec: read through a local cache, written file by file.

`fetch` copies a folder to ~/.cache/textmill/copies/HASH/NAME and returns that path. The hash is made of the URL and of
size and version of each file: while nothing changes at the URL, the copy is used again; a changed file makes a new one.
`RemoteFolder` writes files to a URL.
"""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError, warn
from textmill.storage.files import create_folder, file_lock, hash_json, replace_folder

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
    "xet_hash",
    "blob_id",
    "sha",
    "modify",
    "modificationTime",
)
"""Names that file systems use for a value that changes with the content; the first one present is used."""
ADVICE = "check the address, the network and your access rights"
OPTIMIZER = "optimizer*"
"""Files of a checkpoint that only resuming needs: larger than the model, and not copied."""


def is_url(text: str) -> bool:
    """True for a URL, false for a path."""
    return "://" in text


def public_url(url: str) -> str:
    """A URL for messages: without its query, which may be a signature."""
    return url.partition("?")[0]


def open_filesystem(url: str, setting: str = "") -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    scheme, _, rest = url.partition("://")
    if ":" in (user := rest.partition("/")[0].rpartition("@")[0]):
        raise TextmillError(
            f"{setting}{scheme}://{user.partition(':')[0]}:...: has a password, which would be recorded; "
            "give it in the environment or in the configuration of the protocol's package"
        )
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise TextmillError(
            f"{setting}{public_url(url)}: protocol not available ({first_line(error)}); install the package for it"
        ) from None
    return files, path


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def version_of(info: dict[str, Any]) -> str:
    """A value that changes with the content of a remote file; empty if the server reports none."""
    return next((f"{name} {info[name]}" for name in VERSION_FIELDS if info.get(name)), "")


def cache_folder() -> Path:
    """The folder of local copies: textmill in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill"


def fetch(url: str, patterns: list[str] | None = None) -> Path:
    """A local copy of the folder, the file or the prefix of files at a URL, without optimizer state.

    With `patterns`, only of files with such names. A copy is named by the versions of its files, so that a changed
    file makes a new copy. A file:// URL is its path.
    """
    files, path = open_filesystem(url)
    shown = public_url(url)
    if "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
        return Path(path)
    try:
        root, listing = _list_files(files, path)
    except TextmillError:
        raise
    except Exception as error:  # each protocol raises its own exceptions
        raise TextmillError(f"{shown}: cannot be reached ({type(error).__name__}); {ADVICE}") from None
    selected = {
        name: _with_version(files, f"{root}/{name}", info)
        for name, info in listing.items()
        if _is_selected(name, patterns)
    }
    if not selected:
        raise TextmillError(f"{shown}: nothing is there; {ADVICE}")
    states = {name: (info.get("size"), version_of(info)) for name, info in selected.items()}
    all_have_versions = all(version for _, version in states.values())
    copy = cache_folder() / "copies" / hash_json([url, states])[:16] / path.rstrip("/").rpartition("/")[2]
    # Of a single file or a prefix of files, the folder around it is copied.
    target = copy if root == path.rstrip("/") else copy.parent
    if not all_have_versions or not target.exists():
        _copy(files, root, selected, target, shown, again=not all_have_versions)
    return copy


def _with_version(files: Any, path: str, info: dict[str, Any]) -> dict[str, Any]:
    """The facts about a file; if the listing has no version, a request for this file may give one."""
    if version_of(info):
        return info
    try:
        return {**info, **files.info(path)}
    except Exception:  # each protocol raises its own exceptions; without a version the file is copied again
        return info


def _list_files(files: Any, path: str) -> tuple[str, dict[str, Any]]:
    """The folder that is listed, and the facts about its files by their names below it.

    bucket/run lists the folder; bucket/tokens/train lists train.bin and train.idx in bucket/tokens.
    """
    if files.isdir(path):
        root = path.rstrip("/")
        infos = files.find(path, detail=True)
    else:
        root = path.rpartition("/")[0]
        infos = {}
        for file_path, info in files.find(root, maxdepth=1, detail=True).items():
            if file_path == path or file_path.startswith(path + "."):
                infos[file_path] = info
    return root, {file_path.removeprefix(root).lstrip("/"): info for file_path, info in infos.items()}


def _is_selected(name: str, patterns: list[str] | None) -> bool:
    file_name = name.rpartition("/")[2]
    if fnmatch(file_name, OPTIMIZER):
        return False
    return patterns is None or any(fnmatch(file_name, pattern) for pattern in patterns)


def _copy(files: Any, root: str, listing: dict[str, Any], target: Path, url: str, *, again: bool) -> None:
    """Copy files into a folder that appears when it is complete; an interrupted copy goes on with the next file.

    `again` replaces an earlier copy, of which nothing says whether it is still the same.
    """
    unfinished = target.with_name(target.name + ".part")
    create_folder(unfinished, "XDG_CACHE_HOME")
    with file_lock(unfinished.parent / f"{unfinished.name}.lock", None):
        if target.exists() and not again:
            return  # another process has copied it meanwhile
        size = sum(int(info.get("size") or 0) for info in listing.values())
        warn(f"{url}: copying {len(listing)} files, {size / 1e6:,.1f} MB, to {target.parent}")
        unfinished.mkdir(exist_ok=True)
        for name, info in listing.items():
            local = unfinished / name
            if not local.resolve().is_relative_to(unfinished.resolve()):
                raise TextmillError(f"{url}: has the file name {name!r}, which leads out of its folder")
            if local.is_file() and not again:
                continue
            local.parent.mkdir(parents=True, exist_ok=True)
            temporary = local.with_name(local.name + ".tmp")
            try:
                files.get_file(f"{root}/{name}", str(temporary))
            except Exception as error:
                raise TextmillError(f"{url}: {name} cannot be copied ({first_line(error)}); {ADVICE}") from None
            if info.get("size") is not None and temporary.stat().st_size != info["size"]:
                raise TextmillError(f"{url}: {name} changed while it was copied; run the same command again")
            os.replace(temporary, local)
        replace_folder(unfinished, target)


class RemoteFolder:
    """A folder at a URL, to be written."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self.path = open_filesystem(self.url)
        self.files.invalidate_cache()

    def names(self) -> list[str]:
        """The files in the folder; none if it does not exist."""
        try:
            paths = self.files.find(self.path)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise TextmillError(f"{self.url}: cannot be reached ({first_line(error)}); {ADVICE}") from None
        return [path.removeprefix(self.path).lstrip("/") for path in paths]

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None if it is not there or not readable."""
        try:
            return json.loads(self.files.cat_file(f"{self.path}/{name}"))
        except (FileNotFoundError, ValueError):
            return None

    def put(self, local: Path, name: str) -> None:
        try:
            self.files.makedirs(f"{self.path}/{name}".rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(local), f"{self.path}/{name}")
        except Exception as error:
            raise TextmillError(f"{self.url}: {name} cannot be written ({first_line(error)}); {ADVICE}") from None

    def remove(self, name: str) -> None:
        try:
            self.files.rm_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return
        except Exception as error:
            raise TextmillError(f"{self.url}: {name} cannot be removed ({first_line(error)}); {ADVICE}") from None
