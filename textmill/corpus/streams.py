"""Open a local or remote file as a byte stream, decompress it, and convert it to UTF-8."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile

import pyarrow as pa

from textmill.corpus.archives import is_member, open_member
from textmill.corpus.encodings import SAMPLE_BYTES, find_binary_format, mark_length, resolve_encoding
from textmill.corpus.source import COMPRESSIONS, Source
from textmill.errors import TextmillError
from textmill.storage.remote_folders import ADVICE, first_line, open_filesystem, version_of

BUFFER_BYTES = 1 << 18


class BrokenStream(Exception):
    """Raised when a stream is damaged; all data before the damage has been delivered.

    If only what follows the data is damaged, it is raised when the stream is closed.
    """


def is_remote(address: str) -> bool:
    """True for a URL or a file inside an archive, False for a path."""
    return "://" in address


def stored_name(address: str) -> str:
    """The file name in lower case; for a URL, without its query, and for a file in an archive, without the archive."""
    return (address.partition("::")[0].partition("?")[0] if is_remote(address) else address).lower()


def open_raw(address: str) -> BinaryIO:
    """Open the stored bytes of a local or remote file, still compressed."""
    if not is_remote(address):
        return open(address, "rb", buffering=BUFFER_BYTES)
    if is_member(address):
        member = open_member(address)
        return io.BufferedReader(_BlockStream(member.read, member), BUFFER_BYTES)
    return io.BufferedReader(_BlockStream(_RemoteReader(open_url(address), address).read1), BUFFER_BYTES)


def open_seekable(address: str) -> Any:
    """Open a file for random access."""
    if not is_remote(address):
        return open(address, "rb")
    if is_member(address):
        return open_member(address)
    return open_url(address)


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


def open_decompressed(address: str) -> io.BufferedReader:
    """Open a file for reading, decompressed but in the encoding that it is stored in."""
    return decompress(open_raw(address), address)


def decompress(raw: BinaryIO, address: str) -> io.BufferedReader:
    """The decompressed content of the open file `raw`: itself, if its name says that it is not compressed."""
    stored = cast(io.BufferedReader, raw)
    extension = next((end for end in COMPRESSIONS if stored_name(address).endswith(end)), None)
    if extension and stored.peek(1):
        return io.BufferedReader(_BlockStream(_open_decompressor(raw, extension, address), raw), BUFFER_BYTES)
    return stored


def open_stream(source: Source) -> io.BufferedReader:
    """Open a file for reading records: decompressed, and UTF-8 even if stored in another encoding.

    Read with `readline` or `read1`: they return everything before a damaged part.
    """
    raw = open_decompressed(source.address)
    head = raw.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
    if (kind := find_binary_format(head)) is not None:
        raw.close()
        raise BrokenStream(f"the file is {kind}: not text, whatever its name says; convert or remove it")
    encoding = resolve_encoding(source.encoding, head)
    if encoding != "utf-8":
        raw.read(mark_length(head))
        raw = io.BufferedReader(_BlockStream(_Transcoder(raw, encoding).read1, raw), BUFFER_BYTES)
    return raw


def read_head(source: Source, *, is_converted: bool = True) -> bytes:
    """The first bytes of a file, decompressed and, if `is_converted`, as UTF-8."""
    stream = open_stream(source) if is_converted else open_decompressed(source.address)
    try:
        return stream.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
    finally:
        with suppress(BrokenStream):  # what follows the data is reported when the file is read
            stream.close()


def is_splittable(source: Source) -> bool:
    """True if reading can start in the middle: a local file of text, not compressed, in UTF-8."""
    if is_remote(source.address) or stored_name(source.address).endswith(COMPRESSIONS):
        return False
    with open(source.address, "rb") as stream:
        head = stream.read(SAMPLE_BYTES)
    return find_binary_format(head) is None and resolve_encoding(source.encoding, head) == "utf-8"


def _open_decompressor(raw: BinaryIO, extension: str, address: str) -> Callable[[int], bytes]:
    if extension == ".gz":
        return gzip.GzipFile(fileobj=raw).read1
    if extension == ".bz2":
        return bz2.BZ2File(raw).read1
    if extension == ".xz":
        return lzma.LZMAFile(raw).read1
    return _ZstdReader(raw, address).read1


class _BlockStream(io.RawIOBase):
    """A raw stream over a block reader.

    Damaged data raises BrokenStream. An error of the disk stays an OSError.
    """

    def __init__(self, read1: Callable[[int], bytes], underlying: BinaryIO | None = None) -> None:
        self.read1 = read1
        self.underlying = underlying
        self.error_found: BrokenStream | None = None
        self.error_after_end: BrokenStream | None = None
        self.delivered = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.delivered

    def readinto(self, buffer: Any) -> int:
        if self.error_found is not None:
            raise self.error_found
        filled = 0
        while filled < len(buffer):
            try:
                block = self.read1(len(buffer) - filled)
            except (EOFError, OSError, zlib.error, lzma.LZMAError, BadZipFile, UnicodeDecodeError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                if isinstance(error, gzip.BadGzipFile) and self.delivered + filled and "Not a gzipped" in str(error):
                    # The data is complete, so it ends here, and its last line counts.
                    self.error_after_end = BrokenStream("bytes that are not gzip follow the data; they are ignored")
                    self.read1 = lambda size: b""
                    break
                self.error_found = BrokenStream(f"the stream is damaged: {str(error)[:1].lower()}{str(error)[1:]}")
                if not filled:
                    raise self.error_found from None
                break
            if not block:
                break
            buffer[filled : filled + len(block)] = block
            filled += len(block)
        self.delivered += filled
        return filled

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self.underlying is not None:
                self.underlying.close()
        finally:
            super().close()
        if self.error_after_end is not None:
            raise self.error_after_end


class _ZstdReader:
    """Decompress zstd with Arrow, which detects an incomplete frame.

    Arrow withholds the last data before the damage. So on an error the file is opened again and that part is read byte
    by byte.
    """

    def __init__(self, raw: BinaryIO, address: str) -> None:
        self.address = address
        self.delivered = 0
        self.read_size = 0
        self.stream = self._open(raw)

    def _open(self, raw: BinaryIO) -> Any:
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")

    def read1(self, size: int) -> bytes:
        try:
            block: bytes = self.stream.read(self.read_size or size)
        except OSError:
            if self.read_size:
                raise
            self.read_size, self.stream = 1, self._open(open_raw(self.address))
            left = self.delivered
            while left and (skipped := self.stream.read(min(left, 1 << 16))):
                left -= len(skipped)
            return self.read1(size)
        self.delivered += len(block)
        return block


class _Transcoder:
    """Convert an encoding to UTF-8; bytes that are invalid in it stay invalid, so they spoil only their own record."""

    def __init__(self, raw: io.BufferedReader, encoding: str) -> None:
        self.raw = raw
        self.errors = "surrogatepass" if encoding.startswith("utf-") else "surrogateescape"
        self.decoder = codecs.getincrementaldecoder(encoding)(self.errors)
        self.ready = b""
        self.at_end = False

    def read1(self, size: int) -> bytes:
        while not self.ready and not self.at_end:
            block = self.raw.read1(BUFFER_BYTES)
            self.at_end = not block
            self.ready = self.decoder.decode(block, final=self.at_end).encode(errors=self.errors)
        part = self.ready[:size]
        self.ready = self.ready[size:]
        return part


class _RemoteReader:
    """Read a remote file; a failed connection raises TextmillError and never becomes a quarantined record."""

    def __init__(self, stream: Any, url: str) -> None:
        self.stream = stream
        self.url = url

    def read1(self, size: int) -> bytes:
        try:
            block: bytes = self.stream.read(size)
        except Exception as error:  # each protocol raises its own exceptions
            raise TextmillError(
                f"{self.url}: cannot be read ({error or type(error).__name__}); "
                f"run the command again: finished chunks are kept"
            ) from None
        return block
