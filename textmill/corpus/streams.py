"""A source's bytes: opened wherever it stands, decompressed, UTF-16 made UTF-8; where they break off is said."""

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
    """Why a stream cannot be read further; everything before was delivered."""


def is_remote(address: str) -> bool:
    """Whether an address is a URL and not a path."""
    return "://" in address


def stored_name(address: str) -> str:
    """The name under which a file is stored: a URL without its query."""
    return (address.partition("?")[0] if is_remote(address) else address).lower()


def open_raw(address: str) -> BinaryIO:
    """The bytes as they are stored, on this machine or behind a URL."""
    if not is_remote(address):
        return open(address, "rb", buffering=BUFFER_BYTES)
    from textmill.corpus.remote_files import open_url  # only a URL costs these imports

    return io.BufferedReader(_BlockStream(_RemoteReader(open_url(address), address).read1), BUFFER_BYTES)


def open_seekable(address: str) -> Any:
    """A file for readers that jump about in it."""
    if not is_remote(address):
        return open(address, "rb")
    from textmill.corpus.remote_files import open_url

    return open_url(address)


def open_stream(address: str) -> io.BufferedReader:
    """The bytes to read records from; take them with `readline` or `read1`, which lose nothing when the stream breaks."""
    raw = cast(io.BufferedReader, open_raw(address))
    kind = next((end for end in COMPRESSIONS if stored_name(address).endswith(end)), None)
    if kind and raw.peek(1):
        raw = io.BufferedReader(_BlockStream(_open_decompressor(raw, kind, address), raw), BUFFER_BYTES)
    head = raw.peek(4)[:4]
    if head in UTF32_MARKS:
        raise BrokenStream("it looks like UTF-32; convert the file to UTF-8")
    if (encoding := UTF16_MARKS.get(head[:2])) is not None:
        raw.read(2)
        raw = io.BufferedReader(_BlockStream(_Utf16Transcoder(raw, encoding).read1, raw), BUFFER_BYTES)
    return raw


def is_splittable(address: str) -> bool:
    """Whether a file can be read from its middle: on this machine, not compressed, not UTF-16."""
    if is_remote(address) or stored_name(address).endswith(COMPRESSIONS):
        return False
    with open(address, "rb") as stream:
        head = stream.read(4)
    return head not in UTF32_MARKS and head[:2] not in UTF16_MARKS


def _open_decompressor(raw: BinaryIO, kind: str, address: str) -> Callable[[int], bytes]:
    if kind == ".gz":
        return gzip.GzipFile(fileobj=raw).read1
    if kind == ".bz2":
        return bz2.BZ2File(raw).read1
    if kind == ".xz":
        return lzma.LZMAFile(raw).read1
    return _ZstdReader(raw, address).read1


class _BlockStream(io.RawIOBase):
    """Blocks as a raw stream; what the data itself has wrong becomes Broken, what the disk has wrong stays an OSError."""

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
                self.error_found = BrokenStream(f"the stream breaks off: {str(error)[:1].lower()}{str(error)[1:]}")
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
    """Arrow's reader tells half a frame from a whole one, but keeps back what came just before the break: that is fetched again."""

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
    """UTF-16 as UTF-8; half a surrogate pair passes, and spoils only the record it stands in."""

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
    """A remote file; a connection that fails is no damage of the data, and never becomes a quarantined record."""

    def __init__(self, stream: Any, url: str) -> None:
        self.stream, self.url = stream, url

    def read1(self, size: int) -> bytes:
        try:
            block: bytes = self.stream.read(size)
        except Exception as error:  # each protocol raises its own kinds
            raise TextmillError(
                f"{self.url}: cannot be read ({error or type(error).__name__}); run it again: what is finished is kept"
            ) from None
        return block
