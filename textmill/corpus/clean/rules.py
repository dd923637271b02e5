"""All cleaning rules, pure functions of a text; RULES has them in the order in which they run."""

from __future__ import annotations

import html
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from typing import Any

_ENCODINGS = ("latin-1", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "iso-8859-2", "mac-roman", "cp437")


def _characters(first: int, last: int) -> str:
    """All characters that the encodings assign to these bytes, for a regular expression class."""
    characters = {
        bytes([byte]).decode(encoding, "ignore") for encoding in _ENCODINGS for byte in range(first, last + 1)
    }
    return "".join(map(re.escape, sorted(characters)))


# UTF-8 decoded with a one-byte encoding always shows the character of a lead byte before that of a continuation byte.
# ftfy searches for more, but at 1 MB/s, so it gets only lines with this pattern. The space stands for a no-break space
# that was cleaned up. The pattern starts with a single character class because alternatives there would make the search
# four times slower.
_SUSPECT = re.compile(
    f"[{_characters(0xC2, 0xF4)}\x80-\x9f](?:[{_characters(0x80, 0xBF)}]|(?<=[\x80-\x9f])|(?<=[ÂÃÄÅÎÏÐÑØÙâãïð]) )"
)
_SUSPECT_PAIRS = frozenset(
    lead + continuation
    for encoding in _ENCODINGS
    for lead in bytes(range(0xC2, 0xF5)).decode(encoding, "ignore")
    for continuation in bytes(range(0x80, 0xC0)).decode(encoding, "ignore")
)
"""Lead and continuation bytes in one encoding. In two encodings, as ğ and ü in Turkish, they are no decoded UTF-8."""
_SINGLE = re.compile("[\x80-\x9f\ud800-\udfff]")
"""Control characters and surrogates that ftfy repairs one by one."""


def repair(text: str) -> str:
    """Repair UTF-8 that was decoded as Latin-1, Windows, Mac or DOS text."""
    if text.isascii():
        return text
    suspect = _SUSPECT.search(text)
    if not suspect:
        return text
    is_bad, fix, fixer_config = _fixer()
    pieces = []  # the text up to `end` is in the pieces
    end = 0
    while suspect:
        line_start = text.rfind("\n", 0, suspect.start()) + 1
        line_end = text.find("\n", suspect.start())
        line = text[line_start : line_end if line_end >= 0 else len(text)]
        pieces.append(text[end:line_start])
        # ftfy leaves other lines as they are, after more work.
        needs_repair = (_has_suspect(line) and is_bad(line)) or _SINGLE.search(line)
        pieces.append(fix(line, fixer_config) if needs_repair else line)
        end = line_start + len(line)
        suspect = _SUSPECT.search(text, end)
    return "".join([*pieces, text[end:]])


def _has_suspect(line: str) -> bool:
    """Whether a line has a character that stands for a byte by itself or before a space, or a suspect pair."""
    suspect = _SUSPECT.search(line)
    while suspect:
        if suspect[0] in _SUSPECT_PAIRS or suspect[0][1:] in ("", " "):
            return True
        suspect = _SUSPECT.search(line, suspect.start() + 1)
    return False


@cache
def _fixer() -> tuple[Any, Any, Any]:
    """ftfy's functions to judge and to repair a text, and a configuration that repairs only the encoding."""
    from ftfy import TextFixerConfig, fix_text
    from ftfy.badness import is_bad

    off = dict.fromkeys(
        (
            "unescape_html",
            "remove_terminal_escapes",
            "fix_latin_ligatures",
            "fix_character_width",
            "uncurl_quotes",
            "fix_line_breaks",
            "remove_control_chars",
        ),
        False,
    )
    return is_bad, fix_text, TextFixerConfig(**off, normalization=None)


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


def break_at_markers(text: str) -> str:
    """Replace the marker of line ends in Yuan's corpus with a newline."""
    return text.replace("<n>", "\n")


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


# Numbers that identify people: a number is masked only if it is one, by its check digits, its date and its length.
# Presidio decides with a language model, at a few kilobytes a second; python-stdnum checks numbers but does not find
# them, and is under the LGPL.

