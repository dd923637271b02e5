"""Read questions: SQuAD's articles (1.1 and 2.0), or flat records with a context, a question and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from textmill.corpus.labelled.example import Answer, Example, format_place
from textmill.errors import TextmillError

SHOWN_CHARACTERS = 40
"""Characters of a text in an error message."""

Record = dict[str, Any]


def read_article(article: Record, source: str, place: str) -> Iterator[Example]:
    """The questions of an article with its paragraphs."""
    where = format_place(source, place)
    for number, paragraph in enumerate(_list_of(article, "paragraphs", where)):
        inside = f"{where}, paragraphs[{number}]"
        context = _text_of(paragraph, "context", inside)
        for count, question in enumerate(_list_of(paragraph, "qas", inside)):
            here = f"{place}, paragraphs[{number}].qas[{count}]"
            yield _to_example(question, context, source, here)


def read_question(record: Record, source: str, place: str) -> Example:
    """A question with its own context, as in JSON lines and Parquet files."""
    return _to_example(record, _text_of(record, "context", format_place(source, place)), source, place)


def _to_example(record: Any, context: str, source: str, place: str) -> Example:
    where = format_place(source, place)
    question = _text_of(record, "question", where)
    id_ = where if record.get("id") in (None, "") else str(record["id"])
    where = f"{where} (id {id_})" if id_ != where else where
    answers: tuple[Answer, ...] | None = None
    if record.get("is_impossible") is True:
        answers = ()
    elif record.get("answers") is not None:
        answers = tuple(_read_answers(record["answers"], context, where))
    return Example(source, place, (question, context), answers=answers, id=id_)


def _read_answers(answers: Any, context: str, where: str) -> Iterator[Answer]:
    """The accepted answers: a list of objects, or an object of two lists, as the datasets library has them."""
    if isinstance(answers, dict):
        texts = answers.get("text")
        starts = answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise TextmillError(f"{where}: answers need lists 'text' and 'answer_start' of one length; correct them")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise TextmillError(f"{where}: answers are {type(answers).__name__}; give a list of text and answer_start")
    for answer in answers:
        text = _text_of(answer, "text", where)
        start = answer.get("answer_start")
        if type(start) is not int:
            raise TextmillError(f"{where}: answer_start is {start!r}; it must be a whole number of characters")
        if not text or start < 0 or context[start : start + len(text)] != text:
            found = context[max(0, start) : max(0, start) + min(max(len(text), 1), SHOWN_CHARACTERS)]
            raise TextmillError(
                f"{where}: the answer {text[:SHOWN_CHARACTERS]!r} is not at character {start} of its context, where "
                f"{found!r} is; correct answer_start"
            )
        yield text, start


def _list_of(record: Any, name: str, where: str) -> list[Any]:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, list):
        raise TextmillError(f"{where}: has no list '{name}'; question-answering reads SQuAD's JSON")
    return found


def _text_of(record: Any, name: str, where: str) -> str:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, str):
        has = f"; found {', '.join(sorted(map(str, record))[:12])}" if isinstance(record, dict) else ""
        raise TextmillError(f"{where}: has no text '{name}'{has}")
    return found
