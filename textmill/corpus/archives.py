"""Find and open the files inside local zip and tar archives; their addresses are like zip://inner.txt::/data/a.zip."""

from __future__ import annotations

import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from threading import Lock
from typing import BinaryIO, cast

from textmill.corpus.source import Source, archive_kind, format_from_name, missing_package
from textmill.errors import TextmillError

HELD_BYTES = 64 << 20
"""A file of a tar archive that is not longer is held in memory: going back in a compressed archive starts it again."""
ZIP_HEADER = struct.Struct("<4x2xHH4xIIIHH")
"""What stands before a file in a zip: its flags, method, checksum, compressed and real size, and how long its name and
the fields after it are."""
HEAD_BYTES = 1 << 12
"""Enough for this and most small files."""
ENCRYPTED = 1
STREAMED = 8
"""The flags of a file that is encrypted, and of one whose checksum and sizes are only in the directory of the zip."""
PLAIN_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
READ_BYTES = 1 << 20
"""Bytes after the last file of a tar archive that are read at a time."""
_LOCK = Lock()
"""The threads of a process share one open archive."""


def find_members(path: str, skipped: list[str]) -> Iterator[Source]:
    """The sources in an archive; files of it that cannot be read are added to `skipped`."""
    kind = archive_kind(path)
    folder = os.path.normpath(path)
    absolute = os.path.abspath(path)
    _open_file.cache_clear()
    for member, position in _open_archive(path).positions.items():
        name = f"{folder}/{member}"
        if member.startswith(".") or "/." in member or "__MACOSX" in member.split("/"):
            continue
        found = format_from_name(member)
        if found is None or missing_package(found):
            skipped.append(name)
        else:
            address = f"{kind}://{member}::{absolute}"
            yield Source(name, address, found, position=position)


def open_member(address: str) -> BinaryIO:
    """Open a file inside an archive; it can seek."""
    path, member = _parse(address)
    try:
        return _open_archive(path).open(member)
    except (KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise TextmillError(f"{path}: '{member}' cannot be read ({error}); unpack the archive yourself") from None


def read_small_member(address: str, position: int, size: int) -> bytes | None:
    """The content of a file inside a zip of less than `size` bytes, ten times as fast as a stream of zipfile.

    None if it is longer, damaged, or stored in a way that zipfile must judge. The directory of the zip, which may have
    a million files, is read only for a file that was streamed.
    """
    if not address.startswith("zip://"):
        return None
    path, member = _parse(address)
    handle = _open_file(path, os.getpid()).fileno()
    head = os.pread(handle, HEAD_BYTES, position - 1)
    if len(head) < ZIP_HEADER.size:
        return None
    flags, method, checksum, stored, length, *fields = ZIP_HEADER.unpack_from(head)
    if flags & STREAMED and (entry := cast(_Zip, _open_archive(path)).archive.NameToInfo.get(member)):
        checksum, stored, length = entry.CRC, entry.compress_size, entry.file_size
    if length >= size or flags & ENCRYPTED or method not in PLAIN_METHODS:
        return None
    start = ZIP_HEADER.size + sum(fields)
    is_in_head = start + stored <= len(head)
    data = head[start : start + stored] if is_in_head else os.pread(handle, stored, position - 1 + start)
    if method:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, length + 1)
        except zlib.error:
            return None
    return data if zlib.crc32(data) == checksum else None


def member_state(address: str) -> tuple[int, str]:
    """The size of a file inside an archive, and a value that changes with its content."""
    path, member = _parse(address)
    return _open_archive(path).state(member)


def _parse(address: str) -> tuple[str, str]:
    member, _, path = address.partition("://")[2].rpartition("::")
    return path, member


class _Zip:
    def __init__(self, path: str) -> None:
        self.archive = zipfile.ZipFile(path)
        entries = (entry for entry in self.archive.infolist() if not entry.is_dir())
        self.positions = {entry.filename: entry.header_offset + 1 for entry in entries}

    def open(self, member: str) -> BinaryIO:
        return cast(BinaryIO, self.archive.open(member))

    def state(self, member: str) -> tuple[int, str]:
        entry = self.archive.getinfo(member)
        return entry.file_size, f"CRC {entry.CRC:08x}"


class _Tar:
    def __init__(self, path: str) -> None:
        self.archive = tarfile.open(path)
        self.entries = {entry.name: entry for entry in self.archive if entry.isfile()}
        while cast(BinaryIO, self.archive.fileobj).read(READ_BYTES):  # the checksum of compressed data is at its end
            pass
        self.positions = {name: number for number, name in enumerate(self.entries, 1)}
        self.held: tuple[str, bytes] = ("", b"")

    def open(self, member: str) -> BinaryIO:
        entry = self.entries[member]
        with _LOCK:
            stream = cast(BinaryIO, self.archive.extractfile(entry))
            if entry.size > HELD_BYTES:
                return stream
            if self.held[0] != member:
                self.held = member, stream.read()
            return io.BytesIO(self.held[1])

    def state(self, member: str) -> tuple[int, str]:
        entry = self.entries[member]
        return entry.size, f"mtime {entry.mtime}, {entry.size} bytes"


def _open_archive(path: str) -> _Zip | _Tar:
    """An open archive; it stays open for its next file."""
    try:
        state = os.stat(path)
        # A child process must not share the parent's position in the file.
        return _open_cached(
            path if path.startswith(os.sep) else os.path.abspath(path), os.getpid(), state.st_size, state.st_mtime_ns
        )
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise TextmillError(f"{path}: not a readable archive ({error}); repair it or remove it") from None


@lru_cache(maxsize=4)
def _open_file(path: str, process: int) -> BinaryIO:
    return open(path, "rb", buffering=0)


@lru_cache(maxsize=4)
def _open_cached(path: str, process: int, size: int, mtime_ns: int) -> _Zip | _Tar:
    return _Zip(path) if archive_kind(path) == "zip" else _Tar(path)
