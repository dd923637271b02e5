"""Examples with labels: a text, a pair of texts, a list of words or a question, and what is to be learned from them.

`build_labelled` takes the place of prepare's two passes: it reads all sources, decides the splits and the names of the
labels, and writes a shard per split. Files are CSV, JSON, Parquet or Arrow tables, SQuAD's JSON, or CoNLL; the first
mistake in them ends the command, with its file and line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.accounts import AMOUNTS, Counts, build_account
from textmill.corpus.document import SPLITS, Document, Split
from textmill.corpus.find_sources import read_records, split_into_chunks
from textmill.corpus.records import (
    BadRecord,
    UnreadableRecord,
    check_line_length,
    decode_utf8,
    format_place,
    read_lines,
)
from textmill.corpus.shards import RowWriter, list_shards, new_row_shard, read_documents, shard_name
from textmill.corpus.source import FIELD_FORMATS, Source
from textmill.corpus.split import SourceSplits, assign_split, text_digest
from textmill.corpus.text_fields import RECORD
from textmill.errors import TextmillError
from textmill.storage.files import manifest_entry

SEQUENCES = "sequence-classification"
WORDS = "token-classification"
ANSWERS = "question-answering"
Answer = tuple[str, int]
"""The text of an answer, and the character of the context at which it starts."""
ARTICLES = f"data[].{RECORD}"
"""The key of SQuAD's articles."""
LABEL_NAMES = ("label", "labels", "tags", "ner_tags")
WORD_NAMES = ("words", "tokens")
"""Fields that are tried, in this order, if no key is set."""
Record = dict[str, Any]
SHOWN_CHARACTERS = 40
"""Characters of a text in an error message."""
DOCUMENT_START = "-DOCSTART-"
MANY_LABELS = 100
"""From this many labels on, as many labels as half of the examples mean that the key is wrong."""


@dataclass(frozen=True)
class Example:
    """One example of a task with labels."""

    source: str
    place: str
    """Its place in the source: 'line 17'."""
    texts: tuple[str, ...]
    """One or two texts; token-classification: the words; question-answering: the question and its context."""
    labels: tuple[str, ...] | None = None
    """The label of the texts, or of each word; None: unknown."""
    answers: tuple[Answer, ...] | None = None
    """question-answering: the accepted answers, none if the context has no answer; None: unknown."""
    id: str = ""
    """The id of a question."""

    @property
    def where(self) -> str:
        """FILE:LINE, as error messages name it."""
        return format_place(self.source, self.place)

    @property
    def has_labels(self) -> bool:
        """Whether it can be learned from or measured."""
        return self.labels is not None or self.answers is not None

    def to_document(self, task: str) -> Document:
        """The example as a document of a corpus, complete in its metadata."""
        fields = {"texts": self.texts, "labels": self.labels, "answers": self.answers, "id": self.id}
        text = (" " if task == WORDS else "\n").join(self.texts)
        return Document(text, self.source, self.place, json.dumps(fields, ensure_ascii=False))


def from_document(document: Document) -> Example:
    """The inverse of `to_document`."""
    fields = json.loads(document.meta or "{}")
    labels = fields["labels"]
    answers = fields["answers"]
    return Example(
        document.source,
        document.id,
        tuple(fields["texts"]),
        None if labels is None else tuple(labels),
        None if answers is None else tuple((text, start) for text, start in answers),
        fields["id"],
    )


def read_split(folder: Path, split: Split) -> Iterator[Example]:
    """The examples of a split of a corpus folder, in order."""
    for shard in list_shards(folder, split):
        for document in read_documents(shard):
            if document.meta is None:
                raise TextmillError(f"{folder}: has no examples with labels; make it again with: textmill prepare")
            yield from_document(document)


def build_labelled(
    config: CorpusConfig,
    task: str,
    sources: Sequence[Source],
    accounts: Sequence[str],
    source_splits: SourceSplits,
    folder: Path,
) -> tuple[Counts, dict[str, Any]]:
    """Write one shard for each split; return the account, with the names of the labels, and the manifest entry of each
    file."""
    labels = LabelSet()
    split_counts: list[Counts] = []
    with ExitStack() as stack:
        shards = {split: stack.enter_context(new_row_shard(folder / shard_name(split, 0))) for split in SPLITS}
        for source, ratios in zip(sources, source_splits.ratios, strict=True):
            examples = read_examples(source, task, config)
            split_counts.append(_write_examples(examples, task, ratios, shards, labels))
        names = labels.names(task)
    read_counts: list[dict[str, Counts]] = []
    for account, by_split in zip(accounts, split_counts, strict=True):
        records = sum(counts_of_split["documents"] for counts_of_split in by_split.values())
        read_counts.append({account: {"records": records, "kept": records}})
    counts = build_account(accounts, read_counts, split_counts)
    counts |= {"labels": {"task": task, "names": names, "counts": dict(labels.counts)}}
    files: dict[str, Any] = {}
    for split in SPLITS:
        files[shard_name(split, 0)] = manifest_entry(folder / shard_name(split, 0))
    return counts, files


