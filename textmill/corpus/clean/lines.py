"""Rules that remove lines: web addresses and boilerplate."""

from __future__ import annotations

import re
from functools import cache

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
_PHRASE_OR_SPACES = re.compile(rf"[^\w©(]*+(?:{_PHRASES})".replace("$", r"\s*+$"), re.IGNORECASE | re.VERBOSE)
"""Also matches before the white space of a line is removed."""
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
    harmless_letters = _other_first_letters()
    may_navigate = _SEPARATOR.search(text) is not None
    match_phrase = _PHRASE_OR_SPACES.match
    find_separator = _SEPARATOR.search
    kept = []
    for line in lines:
        if line and len(line) <= MAX_BOILERPLATE_CHARACTERS:
            # Two cheap tests rule out nearly all lines before the exact one.
            may_have_phrase = line[0] not in harmless_letters and match_phrase(line)
            may_be_boilerplate = may_have_phrase or (may_navigate and find_separator(line))
            if may_be_boilerplate and is_boilerplate(line, may_navigate):
                continue
        kept.append(line)
    return text if len(kept) == len(lines) else "\n".join(kept)


@cache
def _other_first_letters() -> frozenset[str]:
    """Letters of the Basic Multilingual Plane that are nowhere in the known phrases, so that none begins with them."""
    letters = "".join(filter(str.isalpha, map(chr, range(0x10000))))
    used = "".join(set(filter(str.isalpha, _PHRASES)))
    return frozenset(letters) - set(re.findall(f"[{used}]", letters, re.IGNORECASE))


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
