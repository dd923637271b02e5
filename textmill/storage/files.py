"""Files that appear whole or not at all, and the checksums that prove it later."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from textmill.errors import TextmillError
from textmill.storage.faults import touch

BLOCK = 1 << 20
PART = 1 << 26
"""Bytes of a long file that have a checksum of their own."""


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value in its one canonical spelling."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync(path: Path) -> None:
    """Make a file, or the names inside a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        touch("write")
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file whole or not at all; return its length and SHA-256, taken while writing."""
    digest, length = hashlib.sha256(), 0
    with writing(path) as stream:
        for block in blocks:
            touch("write")
            stream.write(block)
            digest.update(block)
            length += len(block)
    return {"bytes": length, "sha256": digest.hexdigest()}


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A stream into a file that appears whole when the block ends, or not at all."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            touch("write")
            stream.flush()
            os.fsync(stream.fileno())
        touch()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> dict[str, Any]:
    """Write a text file whole or not at all."""
    return write_bytes(path, [text.encode()])


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write a JSON file whole or not at all, readable by a person."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken one is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TextmillError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise TextmillError(f"{path}: not readable as JSON ({error}); the file is damaged or not ours") from None


def account_of(path: Path) -> dict[str, Any]:
    """A file's length and SHA-256, as a manifest records them; of a long file also those of its parts, to say where damage is."""
    digest, parts = hashlib.sha256(), [hashlib.sha256()]
    with open(path, "rb") as stream:
        for number in itertools.count(1):
            if not (block := stream.read(BLOCK)):
                break
            digest.update(block)
            parts[-1].update(block)
            if number * BLOCK % PART == 0:
                parts.append(hashlib.sha256())
    account: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return {**account, "parts": [part.hexdigest()[:16] for part in parts]} if len(parts) > 1 else account


def faults_of(folder: Path, files: dict[str, dict[str, Any]], *, deep: bool = True) -> list[str]:
    """What is wrong with the files that a manifest names: missing, another length, another checksum."""
    faults = []
    for name, account in files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (length := path.stat().st_size) != account["bytes"]:
            faults.append(f"{name} has {length:,} bytes instead of {account['bytes']:,}")
        elif deep and (now := account_of(path))["sha256"] != account["sha256"]:
            faults.append(
                f"{name} does not match its checksum{_place_of(now.get('parts', []), account.get('parts', []))}"
            )
    return faults


def _place_of(now: list[str], before: list[str]) -> str:
    """Where a long file differs from what it was."""
    changed = [number for number, (one, other) in enumerate(zip(now, before, strict=False)) if one != other]
    return f" (between bytes {changed[0] * PART:,} and {(changed[0] + 1) * PART:,})" if changed else ""


@contextmanager
def locked(path: Path, busy: str | None) -> Iterator[None]:
    """Keep a second process out, with what `busy` says, or let it wait; the lock goes with the process, however it ends."""
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                raise TextmillError(busy) from None
            except OSError as error:
                advice = "take a folder on another one, or have it mounted with locks (flock)"
                raise TextmillError(
                    f"{path}: its file system does not lock files ({error.strerror}); {advice}"
                ) from None
            if _stands(lock, path):
                yield
                return


def _stands(stream: IO[str], path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def new_folder(path: Path, setting: str) -> None:
    """Make a folder and those above it; where that cannot be, say which setting names another."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextmillError(f"{path}: cannot be made ({error.strerror}); set another {setting}") from None


@contextmanager
def taken(folder: Path, setting: str, first: bool) -> Iterator[Callable[[], None]]:
    """A folder that the first process makes and locks for all; unless what is given is called, nothing stays that was not there before."""
    if not first:
        yield partial(new_folder, folder, setting)
        return
    there = next(above for above in (folder, *folder.parents) if above.exists())
    before = set(os.listdir(folder)) if there == folder and folder.is_dir() else set()
    kept: list[bool] = []
    new_folder(folder, setting)
    with locked(folder / ".lock", f"{folder}: another process is training there; wait for it or set another {setting}"):
        try:
            yield partial(kept.append, True)
        finally:
            if not kept:
                _clear_back(folder, before, there)


def _clear_back(folder: Path, before: set[str], there: Path) -> None:
    """Take out of a folder what was not in it before, and the folder and those above it that were not there either."""
    for path in folder.iterdir():
        if path.name not in before:
            clear(path)
    with suppress(OSError):  # something else came into it
        while folder != there:
            folder.rmdir()
            folder = folder.parent


def shown(path: Path) -> str:
    """A path as a person standing here would write it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the folder was taken away from under a run that goes on
        return str(path)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def remove_folder(folder: Path) -> None:
    """Take the name away first, so that a folder half removed is never taken for a damaged or a half-made one."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.old-{os.getpid()}")
        clear(aside)  # an earlier removal in this process, or under its number, was cut short
        touch()
        os.rename(folder, aside)
        clear(aside)


def replace_folder(new: Path, old: Path) -> None:
    """Put a finished folder in its place; a folder that stood there before goes only after that."""
    sync(new)
    if old.exists():
        touch()
        os.rename(old, old.with_name(f"{old.name}.old-{os.getpid()}"))
    touch()
    os.rename(new, old)
    sync(old.parent)
    for aside in old.parent.glob(f"{glob.escape(old.name)}.old-*"):
        clear(aside)


def clear(path: Path) -> None:
    """Remove a file, or a folder with all in it, if it is there; what cannot be removed stays."""
    touch()
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for inner in path.iterdir():
                clear(inner)
            path.rmdir()
        else:
            path.unlink()