_DIGITS = re.compile(r"\d")
_IPV4 = re.compile(r"(?<![\w.,-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|[.,]\w)", re.ASCII)
_VERSION = re.compile(
    r"(?:(?<![\w-])(?:v|ver|rev|release|section|clause)|versions?|version[esn]*|§|sürüm\w*|버전|版本)[.:]? ?\Z",
    re.IGNORECASE,
)
_IPV6 = re.compile(r"(?<![\w:.-])[23][0-9a-f]{3}(?::[0-9a-f]{0,4}){2,7}(?![\w:/]|\.\w)", re.ASCII | re.IGNORECASE)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}", re.ASCII)
_IBAN_LENGTHS = {
    entry[:2]: int(entry[2:])
    for entry in (
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 "
        "FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 "
        "LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SD18 "
        "SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
    ).split()
}
_CARD = re.compile(
    r"(?<![\w.,+/-])(?:\d{4}([ -]?)\d{4}\1\d{4}\1\d{1,7}|3[47]\d{2}([ -]?)\d{6}\2\d{5}|3[068]\d{2}([ -]?)\d{6}\3\d{4})"
    r"(?![\w/-]|[.,]\d)",
    re.ASCII,
)
_CARD_BRANDS = re.compile(  # Visa, Mastercard, American Express, Diners, Discover, JCB, UnionPay, Mir, Troy
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}|220[0-4]\d{12}"
    r"|9792\d{12}"
)
_IDENTITY = re.compile(
    r"(?<![\w.,+/-])(?:"
    r"(?P<korean>\d{6}-[1-8]\d{6})"
    r"|(?P<chinese>[1-8]\d{16}[\dXx])"
    r"|(?P<turkish>[1-9]\d{10})"
    r"|(?P<american>(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4})"
    r"|(?P<brazilian>\d{3}\.\d{3}\.\d{3}-\d{2})"
    r"|(?P<spanish>\d{8}-?[A-HJ-NP-TV-Z])"
    r")(?![\w/-]|[.,]\d)",
    re.ASCII,
)


def mask_ips(text: str) -> str:
    """Replace public IP addresses with [ip]; private and reserved ones identify nobody."""
    if text.count(".") >= 3:
        text = _IPV4.sub(_mask_ipv4, text)
    return _IPV6.sub(lambda found: "[ip]" if _is_public(found[0]) else found[0], text) if text.count(":") >= 2 else text


def _mask_ipv4(found: re.Match[str]) -> str:
    """Numbers of versions and sections have four parts too: they follow such a word, end with 0, which no address of a
    computer does, or all parts are below 10."""
    address = found[0]
    is_number = (
        address.endswith(".0")
        or max(map(int, address.split("."))) < 10
        or _VERSION.search(found.string[max(0, found.start() - 16) : found.start()])
    )
    return address if is_number or not _is_public(address) else "[ip]"


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global and not found.is_multicast


def mask_ibans(text: str) -> str:
    """Replace IBANs with [iban]."""
    return _IBAN.sub(_mask_iban, text)


def _mask_iban(found: re.Match[str]) -> str:
    length = _IBAN_LENGTHS.get(found[0][:2])
    if length is None:
        return found[0]
    places = [place for place, character in enumerate(found[0], 1) if character != " "]
    size = len(places)
    end = places[min(size, length) - 1]
    rest = found[0][end:]
    number = found[0][:end].replace(" ", "")
    following = rest or found.string[found.end() : found.end() + 1]
    if size < length or following[:1].isalnum():
        return found[0]
    digits = "".join(str(int(character, 36)) for character in number[4:] + number[:4])
    return "[iban]" + rest if int(digits) % 97 == 1 else found[0]


def mask_cards(text: str) -> str:
    """Replace the numbers of payment cards with [card]: those of a known brand whose check digit is right."""
    return _CARD.sub(lambda found: "[card]" if _is_card(re.sub("[ -]", "", found[0])) else found[0], text)


def _is_card(number: str) -> bool:
    return _CARD_BRANDS.fullmatch(number) is not None and len(set(number)) > 1 and _luhn(number)


def _luhn(number: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in number[-2::-2])
    return (sum(doubled) + sum(map(int, number[-1::-2]))) % 10 == 0


def mask_identity_numbers(text: str) -> str:
    """Replace identity numbers with [identity]: Korean, Chinese, Turkish, American, Brazilian and Spanish ones."""
    return _IDENTITY.sub(lambda found: "[identity]" if _CHECKS[found.lastgroup or ""](found[0]) else found[0], text)


def _is_korean(number: str) -> bool:
    """The last digit is a check digit in numbers of Koreans born before 2000; later ones may have a random one."""
    digits = [int(digit) for digit in number if digit != "-"]
    if not _is_date(("19", "19", "20", "20")[(digits[6] - 1) % 4] + number[:6]):
        return False
    total = sum(weight * digit for weight, digit in zip((2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5), digits, strict=False))
    return digits[6] > 2 or (11 - total % 11) % 10 == digits[12]


def _is_chinese(number: str) -> bool:
    total = sum(pow(2, 17 - place, 11) * int(digit) for place, digit in enumerate(number[:17]))
    return _is_date(number[6:14]) and "10X98765432"[total % 11] == number[17].upper()


def _is_turkish(number: str) -> bool:
    digits = [int(digit) for digit in number]
    tenth = (7 * sum(digits[0:9:2]) - sum(digits[1:8:2])) % 10
    return digits[9] == tenth and digits[10] == sum(digits[:10]) % 10


