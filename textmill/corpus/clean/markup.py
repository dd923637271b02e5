"""Rules for markup and private data: line markers, HTML, e-mail addresses, phone numbers, non-Korean text."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

MAX_NESTING = 8
"""How deep tags and entities may be nested; beyond it, all `<` and `&` are removed."""

_BLOCKS = (
    "address|article|aside|blockquote|body|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer|"
    "form|h[1-6]|head|header|hr|html|iframe|legend|li|main|nav|ol|option|p|pre|section|select|table|tbody|"
    "td|tfoot|th|thead|title|tr|ul"
)
_INLINE = (
    "a|abbr|acronym|b|bdi|bdo|big|button|cite|code|col|colgroup|data|del|dfn|em|embed|font|i|img|input|ins|kbd|label|"
    "link|map|mark|meta|noscript|object|param|path|picture|q|rp|rt|ruby|s|samp|script|small|source|span|strike|strong|style|"
    "sub|summary|sup|svg|textarea|time|tt|u|var|video|audio|wbr"
)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_OPENING = re.compile(r"<!--|<(script|style)(?=[\s>])[^<>]*+>", re.IGNORECASE)
_CLOSINGS = {
    name: re.compile(end, re.IGNORECASE)
    for name, end in (("", "-->"), ("script", r"</script\s*+>"), ("style", r"</style\s*+>"))
}
_BLOCK = re.compile(rf"</?(?:{_BLOCKS})(?:\s[^<>]*+)?/?>|<!doctype[^<>]*+>", re.IGNORECASE)
_TAG = re.compile(rf"</?(?:{_INLINE})(?:\s[^<>]*+)?/?>", re.IGNORECASE)

_EMAIL = re.compile(
    r"(?<![\w.+-])\w[\w.+-]{0,63}@[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){1,5}(?![\w@-])", re.ASCII | re.IGNORECASE
)
_PHONE = re.compile(
    r"(?<![A-Za-z0-9_.,/+-])(?:"
    r"\+\d{1,3}(?:[ .-]?\(?\d{1,4}\)?){2,5}"  # +82 10-1234-5678, +90 (532) 123 45 67
    r"|\(0?\d{2,4}\)[ .-]?\d{3,4}[ .-]\d{4}"  # (212) 555-0123
    r"|0\d{1,3}[ .-]\d{3,4}[ .-](?:\d{4}|\d{2}[ .-]\d{2})"  # 010-1234-5678, 0532 123 45 67
    r"|1[3-9]\d[ -]?\d{4}[ -]?\d{4}"  # 138 0013 8000
    r")(?![A-Za-z0-9_/+-]|[.,]\d)"
)

_WEB_ADDRESS = re.compile(r"https?://\S*")
_NOT_KOREAN = re.compile(
    "[^\\x00-\\x7f가-힣ㄱ-ㅎ"
    "\u00b7\u2010-\u2027\u2030-\u205e\u2190-\u21ff\u2600-\u27bf\u3001-\u303f"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
    "\ufe0f\u200d\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff]+"
)


def break_at_markers(text: str, markers: Sequence[str] = ("<n>",)) -> str:
    """Replace markers that mean a line end with a newline."""
    for marker in markers:
        text = text.replace(marker, "\n")
    return text


def strip_html(text: str) -> str:
    """Decode entities and remove scripts, comments and HTML tags; block tags become a newline."""
    for _ in range(MAX_NESTING):
        before = text
        if "<" in text:
            text = _TAG.sub("", _BLOCK.sub("\n", _remove_hidden(text)))
        if "&" in text:
            text = _ENTITY.sub(lambda found: html.unescape(found[0]), text)
        if text == before:
            return text
    return text.replace("<", "").replace("&", "")


def _remove_hidden(text: str) -> str:
    """Replace each comment, script and style with a newline; an unclosed one is left to the tag rule."""
    parts: list[str] = []
    unclosed: set[str] = set()
    done = copied = 0
    while opening := _OPENING.search(text, done):
        name = (opening[1] or "").lower()
        done = opening.end()
        if name in unclosed:
            continue
        if closing := _CLOSINGS[name].search(text, done):
            parts += [text[copied : opening.start()], "\n"]
            done = copied = closing.end()
        else:
            unclosed.add(name)  # searching again each time would take quadratic time
    return "".join([*parts, text[copied:]]) if parts else text


def mask_emails(text: str) -> str:
    """Replace e-mail addresses with [email]."""
    return _EMAIL.sub("[email]", text) if "@" in text else text


def mask_phones(text: str) -> str:
    """Replace telephone numbers with [phone]."""
    return _PHONE.sub("[phone]", text)


def only_korean(text: str) -> str:
    """The filter_text of dsGPT2: keep ASCII, Hangul syllables and consonants, some punctuation and emoji.

    Web addresses and '#' are removed too.
    """
    text = _WEB_ADDRESS.sub("", _NOT_KOREAN.sub("", text))
    return text.replace("#", "").strip()
