"""Cleaning rules: expected results in several scripts, and a second cleaning changes nothing."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.config import CorpusConfig
from textmill.corpus.clean.cleaner import Cleaner
from textmill.corpus.clean.rules import RULES, apply_rules

ALL = ["unicode", "newlines", "controls", "spaces"]
SIGNS = "\r\n\t \x00\x01\x85\u2028\ufeff\u0301eㅎㅏ\u1112\u1161\u3000<>&;#/n+@.|\u00ad\u200bÃ©â€™“—…１Ａ"
NUMBERS = "2020-01-02, 3.1415926, 192.168.100.100, 1,000,000,000, 1914-1918"
NASTY = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SIGNS)))


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("unicode", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "한국어"),
        ("unicode", "I\u0307stanbul, g\u0306", "İstanbul, ğ"),
        ("unicode", "cafe\u0301 vie\u0323\u0302t", "café việt"),
        ("unicode", "\uf900 漢字", "豈 漢字"),
        ("unicode", "ﬁ ①", "ﬁ ①"),
        ("newlines", "a\r\nb\rc\u0085d\u2028e\u2029f\n", "a\nb\nc\nd\ne\nf\n"),
        ("newlines", "\r\r\n\n", "\n\n\n"),
        ("controls", "\ufeff값\x07\x1b[0m\tş\x7f\x9c\n", "값[0m\tş\n"),
        ("controls", "sol\x00sağ", "sol sağ"),
        ("spaces", "  bir  iki \t\n\n \n\n　三　\n\n", "bir  iki\n\n　三"),
        ("spaces", " \n\t ", ""),
        ("repair", "Ä°stanbul'da gÃ¼neÅŸ doÄŸdu", "İstanbul'da güneş doğdu"),
        ("repair", "한국어는 그대로\nthe cafÃ© isnâ€™t far", "한국어는 그대로\nthe café isn’t far"),
        ("repair", "ä½\xa0å¥½ï¼Œä¸–ç•Œ", "你好，世界"),
        ("repair", "Çünkü öğle üstü, “evet” — naïve Ångström Ã", "Çünkü öğle üstü, “evet” — naïve Ångström Ã"),
        ("markers", "第一行<n>第二行<n><n>四", "第一行\n第二行\n\n四"),
        ("html", "<p>한국어 &amp; <b>굵게</b></p><br/>끝", "\n한국어 & 굵게\n\n끝"),
        (
            "html",
            "a < b > c, vector<int>, <n>, AT&T; &unknown; 1 &lt; 2",
            "a < b > c, vector<int>, <n>, AT&T; &unknown; 1 < 2",
        ),
        (
            "html",
            "önce<script>if (a<b) {}</script><!-- not <b>shown</b> -->sonra<style>p{}</style >",
            "önce\n\nsonra\n",
        ),
        ("html", "&amp;amp;lt;b&amp;gt;中文<<i>i>", "中文"),
        ("html", "<script>never closed", "never closed"),
        ("compatibility", "ﬁ ① ＡＢ　ﾊﾝ ㎏", "fi 1 AB ハン kg"),
        ("invisibles", "so\u00adft 中\u200b文 10\u00a0km\u2009a می\u200cخواهم", "soft 中文 10 km a می\u200cخواهم"),
        (
            "punctuation",
            "“Evet” ‘no’ «да» 1990–2000 — vay… 「그래」。",
            '"Evet" \'no\' "да" 1990-2000 - vay... 「그래」。',
        ),
        ("width", "ＡＢＣ１２３！，　한글。", "ABC123!, 한글。"),
        ("dsgpt2", " #한국어 ㅋㅋㅏ 中文 ABC! https://a.b/c?d 끝😀… ", "한국어 ㅋㅋ  ABC!  끝😀…"),
        ("emails", "write to a.b+c@mail.example.co.kr, or @home; x@y", "write to [email], or @home; x@y"),
        ("emails", "e-posta: ali@ornek.com.tr. 邮箱:li@example.cn。", "e-posta: [email]. 邮箱:[email]。"),
        ("phones", "010-1234-5678로 전화, +82 10-1234-5678", "[phone]로 전화, [phone]"),
        ("phones", "Tel: 0532 123 45 67, (212) 555-0123, 138 0013 8000", "Tel: [phone], [phone], [phone]"),
        # Examples that standards, banks and offices publish; each is wrong when one digit changes.
        (
            "ibans",
            "GB82 WEST 1234 5698 7654 32, DE89370400440532013000; TR33 0006 1005 1978 6457 8413 26 ALI, "
            "FR14 2004 1010 0505 0001 3M02 606. GB82 WEST 1234 5698 7654 33 XX12 1234 5678 9012 A4",
            "[iban], [iban]; [iban] ALI, [iban]. GB82 WEST 1234 5698 7654 33 XX12 1234 5678 9012 A4",
        ),
        (
            "cards",
            "4242 4242 4242 4242, 5555-5555-5555-4444, 378282246310005, 6011111111111117; 4242 4242 4242 4241 "
            "1234567890123456 9780306406157 3782 822463 10005",
            "[card], [card], [card], [card]; 4242 4242 4242 4241 1234567890123456 9780306406157 [card]",
        ),
        (
            "identity",
            "900101-1234568, 11010519491231002X, 10000000146, 078-05-1120, 529.982.247-25, 12345678Z; 900101-1234567 "
            "901301-1234568 110105194912310021 10000000147 000-05-1120 529.982.247-24 12345678A 051-3456789",
            "[identity], [identity], [identity], [identity], [identity], [identity]; 900101-1234567 "
            "901301-1234568 110105194912310021 10000000147 000-05-1120 529.982.247-24 12345678A 051-3456789",
        ),
        (
            "ips",
            "93.184.216.34:80, 2606:2800:220:1:248:1893:25c8:1946. 192.168.1.20 127.0.0.1 1.2.3.4 v10.11.12.13 "
            "8.0.382.0 10.2.3.4.5 300.1.1.1 224.0.0.1 sürüm 11.1.3.14 12:30:45 std::vector 2001:db8::1",
            "[ip]:80, [ip]. 192.168.1.20 127.0.0.1 1.2.3.4 v10.11.12.13 "
            "8.0.382.0 10.2.3.4.5 300.1.1.1 224.0.0.1 sürüm 11.1.3.14 12:30:45 std::vector 2001:db8::1",
        ),
        # Words that end like a word for "version" are none; in Korean, Chinese and German such a word is a part.
        (
            "ips",
            "Server 93.184.216.34, driver: 93.184.216.34, prev. 93.184.216.34, Kiev 93.184.216.34, subsection "
            "93.184.216.34, Hyper-V 93.184.216.34; ver. 10.11.12.13, rev 99.1.2.34, Softwareversion 93.1.2.34, "
            "软件版本93.1.2.34",
            "Server [ip], driver: [ip], prev. [ip], Kiev [ip], subsection "
            "[ip], Hyper-V [ip]; ver. 10.11.12.13, rev 99.1.2.34, Softwareversion 93.1.2.34, 软件版本93.1.2.34",
        ),
        ("ips", "8.8.8.8, section 4.2.2.1", "8.8.8.8, section 4.2.2.1"),  # sections are far more frequent
        (
            "phones",
            "2020-01-02, 3.14159265, 192.168.100.100, 1,000,000,000, 1914-1918",
            "2020-01-02, 3.14159265, 192.168.100.100, 1,000,000,000, 1914-1918",
        ),
        (
            "url_lines",
            "보기\nhttps://example.com/a?b=c\n  www.example.org \nsee https://example.com here\nftp://x",
            "보기\nsee https://example.com here\n",
        ),
        ("boilerplate", "기사 본문입니다.\n저작권자 © 신문사\n로그인\n무단전재 및 재배포 금지", "기사 본문입니다."),
        (
            "boilerplate",
            "Skip to content\nHome | News | Sport\nA real line.\n© 2024 The Paper. All rights reserved.",
            "A real line.",
        ),
        (
            "boilerplate",
            "Gerçek bir cümle.\nTüm hakları saklıdır.\nDevamını oku\nGiriş yapmak istedi.",
            "Gerçek bir cümle.\nGiriş yapmak istedi.",
        ),
        ("boilerplate", "正文。\n版权所有 2024\n首页 > 新闻 > 体育\n登录", "正文。"),
        (
            "boilerplate",
            "| a | b | c |\nRead more books than films, he said.\n1 > 0",
            "| a | b | c |\nRead more books than films, he said.\n1 > 0",
        ),
    ],
)
def test_rule(rule: str, before: str, after: str) -> None:
    assert RULES[rule](before) == after


def clean(text: str, rules: Collection[str]) -> str:
    return apply_rules(text, {name: rule for name, rule in RULES.items() if name in rules}, set())


def test_all_rules_together() -> None:
    assert clean("\ufeff한글\x00e\x01\u0301  \r\n\r\n\r\n\r\nson \r\n", ALL) == "한글 é\n\nson"


def test_no_rules_change_nothing() -> None:
    text = " a\r\n\x00\ufeff "
    assert clean(text, []) == text


def test_the_order_of_names_does_not_matter() -> None:
    assert clean("e\x01\u0301 \u2028 \r", ALL) == clean("e\x01\u0301 \u2028 \r", ALL[::-1]) == "é"


PIECES = st.lists(
    st.sampled_from(
        [
            "<n>",
            "<",
            ">",
            "&",
            "lt;",
            "amp;",
            "gt;",
            "b",
            "<b>",
            "<p",
            "/p>",
            "<!--",
            "-->",
            "script>",
            "Ã",
            "Â",
            "â€™",
            "©",
            " ",
            "\n",
            "\r",
            "\x00",
            "\x85",
            "é",
            "e\u0301",
            "\u00ad",
            "\u200b",
            "“",
            "…",
            "１",
            "＜",
            "＆",
            "＠",
            "\uff1b",
            "a@b.co",
            "http://x.y",
            "www.",
            "#",
            "+82 10-1234-5678",
            "010-",
            "1234",
            "-5678",
            "로그인",
            "Read more",
            "Home",
            " | ",
            "©",
            "2020",
            "\x9d",
            "ﬁ",
            "한",
            "中",
            "\u3000",
            "\xa0",
            "&#13;",
            "&#128;",
            "&nbsp;",
        ]
    ),
    max_size=14,
).map("".join)


@given(st.one_of(NASTY, PIECES), st.one_of(st.sets(st.sampled_from(sorted(RULES))), st.just(set(RULES))))
@settings(max_examples=120, deadline=None)
def test_idempotent(text: str, rules: set[str]) -> None:
    once = clean(text, rules)
    assert clean(once, rules) == once


@given(NASTY)
def test_result_has_no_unwanted_characters(text: str) -> None:
    cleaned = clean(text, ALL)
    assert unicodedata.is_normalized("NFC", cleaned)
    assert not any(unicodedata.category(letter) == "Cc" and letter not in "\n\t" for letter in cleaned)
    assert "\n\n\n" not in cleaned
    assert cleaned == cleaned.strip()


def test_long_white_space_is_fast() -> None:
    assert clean("a" + " " * 2_000_000 + "b" + "\n" * 2_000_000 + "c", ALL) == "a" + " " * 2_000_000 + "b\n\nc"


def test_repair_agrees_with_ftfy() -> None:
    from ftfy import fix_encoding

    lines = [
        "Şu çılgın Türkler, İstanbul'da ağaç",
        "naïve café — “so” 5 € £",
        "한국어 문장",
        "中文句子。",
        "Ещё один пример",
        "ελληνικά",
    ]
    for line in lines:
        for encoding in ["latin-1", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "mac-roman", "cp437"]:
            wrong = line.encode().decode(encoding, "ignore")
            assert RULES["repair"](wrong) == fix_encoding(wrong), (encoding, wrong)


def test_each_rule_counts_once_per_document() -> None:
    cleaner = Cleaner(CorpusConfig(rules=["newlines", "spaces"]))
    for text in ["a\r\nb ", "a\r\n\r\nc", "plain"]:
        cleaner.clean(text)
    assert cleaner.changed == {"newlines": 2, "spaces": 1}


@pytest.mark.parametrize(
    "text",
    [
        "<" * 50_000,
        "<b " * 20_000,
        "<!--" * 20_000,
        "<script>" * 9_000,
        "&" + "amp;" * 20_000,
        "a@" * 30_000,
        "+1 1 " * 15_000,
        "a|" * 30_000,
        "Ã© " * 20_000,
        "www." * 20_000,
        " " * 50_000,
    ],
    ids=lambda text: text[:4],
)
def test_adversarial_text_is_fast(text: str) -> None:
    start = time.process_time()
    clean(text, RULES)
    assert time.process_time() - start < 5
