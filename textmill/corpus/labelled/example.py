"""Example: a text, a pair of texts, a list of words or a question, with its labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from textmill.corpus.document import Document, Split
from textmill.corpus.shards import list_shards, read_documents
from textmill.errors import TextmillError

SEQUENCES = "sequence-classification"
WORDS = "token-classification"
ANSWERS = "question-answering"
Answer = tuple[str, int]
"""The text of an answer, and the character of the context at which it starts."""


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


def format_place(source: str, place: str) -> str:
    """FILE:LINE if the place is a line."""
    kind, _, number = place.partition(" ")
    return f"{source}:{number}" if kind == "line" else f"{source}, {place}"


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
