"""Read e-mail: a mailbox (mbox) or a single message (eml), with the standard library; one record per message.

Only the body is text, without attachments; `corpus.text_key=subject+text` adds the subject.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import READ_BYTES, Document
from textmill.corpus.document_files import decode_text
from textmill.corpus.records import BadRecord, UnreadableRecord
from textmill.corpus.source import PACKAGES_ADVICE, SourceChunk, missing_package
from textmill.corpus.streams import BrokenStream, open_source
from textmill.corpus.text_fields import TextFields, parse_text_key

_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
_HEADER = re.compile(rb"[!-9;-~]+:")
FIELDS = ("subject", "from", "to", "date")


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield messages with the fields text, subject, from, to and date."""
    fields = parse_text_key(chunk.source, config)
    number = 0
    with open_source(chunk.source) as stream:
        lines: list[bytes] = []
        size = 0
        is_after_blank = True
        while line := stream.readline(READ_BYTES):
            if is_after_blank and line.startswith(b"From "):
                if lines:
                    number += 1
                    yield from _records(lines, size, f"message {number}", fields, chunk.source.encoding)
                lines = []
                size = 0
            if not number and not lines and not line.startswith(b"From ") and not _HEADER.match(line):
                raise BrokenStream("it begins neither with 'From ' nor with a header such as 'Subject:'; not e-mail")
            size += len(line)
            if size <= records.MAX_RECORD_BYTES:
                lines.append(line)
            is_after_blank = not line.strip()
        if lines:
            yield from _records(lines, size, f"message {number + 1}", fields, chunk.source.encoding)


def _records(
    lines: list[bytes], size: int, place: str, fields: TextFields, encoding: str
) -> Iterator[Document | BadRecord]:
    is_mailbox = lines[0].startswith(b"From ")
    raw = b"".join(lines[1:] if is_mailbox else lines)
    try:
        if size > records.MAX_RECORD_BYTES:
            raise UnreadableRecord(f"the message has more than the maximum of {records.MAX_RECORD_BYTES:,} bytes")
        message = message_from_bytes(raw, policy=policy.default)
        record = {"text": _read_body(message, is_mailbox, encoding)}
        record |= {name: str(message.get(name, "")) for name in FIELDS}
    except UnreadableRecord as error:
        yield BadRecord(fields.source, place, str(error), raw, size)
    except Exception as error:  # the parser of headers raises many kinds for damaged ones
        reason = f"a damaged message ({type(error).__name__}: {error})"
        yield BadRecord(fields.source, place, reason, raw, size)
    else:
        yield from fields.documents(record, place, raw)


def _read_body(message: EmailMessage, is_mailbox: bool, encoding: str) -> str:
    part = message.get_body(preferencelist=("plain", "html"))
    if part is None:
        return ""
    content = part.get_payload(decode=True)
    if not isinstance(content, bytes) or part.defects:
        raise UnreadableRecord(f"its body is damaged ({', '.join(type(one).__name__ for one in part.defects)})")
    if is_mailbox:
        content = _QUOTED_FROM.sub(rb"\1", content)
    charset = part.get_content_charset() or encoding
    if part.get_content_subtype() == "html":
        if missing := missing_package("html"):
            raise UnreadableRecord(f"a message in HTML needs {missing}; run: {PACKAGES_ADVICE}")
        from textmill.corpus.formats.html import extract_page

        return extract_page(content, charset, is_main=False)
    return decode_text(content, charset)
