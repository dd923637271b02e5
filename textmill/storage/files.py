"""Atomic file writes, checksums, file locks and safe removal of folders."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from textmill.errors import TextmillError
from textmill.storage.faults import on_disk_access

BLOCK_BYTES = 1 << 20


def hash_file(path: Path | str) -> str:
    """SHA-256 of a file, read in blocks, without a stream, which would cost most of the time of a small file."""
    digest = hashlib.sha256()
    handle = os.open(path, os.O_RDONLY)
    try:
        while block := os.read(handle, BLOCK_BYTES):
            digest.update(block)
    finally:
        os.close(handle)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order and white space."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fsync_path(path: Path) -> None:
    """fsync a file, or the names in a folder, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        on_disk_access("write")
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file atomically; return its length and SHA-256, computed while writing."""
    digest = hashlib.sha256()
    length = 0
    with atomic_writer(path) as stream:
        for block in blocks:
            on_disk_access("write")
            stream.write(block)
            digest.update(block)
            length += len(block)
    return {"bytes": length, "sha256": digest.hexdigest()}


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file; it is renamed to `path` when the block ends, and removed if the block fails."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            on_disk_access("write")
            stream.flush()
            os.fsync(stream.fileno())
        on_disk_access()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder_for(path: Path, key: str) -> None:
    """Make the folder of a file that a user names in `key`; refuse a path that cannot become a file."""
    check_file_name(path, key)
    path.parent.mkdir(parents=True, exist_ok=True)


def check_file_name(path: Path, key: str) -> None:
    """Refuse a path that cannot become a file, without creating its folder."""
    if path.is_dir():
        raise TextmillError(f"{key}: {path} is a folder; name a file in it")
    if not next(parent for parent in path.parents if parent.exists()).is_dir():
        raise TextmillError(f"{key}: {path.parent} is not a folder; name another one")


def write_text(path: Path, text: str) -> dict[str, Any]:
    """Write a text file atomically."""
    return write_bytes(path, [text.encode()])


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write an indented JSON file atomically."""
    return write_text(path, _json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def is_as_written(path: Path) -> bool:
    """True if a JSON file has exactly the bytes that `write_json` writes for its content."""
    return path.read_bytes() == _json_text(read_json(path)).encode(errors="surrogatepass")


def read_json(path: Path) -> Any:
    """Read a JSON file; the error names a missing or damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TextmillError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise TextmillError(
            f"{path}: not readable as JSON ({error}); the file is damaged or was not written by textmill"
        ) from None


def manifest_entry(path: Path) -> dict[str, Any]:
    """A file's length and SHA-256 as a manifest stores them."""
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}


def find_damage(folder: Path, files: dict[str, dict[str, Any]], *, deep: bool = True) -> list[str]:
    """Problems of the files that a manifest lists: missing, wrong length or, with `deep`, wrong checksum."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (length := path.stat().st_size) != entry["bytes"]:
            problems.append(f"{name} has {length:,} bytes instead of {entry['bytes']:,}")
        elif deep and hash_file(path) != entry["sha256"]:
            problems.append(f"{name} does not match its checksum")
    return problems


@contextmanager
def file_lock(path: Path, busy_message: str | None) -> Iterator[None]:
    """Hold an exclusive lock; if another process holds it, raise `busy_message`, or wait when that is None.

    The operating system releases the lock when the process ends, however it ends.
    """
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy_message else 0))
            except BlockingIOError:
                raise TextmillError(busy_message) from None
            except OSError as error:
                problem = f"{path}: its file system does not support file locks ({error.strerror})"
                raise TextmillError(f"{problem}; use a folder on another disk, or mount this one with flock") from None
            if _is_same_file(lock, path):
                yield
                return


def _is_same_file(stream: IO[str], path: Path) -> bool:
    """Whether `path` still names this open file; another process may have removed it."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def create_folder(path: Path, setting: str) -> None:
    """Create a folder and its parents; the error names the setting that chooses another one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextmillError(f"{path}: cannot be created ({error.strerror}); set another {setting}") from None


def check_folder(path: Path, setting: str) -> None:
    """Refuse a folder that cannot be created or written, without creating it."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise TextmillError(f"{path}: cannot be created ({existing} is a file); set another {setting}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise TextmillError(f"{path}: cannot be written (no permission in {existing}); set another {setting}")


@contextmanager
def claim_folder(folder: Path, setting: str, first: bool) -> Iterator[Callable[[], None]]:
    """Create a folder and lock it on the first rank; yields a function that keeps what is written there.

    Without a call of that function, everything new in the folder is removed at the end.
    """
    if not first:
        yield partial(create_folder, folder, setting)
        return
    existing_parent = next(path for path in (folder, *folder.parents) if path.exists())
    existing_files = set(os.listdir(folder)) if existing_parent == folder and folder.is_dir() else set()
    keep_calls: list[bool] = []
    create_folder(folder, setting)
    with file_lock(
        folder / ".lock", f"{folder}: another process is training in this folder; wait for it or set another {setting}"
    ):
        try:
            yield partial(keep_calls.append, True)
        finally:
            if not keep_calls:
                _remove_new(folder, existing_files, existing_parent)


def _remove_new(folder: Path, existing_files: set[str], existing_parent: Path) -> None:
    """Remove the new files of a folder, then the folders that are empty now, up to the one that existed before."""
    for path in folder.iterdir():
        if path.name not in existing_files:
            try_remove(path)
    with suppress(OSError):  # another process wrote into it
        while folder != existing_parent:
            folder.rmdir()
            folder = folder.parent


def format_path(path: Path) -> str:
    """A path for messages: relative where it is inside the working directory."""
    try:
        working_directory = Path.cwd()
    except FileNotFoundError:  # the working directory was removed while a run continues
        return str(path)
    return str(path.relative_to(working_directory) if path.is_relative_to(working_directory) else path)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it, so that a half-removed folder is never mistaken for a damaged one."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.old-{os.getpid()}")
        try_remove(aside)  # left by an earlier removal under the same process id that was interrupted
        on_disk_access()
        os.rename(folder, aside)
        try_remove(aside)


def replace_folder(new: Path, old: Path) -> None:
    """Rename a finished folder to its final name; a folder that had this name is removed only after that."""
    fsync_path(new)
    if old.exists():
        on_disk_access()
        os.rename(old, old.with_name(f"{old.name}.old-{os.getpid()}"))
    on_disk_access()
    os.rename(new, old)
    fsync_path(old.parent)
    for aside in old.parent.glob(f"{glob.escape(old.name)}.old-*"):
        try_remove(aside)


def try_remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists; ignore what cannot be removed."""
    on_disk_access()
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for inner in path.iterdir():
                try_remove(inner)
            path.rmdir()
        else:
            path.unlink()


def append_line(path: Path, line: str) -> None:
    """Append a line to a file in one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
