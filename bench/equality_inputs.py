"""The input files of bench/equality.py, made of the text that is shipped with textmill."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STRINGS = [
    "The mill stands by the river, and the wheel begins to turn.",
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 천천히 돌기 시작한다.",
    "Değirmen köprünün üstünde duruyor; çark yavaş yavaş döner.",
    "  two  spaces,\ttabs\n\nand lines; 3.14159, 2026-11-18, $5 & €7 — “quotes” 🙂 한글 漢字 ﬁ Ａ",
    "<|endoftext|> [SEP] [MASK] </s> <|user|>hello<|assistant|>",
    "def f(x):\n    return {'a': [x, *range(10)]}  # naïve café e\u0301",
]
DIRT = [
    "Caf\u00c3\u00a9 and na\u00c3\u00afve<n>second line\r\nthird\u200b line\x07 with ｗｉｄｅ ﬁ and “quotes” of it",
    "<p>Write to the <b>king</b> at king@castle.example.org or call +82-10-1234-5678 &amp; wait for an answer.</p>",
    "https://example.org/a/b?c=d\nThe herald reads the letter aloud to all who came.\nAll rights reserved.\nSubscribe!",
    "1234567890 1234567890 12345 67890 !!! ??? ### $$$ %%% 999",
    "the same line again and again\n" * 6,
    "short",
]
FILLERS = "the film was a story about king and queen in castle with music".split()
NAMES = "Kim Lee Ada Tom".split()
CITIES = "Seoul Ankara Paris Lima".split()
OPINIONS = {"pos": "good great fine lovely".split(), "neg": "bad awful poor horrid".split()}


def write_inputs(folder: Path, shakespeare: str) -> None:
    """Write all input files."""
    (folder / "formats").mkdir(parents=True)
    blocks = [block.strip() for block in shakespeare[:150_000].split("\n\n") if block.strip()]
    documents = ["\n\n".join(blocks[start : start + 4]) for start in range(0, len(blocks), 4)]
    (folder / "plain.txt").write_text(shakespeare[:150_000], encoding="utf-8")
    (folder / "short.txt").write_text(shakespeare[150_000:190_000], encoding="utf-8")
    _write_lines(folder / "strings.jsonl", ({"text": text} for text in STRINGS))
    _write_formats(folder / "formats", documents)
    paragraphs = [{"paragraph": [{"form": one} for one in blocks[start : start + 3]]} for start in range(0, 90, 3)]
    (folder / "nested.json").write_text(json.dumps({"document": paragraphs}), encoding="utf-8")
    question = _write_tasks(folder, blocks)[0]
    near = [document.replace("the", "ye", 1) for document in documents[:20]]
    leaked = f"{question['context']} {question['choices'][question['answer']]} and then he left the castle"
    dirty = [*documents[:60], *near, *documents[:5], *DIRT, leaked]
    _write_lines(folder / "dirty.jsonl", ({"text": text} for text in dirty))
    _write_chats(folder, blocks)
    _write_labelled(folder)


def _write_lines(path: Path, records: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _write_formats(folder: Path, documents: list[str]) -> None:
    """Fifteen documents in each format; the first ones are in two of them."""
    import pyarrow as pa
    import pyarrow.parquet

    parts = [documents[start : start + 15] for start in range(0, 120, 15)]
    (folder / "a.txt.gz").write_bytes(gzip.compress("\n\n".join(parts[0]).encode(), mtime=0))
    lines = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in parts[1])
    (folder / "b.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    (folder / "c.json").write_text(json.dumps([{"text": text} for text in parts[2] + parts[1][:3]]), encoding="utf-8")
    rows = [f'{number},"{text.replace(chr(34), chr(34) * 2)}"' for number, text in enumerate(parts[3])]
    (folder / "d.csv").write_text("\n".join(["id,text", *rows]) + "\n", encoding="utf-8")
    pa.parquet.write_table(pa.table({"text": parts[4], "url": parts[4]}), folder / "e.parquet")
    pages = [
        f"<page><title>T{number}</title><ns>0</ns><id>{number}</id><revision><id>1</id><text>'''{text}''' [[a|b]]"
        "</text></revision></page>"
        for number, text in enumerate(parts[5])
    ]
    (folder / "f.xml").write_text(
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">' + "".join(pages) + "</mediawiki>",
        encoding="utf-8",
    )
    docs = [f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\n{text}\n</doc>\n' for n, text in enumerate(parts[6])]
    (folder / "wiki_00").write_text("".join(docs), encoding="utf-8")
    with zipfile.ZipFile(folder / "g.zip", "w") as archive:
        archive.writestr("inner.txt", "\n\n".join(parts[7]))


def _write_chats(folder: Path, blocks: list[str]) -> None:
    """Conversations of two and four messages, and pairs of a question and an answer."""
    lines = [block.partition("\n")[2][:70] or block[:70] for block in blocks[:600]]
    chats = []
    for start in range(0, 480, 4):
        turns = lines[start : start + (2 if start % 8 else 4)]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
        chats.append({"messages": messages})
    _write_lines(folder / "messages.jsonl", chats)
    rows = [f'"{q}","{a}"' for q, a in zip(lines[::2], lines[1::2], strict=True) if '"' not in q + a]
    (folder / "pairs.csv").write_text("\n".join(["Q,A", *rows[:80]]) + "\n", encoding="utf-8")


def _write_tasks(folder: Path, blocks: list[str]) -> list[dict[str, Any]]:
    """Data of evaluation tasks; returns the questions."""
    texts = [" ".join(block.split()[:9]) for block in blocks[700:] if len(block.split()) > 9][:24]
    _write_lines(folder / "lambada.jsonl", ({"text": text} for text in texts))
    questions: list[dict[str, Any]] = [
        {"context": text, "choices": [text[:15], text[-15:], f"{n} and"], "answer": n % 3}
        for n, text in enumerate(texts)
    ]
    _write_lines(folder / "choices.jsonl", questions)
    shuffled = [{"sentence_good": text, "sentence_bad": " ".join(text.split()[::-1])} for text in texts]
    _write_lines(folder / "good_bad.jsonl", shuffled)
    articles = [f" = T{n} = \n\n {text} @-@ made , so @,@ 1 . \n" for n, text in enumerate(texts[:8])]
    (folder / "wiki.txt").write_text("".join(articles), encoding="utf-8")
    return questions


def _write_labelled(folder: Path) -> None:
    """Texts with a class, words with entities, and questions with answers."""
    dice = random.Random(1)
    kinds = {**dict.fromkeys(NAMES, "B-PER"), **dict.fromkeys(CITIES, "B-LOC")}
    rows, sentences, paragraphs = ["text,label"], [], []
    for number in range(120):
        label = dice.choice(list(OPINIONS))
        city = dice.choice(CITIES)
        words = [*dice.sample(FILLERS, 4), dice.choice(NAMES), *dice.sample(FILLERS, 3), city]
        rows.append(f"{' '.join(words)} {dice.choice(OPINIONS[label])} {number},{label}")
        sentences.append("".join(f"{word} {kinds.get(word, 'O')}\n" for word in words))
        context = " ".join(words)
        answers = [{"text": city, "answer_start": context.index(city)}]
        paragraphs.append({"context": context, "qas": [{"id": f"{number}", "question": "where ?", "answers": answers}]})
    (folder / "classes.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "words.conll").write_text("\n".join(sentences), encoding="utf-8")
    squad = {"version": "1.1", "data": [{"title": "cities", "paragraphs": paragraphs}]}
    (folder / "answers.json").write_text(json.dumps(squad), encoding="utf-8")
