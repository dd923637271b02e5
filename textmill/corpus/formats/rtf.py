"""Read RTF with striprtf, a small package that knows its encodings, tables and invisible parts."""

from __future__ import annotations

from textmill.corpus.records import UnreadableRecord


def extract(raw: bytes, encoding: str) -> str:
    """The text of a document."""
    from striprtf.striprtf import rtf_to_text

    if not raw.lstrip().startswith(b"{\\rtf"):
        raise UnreadableRecord("it does not begin with {\\rtf: not an RTF document")
    try:
        text: str = rtf_to_text(raw.decode("latin-1"), errors="strict")  # type: ignore[no-untyped-call]
    except (ValueError, LookupError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UnreadableRecord(f"damaged RTF ({error})") from None
    return text
