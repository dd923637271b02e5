"""Sentences: examples in several scripts, and only white space changes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.corpus.clean.sentences import keep_lines, split_sentences

# A bar stands where a sentence ends.
CASES = [
    "One sentence.|Another one!|A third?",
    "Dr. Smith met Mrs. Jones at 5 p.m. in Washington, D.C. on Monday.|They talked.",
    "It costs $3.50 today, or 1,000.25 tomorrow.|Fine.",
    "J. R. R. Tolkien wrote it.|C. S. Lewis read it.",
    '"Why?" he asked.|"Because!" she said.|They left.',
    'He said, "It is over."|Then he went.|(Nobody followed.)|Silence.',
    "Wait... what?|Then... nothing.|Well...|So be it.",
    "See Fig. 3.|The U.S. army came, e.g. on foot, i.e. slowly.|It stayed in the U.S.|The end.",
    "1. First item.|2. Second item.",
    "Visit https://example.com/a.b?c=d now.|Version 2.0.1 is out.",
    "What?!|No way!!!|Really.",
    "He came from St. Petersburg vs. Moscow on Jan. 5.|It was cold.",
    "Prof. Dr. Ali Bey geldi.|Herkes sustu.",
    "19. yüzyılda başladı.|Saat 10.30'da bitti.",
    '"Neden?" diye sordu.|Kimse cevap vermedi!',
    "Bkz. Şekil 3.|Sonuçlar iyidir.",
    "İstanbul'da yağmur var.|Üsküdar'da da.|Çok güzel...",
    "Kalem, defter vb. şeyler aldı.|Örn. silgi almadı.",
    "Ne dedi?|Hiç!|Öyle mi?..|Evet.",
    "저는 학생입니다.|당신은 누구세요?|반갑습니다!",
    "원주율은 3.14이다.|그렇다.",
    "2020. 5. 3. 서울에서 열렸다.|많은 사람이 왔다.",
    "1. 첫째 항목입니다.|2. 둘째 항목입니다.",
    "“정말요?”라고 물었다.|“네.”|그가 답했다.",
    "글쎄요...|잘 모르겠어요.",
    "GPT-4.5 모델은 빠르다.|v2.0도 그렇다.",
    "你好。|我是学生！|你呢？",
    "他说：“你好。”|然后走了。",
    "“走吧！”，他喊道。|没有人动。",
    "我不信……但是好吧。|走。",
    "价格是3.5元。|真的吗?|我不信!|好吧。",
    "（完。）|下一章",
    "「こんにちは。」|彼は言った。|はい！",
    "他用了GPT-2.0版本。|很好！！|真的？！|是。",
    "Он родился в 1990 г. в Москве.|Там холодно.",
    "А. С. Пушкин — поэт.|См. рис. 5.|Да!|Правда?",
    "Это т. е. пример.|«Да!» — сказал он.|Конец.",
    "यह एक वाक्य है।|दूसरा वाक्य।",
    "هل هذا سؤال؟|نعم.",
    "¿Qué pasa?|¡Nada!|Vale.",
]


def test_enough_cases() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    space = "" if any("\u3000" <= letter <= "\u9fff" for letter in case) else " "
    assert split_sentences(case.replace("|", space)).split("\n") == case.split("|")


def test_missing_space() -> None:
    assert split_sentences("갔다.그리고 왔다.정말?네.").split("\n") == ["갔다.", "그리고 왔다.", "정말?", "네."]


def test_lines() -> None:
    assert (
        split_sentences("A heading\n\nA body\nthat follows it.\nAnother line")
        == "A heading\nA body that follows it.\nAnother line"
    )


def test_wrapped_lines_are_joined() -> None:
    text = (
        "It was the best of times, it was the worst of times, it was the age of\n"
        "Wisdom, and the age\nof foolishness.\n\nChapter 2\nNext."
    )
    assert split_sentences(text).split("\n") == [
        "It was the best of times, it was the worst of times, it was the age of Wisdom, and the age of foolishness.",
        "Chapter 2",
        "Next.",
    ]


def test_lines_that_are_already_split() -> None:
    assert keep_lines("Bir cümle. İki cümle.\n\n  한 문장. \n\n\n终。") == "Bir cümle. İki cümle.\n한 문장.\n终。"


SIGNS = st.sampled_from(
    [*".!?…。！？\"'”’)」 \n\t;:,aAİı1한中-(\u3000\u2028\r", "Dr. ", "U.S. ", "1. ", "e.g. ", "다.", "...", "a\nb"]
)


@given(st.one_of(st.text(), st.lists(SIGNS).map("".join)))
@settings(max_examples=100, deadline=None)
def test_only_white_space_changes(text: str) -> None:
    for function in (split_sentences, keep_lines):
        after = function(text)
        assert "".join(after.split()) == "".join(text.split())
        assert all(line == line.strip() and line for line in after.split("\n")) or not after


@pytest.mark.parametrize(
    "text",
    [". " * 50_000, "." * 100_000, "a\n" * 50_000, " " * 100_000, "( " * 50_000, "。" * 100_000, ". " + "- " * 50_000],
)
def test_adversarial_text_is_fast(text: str) -> None:
    start = time.process_time()
    split_sentences(text)
    assert time.process_time() - start < 5
