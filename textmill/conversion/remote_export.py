"""Exports to a URL: written and checked in the local cache, then copied, with the manifest last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.files import create_folder, file_lock, hash_json, remove_folder, write_json
from textmill.storage.hub import HUB_SCHEME, upload_model
from textmill.storage.remote_folders import RemoteFolder, cache_folder
from textmill.storage.stages import MANIFEST, Force, list_changes, open_manifest

UNFINISHED = "unfinished-export.json"
"""A file that says that what is in a folder is an export that was not finished; another export may replace it."""


def export_to_url(config: RunConfig, force: Force, export: Callable[[RunConfig, Force], Path | str]) -> str:
    """Export into the cache, then copy the folder to `export.folder`; return the URL."""
    url = str(config.export.folder).rstrip("/")
    local = cache_folder() / "exports" / hash_json(url)[:16] / url.rpartition("/")[2]
    create_folder(local.parent, "XDG_CACHE_HOME")
    with file_lock(local.parent / "lock", f"{url}: another textmill process is exporting to it; wait for it"):
        settings = config.export.model_copy(update={"folder": str(local)})
        export(config.model_copy(update={"export": settings}), "changed" if force == "no" else force)
        sizes = [entry["bytes"] for entry in open_manifest(local)["files"].values()]
        try:
            copied = True
            if url.startswith(HUB_SCHEME):
                upload_model(local, url.removeprefix(HUB_SCHEME), replace=force != "no")
            else:
                copied = _copy(local, RemoteFolder(url), force)
        except TextmillError:
            remove_folder(local)
            raise
        remove_folder(local)
    result = f"copied {len(sizes) + 1} files, {sum(sizes) / 1e6:,.1f} MB, to" if copied else "done already:"
    print(f"export: {result} {url}")
    return url


def _copy(local: Path, remote: RemoteFolder, force: Force) -> bool:
    """Copy a folder, unless the same export is there already (then return False).

    The manifest is removed first and written last, so that a folder with a manifest is complete.
    """
    manifest = open_manifest(local)
    names = remote.names()
    earlier = remote.read_json(MANIFEST) if MANIFEST in names else None
    if not isinstance(earlier, dict) or earlier.get("verb") != "export":
        earlier = None
    if names and earlier is None and UNFINISHED not in names:
        raise TextmillError(
            f"{remote.url}: exists and was not made by 'textmill export'; move it away or set another folder"
        )
    if earlier is not None and force == "no":
        if earlier.get("fingerprint") == manifest["fingerprint"]:
            return False
        changes = list_changes(earlier.get("made_from") or {}, manifest["made_from"])
        raise TextmillError(
            f"{remote.url} was made from other settings or inputs: {'; '.join(changes[:4])}; choose another folder, or "
            "replace it with --force"
        )
    write_json(local.parent / UNFINISHED, {"fingerprint": manifest["fingerprint"]})
    remote.put(local.parent / UNFINISHED, UNFINISHED)
    if MANIFEST in names:
        remote.remove(MANIFEST)
    for name in manifest["files"]:
        remote.put(local / name, name)
    # Only files of the earlier export are removed: folders below this one may be exports of their own.
    earlier_files = set(earlier.get("files") or {}) if earlier is not None else set()
    for name in set(names) & earlier_files - manifest["files"].keys():
        remote.remove(name)
    remote.put(local / MANIFEST, MANIFEST)
    remote.remove(UNFINISHED)
    return True
