"""Wikitext: the visible text stays, and no broken page takes long."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.corpus.formats.mediawiki import HIDDEN_PREFIXES, is_redirect, wikitext_to_plain


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("'''Bold''' and ''thin''", "Bold and thin"),
        ("[[a]] [[b|c]] [[d|]] [[:Category:E]]", "a c d Category:E"),
        ("[[File:x.jpg|thumb|with [[a|link]] and {{t}}]]text", "text"),
        ("[[Category:X]][[fr:Titre]]text", "text"),
        ("[https://a.b/c label] [https://a.b] end", "label  end"),
        ("a{{t|{{u}}|x=[[y]]}}b", "ab"),
        ("a{{t|}}b {{open b", "ab {{open b"),
        ("a }} b", "a }} b"),
        ("before\n{| class=x\n|-\n| a\n{|\n| inner\n|}\n|}\nafter", "before\n\nafter"),
        ("fact<ref name=a>{{cite}}</ref>, more<ref name=a/>.", "fact, more."),
        ("open<ref>words", "openwords"),
        ("<!-- gone -->kept<!-- never closed", "kept"),
        ("== Head ==\ntext\n=== Sub ===\n* one\n# two\n----\n", "Head\ntext\nSub\none\ntwo"),
        ("a<br/>b<div class=x>c</div> &lt;d&gt; &amp;", "a\nbc <d> &"),
        ("__TOC__text", "text"),
        ("name ({{lang|x}}, ) is", "name is"),
        ("-{zh-hans:简体;zh-hant:繁體}-字", "简体字"),
        ("한국어 [[위키백과|백과]]", "한국어 백과"),
        ("It weighs {{convert|4|kg|lb}}.", "It weighs 4 kg."),
        ("It is {{Convert|4|to|6.5|ft|m|abbr=on}} long.", "It is 4 to 6.5 ft long."),
        ("from {{cvt|1,000|-|2,000|km2}}", "from 1,000–2,000 km2"),
        ("{{lang|fr|chat}}, {{lang-de|Katze}}, {{nowrap|10 {{abbr|kg|kilogram}}}}", "chat, Katze, 10 kg"),
        ("{{circa|1900}}{{snd}}{{frac|1|2}} of {{nowrap|[[a|b]]}}", "c. 1900 – 1/2 of b"),
        ("{{Infobox|weight={{convert|4|kg|lb}}}}text", "text"),
        ("{{convert|kg}}text{{convert}}", "text"),
    ],
)
def test_plain_text(wikitext: str, plain: str) -> None:
    assert wikitext_to_plain(wikitext) == plain


@pytest.mark.parametrize(
    "page", ["#REDIRECT [[A]]", "#weiterleitung [[A b#c]]\n\n[[Kategorie:X]]", "#넘겨주기 [[가]] {{t}}"]
)
def test_redirects(page: str) -> None:
    hidden = {*HIDDEN_PREFIXES, "kategorie"}
    assert is_redirect(page, hidden)
    assert not is_redirect(page + " and much more text")
    assert not is_redirect("# [[A]] is first in a list")


def test_namespace_names_of_a_language() -> None:
    assert wikitext_to_plain("[[Datei:x.jpg|klein]]Wort", {*HIDDEN_PREFIXES, "datei"}) == "Wort"


SIGNS = ["{{", "}}", "\n{|", "\n|}", "[[", "]]", "|", "<ref>", "</ref>", "<!--", "-->", "\n", "==", "a ", "File:"]


@given(st.lists(st.sampled_from(SIGNS)).map("".join))
def test_any_text(text: str) -> None:
    wikitext_to_plain(text)


@pytest.mark.parametrize(
    "part",
    [
        "{{",
        "{{a|",
        "[[",
        "<ref>",
        "<ref",
        "{|\n",
        "\n{|",
        "}}",
        "'''",
        "<!--",
        "[http://a ",
        "-{",
        "(",
        "\n\n \n",
        "[[a|",
    ],
)
def test_broken_pages_are_fast(part: str) -> None:
    start = time.process_time()
    wikitext_to_plain(part * 20_000)
    assert time.process_time() - start < 2
