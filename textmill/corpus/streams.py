"""Open a local or remote file as a byte stream, decompress it, and convert it to UTF-8."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile

import pyarrow as pa

from textmill.corpus.archives import open_member, read_small_member
from textmill.corpus.encodings import SAMPLE_BYTES, find_binary_format, mark_length, resolve_encoding
from textmill.corpus.source import COMPRESSIONS, Damage, Source, is_member
from textmill.errors import TextmillError
from textmill.storage.remote_folders import ADVICE, first_line, is_url, open_filesystem, version_of

BUFFER_BYTES = 1 << 18
SMALL_BYTES = 1 << 16
REMOTE_SAMPLE_BYTES = 1 << 12
"""First bytes of a remote file that show its encoding."""
READ_AHEAD_BYTES = 4 << 20
"""What is read at once of a remote file, after so many bytes of its beginning were wanted."""
DAMAGE_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, BadZipFile, UnicodeDecodeError)
"""What damaged data raises; an OSError with a number is one of the disk."""


class BrokenStream(Exception):
    """Raised when a stream is damaged; all data before the damage has been delivered.

    If only what follows the data is damaged, it is raised when the stream is closed. `damage`: set if delivered data
    may be wrong too: a flipped bit garbles what follows it, and a checksum shows that at the end of what it covers.
    """

    damage: Damage | None = None


def stored_name(address: str) -> str:
    """The file name in lower case; for a URL, without its query, and for a file in an archive, without the archive."""
    return (address.partition("::")[0].partition("?")[0] if is_url(address) else address).lower()


def open_raw(address: str) -> BinaryIO:
    """Open the stored bytes of a local or remote file, still compressed."""
    if not is_url(address):
        return open(address, "rb", buffering=BUFFER_BYTES)
    if is_member(address):
        member = open_member(address)
        return _buffered(member.read, member)
    return _buffered(_RemoteReader(address).read1)


def open_seekable(address: str) -> Any:
    """Open a file for random access."""
    if not is_url(address):
        return open(address, "rb")
    if is_member(address):
        return open_member(address)
    return open_url(address)


def open_url(url: str, block_size: int | None = None) -> Any:
    """Open a binary file; whether it can seek depends on the protocol.

    File systems read megabytes ahead. Here only what is wanted is read; with a `block_size` so much at once, and with 0
    everything, as web servers give it that do not answer requests for a part.
    """
    files, path = open_filesystem(url)
    options = {"cache_type": "none"} if block_size is None else {"block_size": block_size}
    try:
        return files.open(path, "rb", **options)
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


def open_source(source: Source) -> io.BufferedReader:
    """Open a source for reading, decompressed but in the encoding that it is stored in: the part that is read, or what
    is before its damage."""
    part = source.part
    reopen = partial(open_raw, source.address) if part is None else partial(_open_part, source.address, *part)
    stream = decompress(reopen(), source.address, reopen)
    if source.damage is None:
        return stream
    intact = _FirstBytes(stream, source.damage.intact_bytes, BrokenStream(source.damage.reason))
    return _buffered(intact.read1, stream)


def _open_small_file(source: Source) -> io.BufferedReader | None:
    """A small file that is not compressed, read at once: a stream takes several times as long. None for another file,
    and for a damaged one, of which a stream gives what is before the damage."""
    address = source.address
    if source.damage or source.part or stored_name(address).endswith(COMPRESSIONS):
        return None
    content: bytes | None = None
    if not is_url(address):
        handle = os.open(address, os.O_RDONLY)
        try:
            content = os.read(handle, SMALL_BYTES)
            if len(content) == SMALL_BYTES or os.read(handle, 1):
                return None
        finally:
            os.close(handle)
    elif is_member(address):
        content = read_small_member(address, source.position, SMALL_BYTES)
    return None if content is None else io.BufferedReader(io.BytesIO(content), len(content) + 1)


def _open_part(address: str, start: int, stop: int) -> BinaryIO:
    """The first bytes of a file, or the complete lines between two places of it."""
    if not start:
        raw = open_raw(address)
        # Of compressed data the end is missing, of other data a part of the last line.
        is_compressed = stored_name(address).endswith(COMPRESSIONS)
        first = _FirstBytes(raw, stop, None if is_compressed else EOFError("the part ends here"))
        return _buffered(first.read1, raw)
    try:
        with open_seekable(address) as stream:
            stream.seek(start)
            block: bytes = stream.read(stop - start)
    except (OSError, ValueError, NotImplementedError) as error:
        raise TextmillError(f"{address}: no part of it can be read ({error}); copy it to this machine") from None
    return io.BufferedReader(io.BytesIO(block[block.find(b"\n") + 1 : block.rfind(b"\n") + 1]))


def decompress(raw: BinaryIO, address: str, reopen: Callable[[], BinaryIO] | None = None) -> io.BufferedReader:
    """The decompressed content of the open file `raw`: itself, if its name says that it is not compressed."""
    stored = cast(io.BufferedReader, raw)
    extension = next((end for end in COMPRESSIONS if stored_name(address).endswith(end)), None)
    if extension and stored.peek(1):
        reader = (
            _ZstdReader(raw, reopen or partial(open_raw, address))
            if extension == ".zst"
            else _MemberReader(raw, extension)
        )
        return _buffered(reader.read1, raw, reader)
    return stored


def open_stream(source: Source, *, by_line: bool = False) -> io.BufferedReader:
    """Open a file for reading records: decompressed, and UTF-8 even if stored in another encoding.

    Read with `readline` or `read1`: they return everything before a damaged part. `by_line`: lines that end with CR
    alone end with LF.
    """
    raw = _open_small_file(source) or open_source(source)
    head = raw.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]
    if (kind := find_binary_format(head)) is not None:
        raw.close()
        raise BrokenStream(f"the file is {kind}: not text, whatever its name says; convert or remove it")
    encoding = resolve_encoding(source.encoding, head)
    if encoding != "utf-8":
        raw.read(mark_length(head))
        raw = _buffered(_Transcoder(raw, encoding).read1, raw)
    if by_line and b"\r" in (head := raw.peek(SAMPLE_BYTES)) and b"\n" not in head:
        stream = raw
        raw = _buffered(lambda size: stream.read1(size).replace(b"\r", b"\n"), stream)
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
    return not is_url(source.address) and is_plain_utf8(source)


def is_plain_utf8(source: Source) -> bool:
    """True if the stored bytes of a file are text in UTF-8."""
    if stored_name(source.address).endswith(COMPRESSIONS):
        return False
    with open_seekable(source.address) as stream:
        head = stream.read(SAMPLE_BYTES if not is_url(source.address) else REMOTE_SAMPLE_BYTES)
    return find_binary_format(head) is None and resolve_encoding(source.encoding, head) == "utf-8"


def _buffered(
    read1: Callable[[int], bytes], underlying: BinaryIO | None = None, reader: _MemberReader | _ZstdReader | None = None
) -> io.BufferedReader:
    return io.BufferedReader(_BlockStream(read1, underlying, reader), BUFFER_BYTES)


class _BlockStream(io.RawIOBase):
    """A raw stream over a block reader.

    Damaged data raises BrokenStream. An error of the disk stays an OSError.
    """

    def __init__(
        self, read1: Callable[[int], bytes], underlying: BinaryIO | None, reader: _MemberReader | _ZstdReader | None
    ) -> None:
        self.read1 = read1
        self.underlying = underlying
        self.reader = reader
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
            except _BytesAfterEnd as error:
                # The data is complete, so it ends here, and its last line counts.
                self.error_after_end = BrokenStream(f"{error} follow the data; they are ignored")
                self.read1 = lambda size: b""
                break
            except BrokenStream as error:  # of the stream that this one reads
                self.error_found = error
            except DAMAGE_ERRORS as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                self.error_found = self._broken(error, self.delivered + filled)
            if self.error_found is not None:
                if not filled:
                    raise self.error_found from None
                break
            if not block:
                break
            buffer[filled : filled + len(block)] = block
            filled += len(block)
        self.delivered += filled
        return filled

    def _broken(self, error: Exception, delivered: int) -> BrokenStream:
        """The damage that an error shows. What is before the end of a truncated file is right, and the place of a
        character that cannot be decoded is known."""
        reason = f"the stream is damaged: {str(error)[:1].lower()}{str(error)[1:]}"
        found = BrokenStream(reason)
        is_truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        if not is_truncated and not isinstance(error, UnicodeDecodeError):
            intact = self.reader.intact_bytes if self.reader else 0
            if intact < delivered:
                reason += f"; the {delivered - intact:,} bytes before that are not kept: nothing shows which are right"
                found.damage = Damage(intact, delivered - intact, reason)
        return found

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


class _FirstBytes:
    """The first bytes of a stream, then an error; without one the stream ends, as that of a truncated file."""

    def __init__(self, stream: BinaryIO, size: int, error: Exception | None) -> None:
        self.stream = stream
        self.left = size
        self.error = error

    def read1(self, size: int) -> bytes:
        if not self.left and self.error:
            raise self.error
        block = self.stream.read(min(size, self.left))
        self.left -= len(block)
        return block


class _BytesAfterEnd(Exception):
    """Raised when what follows complete data is not compressed."""


class _GzipMember:
    """A member of a gzip file, with the interface of BZ2Decompressor."""

    def __init__(self) -> None:
        self.member = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self.member.eof

    @property
    def unused_data(self) -> bytes:
        return self.member.unused_data

    @property
    def needs_input(self) -> bool:
        return not self.member.unconsumed_tail

    def decompress(self, data: bytes, size: int) -> bytes:
        return self.member.decompress(data or self.member.unconsumed_tail, size)


class _MemberReader:
    """Decompress the members of a .gz, .bz2 or .xz file, and remember how much of their content is confirmed.

    A checksum is at the end of a member, in .bz2 also at the end of each block.
    """

    BEGINNINGS = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0"}
    MEMBERS: dict[str, Callable[[], Any]] = {
        ".gz": _GzipMember,
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }
    BZ2_BLOCK_BYTES = 51 * 900_000
    """The longest content of a block: five bytes of it may stand for 255."""

    def __init__(self, raw: BinaryIO, extension: str) -> None:
        self.raw = raw
        self.extension = extension
        self.member: Any = None
        self.rest = b""
        self.delivered = 0
        self.member_start = 0

    @property
    def intact_bytes(self) -> int:
        """Decompressed bytes that a checksum confirms."""
        earlier_blocks = self.delivered - self.BZ2_BLOCK_BYTES if self.extension == ".bz2" else 0
        return max(self.member_start, earlier_blocks)

    def read1(self, size: int) -> bytes:
        while self.member is not None or self._open_member():
            data = b""
            is_at_end = False
            if self.member.needs_input:
                data = self.rest or self.raw.read(BUFFER_BYTES)
                self.rest = b""
                is_at_end = not data
            block: bytes = self.member.decompress(data, size)
            self.delivered += len(block)
            if self.member.eof:
                self.rest = self.member.unused_data
                self.member = None
                self.member_start = self.delivered
            elif is_at_end and not block:
                raise EOFError("the file ended before the end of the data")
            if block:
                return block
        return b""

    def _open_member(self) -> bool:
        """Begin the next member; false at the end of the file."""
        beginning = self.BEGINNINGS[self.extension]
        is_first = self.member_start == 0 and not self.rest and self.raw.tell() == 0
        while len(self.rest) < len(beginning) and (more := self.raw.read(BUFFER_BYTES)):
            self.rest = (self.rest + more).lstrip(b"\0")  # padding is allowed
        if not self.rest:
            return False
        if not self.rest.startswith(beginning):
            kind = self.extension[1:]
            raise OSError(f"not a file of {kind}") if is_first else _BytesAfterEnd(f"bytes that are not {kind}")
        self.member = self.MEMBERS[self.extension]()
        return True


class _ZstdReader:
    """Decompress zstd with Arrow, which detects an incomplete frame; where a frame begins is not known.

    Arrow withholds the last data before the damage. So on an error the file is opened again and that part is read byte
    by byte.
    """

    intact_bytes = 0

    def __init__(self, raw: BinaryIO, reopen: Callable[[], BinaryIO]) -> None:
        self.reopen = reopen
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
            self.read_size, self.stream = 1, self._open(self.reopen())
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

    def __init__(self, url: str) -> None:
        self.url = url
        self.stream = open_url(url)
        self.delivered = 0
        self.reads_ahead = False

    def read1(self, size: int) -> bytes:
        try:
            if self.delivered >= READ_AHEAD_BYTES and not self.reads_ahead:
                self._read_ahead()
            block: bytes = self._read(size)
            self.delivered += len(block)
        except Exception as error:  # each protocol raises its own exceptions
            raise TextmillError(
                f"{self.url}: cannot be read ({error or type(error).__name__}); "
                f"run the command again: finished chunks are kept"
            ) from None
        return block

    def _read(self, size: int) -> Any:
        try:
            return self.stream.read(size)
        except ValueError:  # a web server that gives the file from its beginning only
            if self.reads_ahead:
                raise
        self.reads_ahead = True
        self.stream = open_url(self.url, block_size=0)
        left = self.delivered
        while left and (skipped := self.stream.read(min(left, BUFFER_BYTES))):
            left -= len(skipped)
        return self.stream.read(size)

    def _read_ahead(self) -> None:
        self.reads_ahead = True
        if self.stream.seekable():
            ahead = open_url(self.url, READ_AHEAD_BYTES)
            ahead.seek(self.delivered)
            self.stream.close()
            self.stream = ahead