def _is_brazilian(number: str) -> bool:
    digits = [int(digit) for digit in _DIGITS.findall(number)]
    for size in (9, 10):
        total = sum((size + 1 - place) * digits[place] for place in range(size))
        if total * 10 % 11 % 10 != digits[size]:
            return False
    return len(set(digits)) > 1


def _is_spanish(number: str) -> bool:
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number[:8]) % 23] == number[-1]


def _is_date(digits: str) -> bool:
    try:
        return date(int(digits[:4]), int(digits[4:6]), int(digits[6:])) <= date(2100, 1, 1)
    except ValueError:
        return False


_CHECKS: dict[str, Callable[[str], bool]] = {
    "korean": _is_korean,
    "chinese": _is_chinese,
    "turkish": _is_turkish,
    "american": lambda number: True,  # it has no check digit
    "brazilian": _is_brazilian,
    "spanish": _is_spanish,
}


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_PLAIN = re.compile("[\t\n -~\xa0-\U0010ffff]*+")  # one long match instead of a search at each place
_HIDDEN = "\u00ad\u200b\u2060\u180e"
_ODD_SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f"
_PUNCTUATION = {
    **dict.fromkeys("“”„‟«»″〝〞", '"'),
    **dict.fromkeys("‘’‚‛‹›′", "'"),
    **dict.fromkeys("‐‑‒–—―−", "-"),
    "…": "...",
    "⋯": "...",
}
_WIDE = re.compile("[\uff01-\uff5e\u3000]")


def unify_newlines(text: str) -> str:
    """Replace CRLF, CR, NEL, LS and PS with LF."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        return text
    return text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n")


def drop_controls(text: str) -> str:
    """Remove control characters (except newline and tab) and byte order marks; NUL, often a separator, becomes a
    space."""
    if "\ufeff" not in text and _PLAIN.fullmatch(text):
        return text
    return _CONTROL.sub("", text.replace("\x00", " "))


def to_nfc(text: str) -> str:
    """Convert to Unicode NFC: a letter and its accents become one character where possible."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def to_nfkc(text: str) -> str:
    """Convert to Unicode NFKC: NFC, and ligatures, circled and full-width characters become plain ones."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def replace_invisibles(text: str) -> str:
    """Remove soft hyphens, zero-width spaces and word joiners; replace unusual spaces with a space.

    The joiners that some scripts need are kept.
    """
    if text.isascii():
        return text
    for character in _HIDDEN:
        text = text.replace(character, "")
    for character in _ODD_SPACES:
        text = text.replace(character, " ")
    return text


def plain_punctuation(text: str) -> str:
    """Replace typographic quotes, dashes and ellipses with ASCII; Chinese, Japanese and Korean punctuation stays."""
    if text.isascii():
        return text
    for character, replacement in _PUNCTUATION.items():
        text = text.replace(character, replacement)
    return text


def to_half_width(text: str) -> str:
    """Replace full-width letters, digits, symbols and the ideographic space with ASCII."""
    if text.isascii() or not _WIDE.search(text):
        return text
    return _WIDE.sub(lambda found: " " if found[0] == "\u3000" else chr(ord(found[0]) - 0xFEE0), text)


def trim_spaces(text: str) -> str:
    """Remove spaces at line ends and white space around the text; keep at most one blank line in a row."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip()


