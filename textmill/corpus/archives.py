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
ZIP_HEADER = struct.Struct("<26xHH")
"""What stands before a file in a zip: among other things how long its name and the fields after it are."""
HEAD_BYTES = 1 << 10
"""Enough for most names and fields."""
ENCRYPTED = 1
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
    for position, member in enumerate(_open_archive(path).names, 1):
        name = f"{folder}/{member}"
        if member.startswith(".") or "/." in member or "__MACOSX" in member.split("/"):
            continue
        found = format_from_name(member)
        if found is None or missing_package(found):
            skipped.append(name)
        else:
            address = f"{kind}://{member}::{absolute}"
            yield Source(name, address, found, position=position if kind == "tar" else 0)


def open_member(address: str) -> BinaryIO:
    """Open a file inside an archive; it can seek."""
    path, member = _parse(address)
    try:
        return _open_archive(path).open(member)
    except (KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise TextmillError(f"{path}: '{member}' cannot be read ({error}); unpack the archive yourself") from None


def read_small_member(address: str, size: int) -> bytes | None:
    """The content of a file inside a zip of less than `size` bytes; None for one that a stream has to read."""
    path, member = _parse(address)
    archive = _open_archive(path)
    return archive.read_small(member, size) if isinstance(archive, _Zip) else None


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
        self.names = [entry.filename for entry in self.archive.infolist() if not entry.is_dir()]

    def open(self, member: str) -> BinaryIO:
        return cast(BinaryIO, self.archive.open(member))

    def state(self, member: str) -> tuple[int, str]:
        entry = self.archive.getinfo(member)
        return entry.file_size, f"CRC {entry.CRC:08x}"

    def read_small(self, member: str, size: int) -> bytes | None:
        """A member of less than `size` bytes, ten times as fast as a stream of zipfile; None if it is longer, damaged,
        or stored in a way that zipfile must judge."""
        entry = self.archive.NameToInfo.get(member)
        if (
            entry is None
            or entry.file_size >= size
            or entry.flag_bits & ENCRYPTED
            or entry.compress_type not in PLAIN_METHODS
        ):
            return None
        handle = cast(BinaryIO, self.archive.fp).fileno()
        head = os.pread(handle, HEAD_BYTES + entry.compress_size, entry.header_offset)
        start = ZIP_HEADER.size + sum(ZIP_HEADER.unpack(head[: ZIP_HEADER.size])) if len(head) > ZIP_HEADER.size else 0
        data = head[start : start + entry.compress_size]
        if entry.compress_type:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.file_size + 1)
            except zlib.error:
                return None
        return data if zlib.crc32(data) == entry.CRC else None


class _Tar:
    def __init__(self, path: str) -> None:
        self.archive = tarfile.open(path)
        self.entries = {entry.name: entry for entry in self.archive if entry.isfile()}
        while cast(BinaryIO, self.archive.fileobj).read(READ_BYTES):  # the checksum of compressed data is at its end
            pass
        self.names = list(self.entries)
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
def _open_cached(path: str, process: int, size: int, mtime_ns: int) -> _Zip | _Tar:
    return _Zip(path) if archive_kind(path) == "zip" else _Tar(path)
