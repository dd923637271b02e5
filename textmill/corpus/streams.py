"""Open a local or remote file as a byte stream, decompress it, and convert UTF-16 to UTF-8."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import pyarrow as pa

from textmill.corpus.source import COMPRESSIONS
from textmill.errors import TextmillError

BUFFER_BYTES = 1 << 18
UTF16_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
UTF32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


class BrokenStream(Exception):
    """Raised when a stream is damaged; all data before the damage has been delivered."""


def is_remote(address: str) -> bool:
    """True for a URL, False for a path."""
    return "://" in address


def stored_name(address: str) -> str:
    """The file name in lower case; for a URL, without its query."""
    return (address.partition("?")[0] if is_remote(address) else address).lower()


def open_raw(address: str) -> BinaryIO:
    """Open the stored bytes of a local or remote file, still compressed."""
    if not is_remote(address):
        return open(address, "rb", buffering=BUFFER_BYTES)
    from textmill.corpus.remote_files import open_url  # imported only when a URL is read

    return io.BufferedReader(_BlockStream(_RemoteReader(open_url(address), address).read1), BUFFER_BYTES)


def open_seekable(address: str) -> Any:
    """Open a file for random access."""
    if not is_remote(address):
        return open(address, "rb")
    from textmill.corpus.remote_files import open_url

    return open_url(address)


def open_stream(address: str) -> io.BufferedReader:
    """Open a file for reading records: decompressed, and UTF-8 even if stored as UTF-16.

    Read with `readline` or `read1`: they return everything before a damaged part.
    """
    raw = cast(io.BufferedReader, open_raw(address))
    extension = next((end for end in COMPRESSIONS if stored_name(address).endswith(end)), None)
    if extension and raw.peek(1):
        raw = io.BufferedReader(_BlockStream(_open_decompressor(raw, extension, address), raw), BUFFER_BYTES)
    head = raw.peek(4)[:4]
    if head in UTF32_MARKS:
        raise BrokenStream("it looks like UTF-32; convert the file to UTF-8")
    if (encoding := UTF16_MARKS.get(head[:2])) is not None:
        raw.read(2)
        raw = io.BufferedReader(_BlockStream(_Utf16Transcoder(raw, encoding).read1, raw), BUFFER_BYTES)
    return raw


def is_splittable(address: str) -> bool:
    """True if reading can start in the middle: a local file, not compressed, not UTF-16."""
    if is_remote(address) or stored_name(address).endswith(COMPRESSIONS):
        return False
    with open(address, "rb") as stream:
        head = stream.read(4)
    return head not in UTF32_MARKS and head[:2] not in UTF16_MARKS


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
        self.read1, self.underlying = read1, underlying
        self.error_found: BrokenStream | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.error_found is not None:
            raise self.error_found
        filled = 0
        while filled < len(buffer):
            try:
                block = self.read1(len(buffer) - filled)
            except (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                self.error_found = BrokenStream(f"the stream is damaged: {str(error)[:1].lower()}{str(error)[1:]}")
                if not filled:
                    raise self.error_found from None
                break
            if not block:
                break
            buffer[filled : filled + len(block)] = block
            filled += len(block)
        return filled

    def close(self) -> None:
        if self.underlying is not None:
            self.underlying.close()
        super().close()


class _ZstdReader:
    """Decompress zstd with Arrow, which detects an incomplete frame.

    Arrow withholds the last data before the damage. So on an error the file is opened again and that part is read byte
    by byte.
    """

    def __init__(self, raw: BinaryIO, address: str) -> None:
        self.address, self.delivered, self.read_size = address, 0, 0
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


class _Utf16Transcoder:
    """Convert UTF-16 to UTF-8; a lone surrogate passes through, so it spoils only its own record."""

    def __init__(self, raw: io.BufferedReader, encoding: str) -> None:
        self.raw = raw
        self.decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self.ready = b""
        self.at_end = False

    def read1(self, size: int) -> bytes:
        while not self.ready and not self.at_end:
            block = self.raw.read1(BUFFER_BYTES)
            self.at_end = not block
            self.ready = self.decoder.decode(block, final=self.at_end).encode(errors="surrogatepass")
        part, self.ready = self.ready[:size], self.ready[size:]
        return part


class _RemoteReader:
    """Read a remote file; a failed connection raises TextmillError and never becomes a quarantined record."""

    def __init__(self, stream: Any, url: str) -> None:
        self.stream, self.url = stream, url

    def read1(self, size: int) -> bytes:
        try:
            block: bytes = self.stream.read(size)
        except Exception as error:  # each protocol raises its own exceptions
            raise TextmillError(
                f"{self.url}: cannot be read ({error or type(error).__name__}); "
                f"run the command again: finished chunks are kept"
            ) from None
        return block