_URL_LINE = re.compile(
    r"^[^\S\n]*+<?(?:https?://|ftp://|www\.)[^\s<>]++>?[^\S\n]*+(?:\n|\Z)", re.MULTILINE | re.IGNORECASE
)
MAX_BOILERPLATE_CHARACTERS = 120
"""A longer line is never boilerplate."""
_PHRASES = r"""
  (?:skip|jump)\ to\ (?:the\ )?(?:main\ )?(?:content|navigation) | all\ rights\ reserved
| (?:copyright\ )?(?:©|\(c\))\ ?(?:copyright\ )?\d{4}
| (?:we|this\ (?:web)?site)\ uses?\ cookies | accept\ (?:all\ )?cookies | (?:privacy|cookie)\ policy
| terms\ (?:of\ (?:use|service)|and\ conditions)
| (?:read|see|load|show)\ more$ | click\ here | share\ (?:this|on|via) | follow\ us | tweet$ | pin\ it$
| (?:sign|log)\ ?(?:in|up)$
| subscribe(?:\ now|\ to\ our\ newsletter|$) | (?:leave|post|add)\ a\ (?:comment|reply)
| related\ (?:articles|posts|stories)
| back\ to\ top | advertisement$ | print\ this\ page | (?:please\ )?enable\ javascript
| javascript\ (?:is|must\ be)\ (?:disabled|enabled|required)
| (?:next|previous)\ (?:page|post|article)$
| 무단\ ?(?:전재|복제|배포) | 저작권자 | (?:이용|서비스)\ ?약관$ | 개인\ ?정보\ ?(?:처리|취급)\ ?방침$ 
| 본문\ ?(?:바로\ ?가기|으로)
| (?:더\ ?보기|공유하기|로그인|회원\ ?가입|구독하기|댓글\ ?쓰기|맨\ ?위로|목록으로|관련\ ?기사)$
| tüm\ hakları\ saklıdır | (?:ana\ )?içeriğe\ (?:geç|atla) | (?:gizlilik|çerez)\ politikası$
| kullanım\ (?:koşulları|şartları)$
| (?:devamını\ oku|daha\ fazla|giriş\ yap|üye\ ol|abone\ ol|paylaş|yorum\ yap|başa\ dön|yazdır)$
| 版[权權]所有 | 未经.{0,8}(?:许可|授权) | 相关(?:文章|阅读|新闻)$
| (?:[隐隱]私政策|用户协议|免责声明|联系我们|关于我们|返回顶部|阅读更多|查看更多|点击这里|分享到|登录|注册)$
"""
_PHRASE = re.compile(rf"[^\w©(]*+(?:{_PHRASES})", re.IGNORECASE | re.VERBOSE)
_NAVIGATION = re.compile(r"[^|»›·•>\n]{1,24}(?:[ \t]*[|»›·•>][ \t]*[^|»›·•>\n]{1,24}){2,}\s*")
_SEPARATOR = re.compile(r"[|»›·•>]")
_ENDS = (".", "!", "?", "。", "！", "？", "…")


def drop_url_lines(text: str) -> str:
    """Remove lines that hold only a web address."""
    if "://" not in text and "www." not in text and "WWW." not in text:
        return text
    return _URL_LINE.sub("", text)


def drop_boilerplate(text: str) -> str:
    """Remove boilerplate lines of at most 120 characters: known phrases that are not long sentences, and navigation.

    Navigation: three or more parts of at most 24 characters, separated by | » › · • or >, without a full stop at the
    end. A table row, which starts with |, is kept.
    """
    lines = text.split("\n")
    may_navigate = _SEPARATOR.search(text) is not None
    kept = [line for line in lines if len(line) > MAX_BOILERPLATE_CHARACTERS or not is_boilerplate(line, may_navigate)]
    return text if len(kept) == len(lines) else "\n".join(kept)


def is_boilerplate(line: str, may_navigate: bool = True) -> bool:
    """True if a line is boilerplate around an article; `may_navigate`: the text has a separator of navigation."""
    line = line.strip()
    phrase = _PHRASE.match(line)
    is_long_sentence = len(line) > 60 and line.endswith(_ENDS)
    if phrase and len(line) - phrase.end() <= 60 and not is_long_sentence:
        return True
    return (
        may_navigate
        and not line.endswith(_ENDS)
        and not line.startswith("|")
        and _SEPARATOR.search(line) is not None
        and _NAVIGATION.fullmatch(line) is not None
    )


Rule = Callable[[str], str]
RULES: dict[str, Rule] = {
    "repair": repair,
    "markers": break_at_markers,
    "html": strip_html,
    "newlines": unify_newlines,
    "controls": drop_controls,
    "unicode": to_nfc,
    "compatibility": to_nfkc,
    "invisibles": replace_invisibles,
    "punctuation": plain_punctuation,
    "width": to_half_width,
    "dsgpt2": only_korean,
    "emails": mask_emails,
    "ips": mask_ips,
    "ibans": mask_ibans,
    "cards": mask_cards,
    "identity": mask_identity_numbers,
    "phones": mask_phones,
    "url_lines": drop_url_lines,
    "boilerplate": drop_boilerplate,
    "spaces": trim_spaces,
}
"""The order avoids extra rounds. Encoding is repaired first. Markers are read before they could be taken for tags.
Entities are decoded before control characters are removed. Newlines are unified before control characters are
removed. NFC runs after control characters are gone, since one may separate a letter from its accent. Longer numbers
are masked before telephone numbers, which could be a part of them. Line rules run on nearly finished lines."""
SINGLE_PASS_RULES = frozenset({"newlines", "controls", "unicode", "spaces"})
"""These rules alone never need a second round."""
MAX_ROUNDS = 10
"""More rounds than any text has needed."""


def apply_rules(text: str, functions: Mapping[str, Rule], changed_by: set[str]) -> str:
    """Apply rules in this order until nothing changes, and add the names of those that change the text to
    `changed_by`."""
    for _ in range(1 if SINGLE_PASS_RULES.issuperset(functions) else MAX_ROUNDS):
        start = text
        for name, function in functions.items():
            after = function(text)
            if after is not text and after != text:
                changed_by.add(name)
                text = after
        if text is start or text == start:
            break
    return text
