"""Read HTML pages: the main text, without navigation, headers and footers.

Resiliparse needs one other package where trafilatura needs six. The rule `html` of `corpus.rules` only removes tags.
"""

from __future__ import annotations

import codecs
import re
from functools import partial

from textmill.corpus.document_files import decode_text
from textmill.corpus.records import UnreadableRecord

MIN_MAIN_SHARE = 0.25
"""If the main text is a smaller part of all text, it was not recognised, and all is taken."""
MAX_MAIN_SHARE = 0.9
"""A page with nothing that is called a menu or a footer is taken as a whole if this much of it is main text: what looks
like a menu may be a list of the article."""
_BOILERPLATE = re.compile(r"<(?:nav|footer|aside)\b|role=[\"']?(?:navigation|contentinfo)", re.I)
DECLARATION_BYTES = 1 << 12
"""Where the encoding of a page is declared; the standard says in the first 1024 bytes."""
_DECLARED = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]+)|<\?xml[^>]{0,100}encoding=[\"']([\w.:-]+)", re.I
)


def extract(raw: bytes, encoding: str) -> str:
    """The main text of a page."""
    return extract_page(raw, encoding, is_main=True)


def extract_page(raw: bytes, encoding: str, is_main: bool) -> str:
    """The text of a page, only its main part if `is_main`; `encoding` is for a page that declares none."""
    from resiliparse.extract.html2text import extract_plain_text

    declared = _DECLARED.search(raw[:DECLARATION_BYTES])
    if declared and (name := _find_codec((declared[1] or declared[2]).decode())) is not None:
        encoding = name
    page = decode_text(raw, encoding)
    extract_text = partial(extract_plain_text, page, preserve_formatting=True, alt_texts=False, comments=False)
    try:
        text = extract_text(main_content=False).strip()
        main = extract_text(main_content=True).strip() if is_main else text
    except (ValueError, RuntimeError) as error:
        raise UnreadableRecord(f"the page cannot be parsed ({error})") from None
    max_share = 1 if _BOILERPLATE.search(page) else MAX_MAIN_SHARE
    return main if MIN_MAIN_SHARE <= len(main) / max(1, len(text)) <= max_share else text


def _find_codec(name: str) -> str | None:
    """Python's name of a declared encoding; pages that declare Latin-1 are in cp1252, as the standard says."""
    try:
        found = codecs.lookup(name).name
    except LookupError:
        return None
    return {"iso8859-1": "cp1252", "ascii": "cp1252", "euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030"}.get(
        found, "auto" if found.startswith("utf-") else found
    )