def _write_examples(
    examples: Iterator[Example], task: str, ratios: Sequence[float], shards: Mapping[Split, RowWriter], labels: LabelSet
) -> Counts:
    """Write the examples of a source to the shards of their splits; return what each split got.

    A hash of its text decides the split of an example, by the ratios of its source."""
    amounts: Counts = {split: dict.fromkeys(AMOUNTS, 0) for split in SPLITS}
    for example in examples:
        split = assign_split(_digest(example, task), ratios)
        labels.add(example, split)
        document = example.to_document(task)
        amounts[split]["documents"] += 1
        amounts[split]["bytes"] += len(document.text.encode())
        amounts[split]["characters"] += len(document.text)
        shards[split].add((document.text, document.source, document.id, document.meta), len(document.text))
    return amounts


def _digest(example: Example, task: str) -> bytes:
    """What decides the split: the texts; all questions about a context are in one split."""
    texts = example.texts[1:] if task == ANSWERS else example.texts
    return text_digest((" " if task == WORDS else "\n").join(texts))


class LabelSet:
    """The labels of the train split, and where others occur."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.elsewhere: dict[str, str] = {}
        """Where a label first occurs outside of the train split."""
        self.ids: set[str] = set()
        self.train_examples = 0

    def add(self, example: Example, split: Split) -> None:
        """Count the labels of an example; refuse an example without labels, and a second question with its id."""
        if not example.has_labels:
            raise TextmillError(f"{example.where}: has no label; add it")
        if example.id and example.id in self.ids:
            raise TextmillError(f"{example.where}: the id '{example.id}' occurs twice; each question needs its own")
        if example.id:
            self.ids.add(example.id)
        self.train_examples += split == "train"
        for label in example.labels or ():
            if split == "train":
                self.counts[label] += 1
            else:
                self.elsewhere.setdefault(label, f"{example.where}: the {split} split")

    def names(self, task: str) -> list[str]:
        """The names in the order of their numbers; numbers are sorted as numbers."""
        if not self.train_examples:
            raise TextmillError("corpus.sources: the train split is empty; give it more of corpus.split, or a file")
        if task == ANSWERS:
            return []
        if len(self.counts) < 2:
            raise TextmillError(
                f"corpus.label_key: the train split has one label only, '{next(iter(self.counts), '')}'; "
                "there is nothing to learn"
            )
        if task == SEQUENCES and len(self.counts) > max(MANY_LABELS, self.train_examples / 2):
            raise TextmillError(
                f"corpus.label_key: {self.train_examples:,} examples have {len(self.counts):,} different labels; "
                "name the field with the classes"
            )
        for label, where in self.elsewhere.items():
            if label not in self.counts:
                raise TextmillError(
                    f"{where} has the label '{label}', which the train split does not have; its labels are "
                    f"{', '.join(sorted(self.counts)[:12])}"
                )
        numbers = all(re.fullmatch("-?[0-9]{1,18}", label) for label in self.counts)
        return sorted(self.counts, key=int) if numbers else sorted(self.counts)


def read_examples(source: Source, task: str, config: CorpusConfig, *, needs_labels: bool = True) -> Iterator[Example]:
    """The examples of a source, in order; one without labels is an error if they are needed."""
    if source.format not in FIELD_FORMATS:
        if task != WORDS or source.format != "text":
            raise TextmillError(
                f"{source.name}: corpus.labels={task} reads CSV, JSON, Parquet or Arrow files; convert the file"
            )
        yield from read_conll(source)
        return
    is_squad = task == ANSWERS and source.format == "json"
    key = source.text_key or config.text_key
    for place, record in _read_records(source, ARTICLES if is_squad else RECORD, config):
        where = format_place(source.name, place)
        if not isinstance(record, dict):
            raise TextmillError(f"{where}: found no object with fields; each example needs one")
        if is_squad:
            yield from read_article(record, source.name, place)
        elif task == ANSWERS:
            yield read_question(record, source.name, place)
        else:
            read = _read_words if task == WORDS else _read_texts
            example = read(record, source.name, place, key, config.label_key)
            if needs_labels and not example.has_labels:
                raise TextmillError(
                    f"{where}: has no label; found the fields {_list_fields(record)}; add it, or set corpus.label_key"
                )
            yield example


def _read_records(source: Source, key: str, config: CorpusConfig) -> Iterator[tuple[str, object]]:
    """(place, record) of each record that is not blank."""
    config = config.model_copy(update={"keep_fields": [], "chat": None})
    for chunk in split_into_chunks([source._replace(text_key=key)], "section"):
        for found in read_records(chunk, config):
            if isinstance(found, BadRecord):
                raise TextmillError(f"{found}; correct it, or remove it")
            if found.text:
                yield found.id, json.loads(found.text)


def _read_texts(record: Record, source: str, place: str, key: str, label_key: str | None) -> Example:
    where = format_place(source, place)
    names = [name.strip() for name in key.split("+")]
    if len(names) > 2:
        raise TextmillError(f"corpus.text_key: '{key}' names {len(names)} texts; {SEQUENCES} reads one or two")
    for name in names:
        if not isinstance(record.get(name), str):
            problem = "is not text" if name in record else f"is missing; found {_list_fields(record)}"
            raise TextmillError(f"{where}: the field '{name}' {problem}; set corpus.text_key to TEXT or FIRST+SECOND")
    label = _find(record, [label_key] if label_key else LABEL_NAMES[:1])
    labels = None if label is None or label == "" else (_label_text(label, where),)
    return Example(source, place, tuple(record[name] for name in names), labels)


def _read_words(record: Record, source: str, place: str, key: str, label_key: str | None) -> Example:
    where = format_place(source, place)
    words = _find(record, WORD_NAMES if key == CorpusConfig().text_key else [key])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        expected = "words" if key == CorpusConfig().text_key else key
        raise TextmillError(
            f"{where}: has no list of words in '{expected}'; found {_list_fields(record)}; set corpus.text_key"
        )
    labels = _find(record, [label_key] if label_key else LABEL_NAMES[1:])
    if labels is None:
        return Example(source, place, tuple(words))
    if not isinstance(labels, list) or len(labels) != len(words):
        found = f"{len(labels)} labels" if isinstance(labels, list) else f"{labels!r} as labels"
        raise TextmillError(f"{where}: {len(words)} words but {found}; each word needs one label")
    return Example(source, place, tuple(words), tuple(_label_text(label, where) for label in labels))


def _find(record: Record, names: Any) -> Any:
    return next((record[name] for name in names if name in record), None)


def _list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))[:12])


def _label_text(label: Any, where: str) -> str:
    """A label as text: a number keeps its form in the file."""
    empty = not label.strip() if isinstance(label, str) else label is None or label != label  # NaN differs from itself
    if isinstance(label, dict | list) or empty:
        raise TextmillError(f"{where}: the label is {label!r}; it must be text or a number")
    return label.strip() if isinstance(label, str) else json.dumps(label)


def read_article(article: Record, source: str, place: str) -> Iterator[Example]:
    """The questions of an article with its paragraphs."""
    where = format_place(source, place)
    for number, paragraph in enumerate(_list_of(article, "paragraphs", where)):
        inside = f"{where}, paragraphs[{number}]"
        context = _text_of(paragraph, "context", inside)
        for count, question in enumerate(_list_of(paragraph, "qas", inside)):
            here = f"{place}, paragraphs[{number}].qas[{count}]"
            yield _to_question(question, context, source, here)


def read_question(record: Record, source: str, place: str) -> Example:
    """A question with its own context, as in JSON lines and Parquet files."""
    return _to_question(record, _text_of(record, "context", format_place(source, place)), source, place)


def _to_question(record: Any, context: str, source: str, place: str) -> Example:
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


def read_conll(source: Source) -> Iterator[Example]:
    """The sentences of a file. The word is the first column, its label the last; one column alone has no labels."""
    rows: list[list[str]] = []
    first = width = 0
    for number, line in _conll_lines(source):
        columns = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or columns[0] == DOCUMENT_START:
            if rows:
                yield _to_sentence(source.name, first, rows)
            rows = []
            continue
        if not rows and _is_comment(columns, width):
            continue
        width = width or len(columns)
        if len(columns) != width:
            raise TextmillError(
                f"{source.name}:{number}: found {len(columns)} columns, the lines before have {width}; "
                "write a word and its label on each line, with a tab or spaces between them"
            )
        if width > 1 and not columns[-1].strip():
            raise TextmillError(f"{source.name}:{number}: the word '{columns[0]}' has no label; add it")
        first = first if rows else number
        rows.append(columns)
    if rows:
        yield _to_sentence(source.name, first, rows)


def _is_comment(columns: list[str], width: int) -> bool:
    """Whether a line before a sentence is a comment such as '# id = 3', not a word."""
    return columns[0].startswith("#") and (" " in columns[0] or len(columns) != (width or 2))


def _to_sentence(source: str, first: int, rows: list[list[str]]) -> Example:
    labels = tuple(row[-1].strip() for row in rows) if len(rows[0]) > 1 else None
    return Example(source, f"line {first}", tuple(row[0] for row in rows), labels)


def _conll_lines(source: Source) -> Iterator[tuple[int, str]]:
    for chunk in split_into_chunks([source], "line"):
        for number, line, length in read_lines(chunk):
            try:
                check_line_length(length)
                yield number, decode_utf8(line).rstrip("\r\n")
            except UnreadableRecord as error:
                raise TextmillError(f"{format_place(source.name, f'line {number}')}: {error}") from None
