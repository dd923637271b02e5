"""The chat layout: full conversations packed into samples, isolated from each other, with loss on the answers only.

The conversations [1 2 3 0] and [4 5 0], whose answers are [3 0] and [5 0], in a sample of length 6 (- is -100, p is the
padding token):

    inputs     [1 2 3 4 5 p]
    labels     [- 3 0 5 0 -]
    documents  [1 1 1 2 2 0]

`check_training_data` looks at the data before the first step: loss tokens, truncation, stop tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, astuple, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import TrainConfig
from textmill.errors import TextmillError, warn
from textmill.ranges import expand_ranges
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    Numbers,
    check_ids,
    gather_ranges,
    number_spans,
    permute,
    prefix_sums,
    shuffle_in_epoch,
)
from textmill.tokens.splits import Splits
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

_CONVERSATIONS_KEY = 5
_SAMPLES_KEY = 6
"""Keys of the two shuffles: of conversations, and of samples in each epoch."""

BLOCK = 1 << 13
"""Conversations processed at a time."""
EXAMPLES = 3
MAX_CHARACTERS = 600
"""How many conversations are printed, and how many characters of each part."""
LOSS = "loss"
NO_LOSS = "no loss"
TRUNCATED = "truncated"
MARKERS = {LOSS: ("{+", "+}"), NO_LOSS: ("", ""), TRUNCATED: ("[-", "-]")}
QUESTION_FRACTION = 0.25
"""The fraction of a sample that a question keeps if its answer is too long for the rest."""
WARN_TRUNCATED = 0.1
WARN_WITHOUT_LOSS = 0.01
"""Fractions of conversations above which a warning is printed."""
TextSpan = tuple[str, str]
"""LOSS, NO_LOSS or TRUNCATED; and the text."""


@dataclass(eq=False)
class ChatLayout:
    """Samples of one or more full conversations. Without a seed, conversations keep the order of the store.

    A conversation of n tokens takes n - 1 positions, because its last token is only a label. A longer one loses whole
    turns at its start (see `kept_spans`).
    Which conversations share a sample is fixed for the run; each epoch shuffles the samples.
    """

    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    pad_id: int
    pack: bool = True
    vocab: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.store.loss_mask is None:
            raise TextmillError(
                f"{self.store.prefix}: has no conversations, which train.layout=chat needs; make them with corpus.chat "
                f"and tokenizer.chat, or set train.layout=packed"
            )
        self.ids = np.asarray(self.store.ids)
        self.loss_mask = np.asarray(self.store.loss_mask)

        self.ends = prefix_sums(
            self.store,
            lambda lengths, positions: np.clip(lengths[self._document_at(positions)] - 1, 0, self.length),
            self.folder,
            0,
            "chat",
            self.length,
            "as it is" if self.seed is None else self.seed,
        )
        self.firsts = _first_conversations(self.ends, self.length) if self.pack else np.arange(len(self.store))
        self.store.advise(random=self.seed is not None)
        self.samples_per_epoch = len(self.firsts)
        if not self.samples_per_epoch:
            raise TextmillError(f"{self.store.prefix}: has no conversations to train on; add some")

    def build_samples(self, samples: Numbers) -> Batch:
        """The samples with these numbers."""
        rows, conversations = self.find_documents(samples)
        starts, counts, of_conversation = self.find_spans(conversations)
        kept = np.bincount(of_conversation, counts, len(conversations)).astype(np.int64)
        ids, targets = self.read(starts, counts)
        check_ids(ids, self.vocab, self.store.prefix)
        ends = np.cumsum(kept)[kept > 0]
        lengths = np.maximum(kept - 1, 0)
        used = np.bincount(rows, lengths, len(samples)).astype(np.int64)
        filled = np.arange(self.length) < used[:, None]
        inputs = np.full(filled.shape, self.pad_id, np.int32)
        labels = np.full(filled.shape, IGNORED, np.int32)
        inputs[filled] = np.delete(ids, ends - 1)  # the last token of a conversation is only a label
        labels[filled] = np.delete(targets, ends - kept[kept > 0])  # the first one is never a label
        if not self.pack:
            return Batch(inputs, labels, samples)
        documents = np.zeros_like(inputs)
        documents[filled] = np.repeat(number_spans(rows), lengths)
        return Batch(inputs, labels, samples, documents)

    def find_spans(self, conversations: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The kept ranges of conversations: where each starts, its tokens, and the place of its conversation here."""
        edges = self.store.document_starts(np.stack([conversations, conversations + 1]))
        counts = edges[1] - edges[0]
        numbers = np.arange(len(counts))
        too_long = np.flatnonzero(counts > self.length + 1)
        if not len(too_long):
            return edges[0], counts, numbers
        parts = [[(first, last)] for first, last in edges.T.tolist()]
        for number in too_long.tolist():
            first, last = parts[number][0]
            kept = kept_spans(self.loss_mask[first:last], self.length + 1)
            parts[number] = [(first + start, first + stop) for start, stop in kept]
        spans = np.array([span for part in parts for span in part])
        return spans[:, 0], spans[:, 1] - spans[:, 0], np.repeat(numbers, [len(part) for part in parts])

    def read(self, starts: Numbers, counts: Numbers) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids of these ranges, and the same where they have loss, else -100."""
        ids = gather_ranges(self.ids, starts, counts)
        return ids, np.where(gather_ranges(self.loss_mask, starts, counts) > 0, ids, np.int32(IGNORED))

    def _document_at(self, positions: Numbers) -> Numbers:
        return positions if self.seed is None else permute(len(self.store), positions, self.seed, _CONVERSATIONS_KEY)

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, conversation) for every conversation in these samples."""
        bins = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        first = self.firsts[bins]
        per_sample = np.append(self.firsts[1:], len(self.store))[bins] - first
        rows = np.repeat(np.arange(len(samples)), per_sample)
        positions = expand_ranges(first, per_sample)
        return rows, self._document_at(positions)


def _first_conversations(ends: Numbers, length: int) -> Numbers:
    """The first conversation of each sample (next-fit packing: in order, until the next one does not fit)."""
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else np.zeros(0, np.int64)
    following = np.searchsorted(ends, before + length, side="right")
    firsts = []
    position = 0
    while position < len(ends):
        firsts.append(position)
        position = following.item(position)
    return np.array(firsts, np.int64)


def check_training_data(train: TrainConfig, data: Splits, length: int, vectors: int) -> None:
    """Print examples and counts of chat data; raise an error where training could not work.

    Plain text gets warnings only. `vectors`: rows of the model's token embedding.
    """
    stores = data.stores("train")
    if not data.stores("valid"):
        warn(
            "there is no valid split, so overfitting cannot be noticed and no step is the best; "
            "give it a fraction in corpus.split"
        )
    if train.layout != "chat":
        if any(store.loss_mask is not None for store in stores):
            warn(
                f"the tokens are conversations, but train.layout={train.layout} has loss on every token, "
                f"questions included; set train.layout=chat"
            )
        return
    tokenizer = data.tokenizer
    _check_special_tokens(tokenizer, vectors)
    layouts = [ChatLayout(store, length=length, seed=None, pad_id=0, pack=False) for store in stores]
    counts = sum((count_conversations(layout, tokenizer.eos_id) for layout in layouts), ChatCounts())
    for layout in layouts[:1]:
        for number, spans in enumerate(example_conversations(layout, tokenizer), 1):
            print_conversation(f"sample {number}", spans)
    print(_format_counts(counts, length, tokenizer), flush=True)
    _check_counts(counts, length, tokenizer)
    _warn_about_counts(counts, train, length)


@dataclass(frozen=True)
class ChatCounts:
    """Counts over conversations, with samples of a given length."""

    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    """Tokens with loss after truncation."""
    truncated: int = 0
    """Conversations longer than a sample."""
    cut_questions: int = 0
    """Conversations of which one question with its answer does not fit, so that the question's middle is cut out."""
    without_loss: int = 0
    """Conversations without loss tokens after truncation."""
    with_stop: int = 0
    """Conversations in which a stop token has loss."""
    longest: int = 0
    """Tokens of the longest conversation."""

    def __add__(self, other: ChatCounts) -> ChatCounts:
        sums = ChatCounts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))
        return replace(sums, longest=max(self.longest, other.longest))


def count_conversations(layout: ChatLayout, stop: int) -> ChatCounts:
    """The counts of a store, cut to the length of a sample; `stop` is the id of the stop token."""
    counts = ChatCounts()
    for begin in range(0, len(layout.store), BLOCK):
        numbers = np.arange(begin, min(begin + BLOCK, len(layout.store)))
        lengths = np.diff(layout.store.document_starts(np.append(numbers, numbers[-1] + 1)))
        starts, sizes, owners = layout.find_spans(numbers)
        of_token = np.repeat(owners, sizes)
        targets = layout.read(starts, sizes)[1]
        targets[np.flatnonzero(np.diff(of_token, prepend=-1))] = IGNORED  # the first token is never a label
        loss_tokens, stops = (
            np.bincount(of_token[found], minlength=len(numbers)) for found in (targets != IGNORED, targets == stop)
        )
        counts += ChatCounts(
            conversations=len(numbers),
            tokens=int(lengths.sum()),
            loss_tokens=int(loss_tokens.sum()),
            truncated=int((lengths > layout.length + 1).sum()),
            cut_questions=int((np.bincount(owners) > 1).sum()),
            without_loss=int((loss_tokens == 0).sum()),
            with_stop=int((stops > 0).sum()),
            longest=int(lengths.max()),
        )
    return counts


def kept_spans(loss: NDArray[Any], most: int) -> list[tuple[int, int]]:
    """The ranges of a conversation that are kept, `most` tokens or fewer; `loss` is its loss mask.

    A question and its answer are kept or dropped together: the last ones that fit.
    If one question with its answer does not fit, the question's middle is cut out, down to QUESTION_FRACTION of
    `most`, and then the answer's end.
    """
    is_answer = np.concatenate([[False], np.asarray(loss) > 0, [False]])
    ends = np.flatnonzero(is_answer[:-1] & ~is_answer[1:])  # behind the last token of each answer
    if not len(ends):
        return [(len(loss) - most, len(loss))]
    edges = np.concatenate([[0], ends])
    fitting = np.flatnonzero(edges[-1] - edges[:-1] <= most)
    if len(fitting):
        return [(int(edges[fitting[0]]), int(edges[-1]))]
    begin, end = int(edges[-2]), int(edges[-1])
    answer = begin + int(np.flatnonzero(is_answer[begin + 1 : end + 1])[0])
    question = min(answer - begin, max(most - (end - answer), int(QUESTION_FRACTION * most), 1))
    tail = question // 2
    stop = min(end, answer + most - question)
    if question == answer - begin:
        return [(begin, stop)]
    return [(begin, begin + question - tail), (answer - tail, stop)]


def example_conversations(layout: ChatLayout, tokenizer: TextTokenizer) -> Iterator[list[TextSpan]]:
    """A few conversations as text spans; the last one is truncated if any is."""
    store = layout.store
    numbers = list(dict.fromkeys(len(store) * number // EXAMPLES for number in range(EXAMPLES)))
    too_long = np.flatnonzero(store.document_lengths() > layout.length + 1)
    if len(too_long) and not set(numbers) & set(too_long.tolist()):
        numbers[-1] = int(too_long[0])
    for number in numbers:
        begin, end = store.document_starts(np.array([number, number + 1])).tolist()
        is_kept = np.zeros(end - begin, np.bool_)
        starts, counts, _ = layout.find_spans(np.array([number]))
        is_kept[expand_ranges(starts - begin, counts)] = True
        pairs = zip(layout.loss_mask[begin:end].tolist(), is_kept.tolist(), strict=True)
        kinds = [(LOSS if loss else NO_LOSS) if kept else TRUNCATED for loss, kept in pairs]
        runs = groupby(zip(kinds, store.ids[begin:end].tolist(), strict=True), key=lambda pair: pair[0])
        yield [(kind, tokenizer.decode(id_ for _, id_ in run)) for kind, run in runs]


def print_conversation(name: str, spans: list[TextSpan]) -> None:
    """Print one conversation with markers: {+loss+}, [-truncated-]."""
    marked = (_shorten(text.replace("\n", "\\n")).join(MARKERS[kind]) for kind, text in spans)
    print(f"{name}: {''.join(marked)}")


def _shorten(text: str) -> str:
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _format_counts(counts: ChatCounts, length: int, tokenizer: TextTokenizer) -> str:
    total = max(1, counts.conversations)
    stop = tokenizer.inner.id_to_token(tokenizer.eos_id)
    return (
        f"chat: {counts.conversations:,} conversations, {counts.tokens:,} tokens, "
        f"{counts.loss_tokens / max(1, counts.tokens):.1%} with loss; "
        f"truncated {counts.truncated / total:.1%} (longer than {length + 1:,}), "
        f"without loss {counts.without_loss / total:.1%}, "
        f"middle of a question cut out {counts.cut_questions / total:.1%}; "
        f"stop token {stop} has loss in {counts.with_stop / total:.1%}"
    )


def _check_special_tokens(tokenizer: TextTokenizer, vectors: int) -> None:
    if tokenizer.chat is None:
        raise TextmillError(
            "tokenizer.chat: the tokenizer has no chat template; set tokenizer.chat=default, then run: "
            "textmill fit-tokenizer WHERE --force and textmill tokenize WHERE --force"
        )
    ids = {token: tokenizer.inner.token_to_id(token) for token in tokenizer.chat.tokens}
    if missing := [token for token, id_ in ids.items() if id_ is None or id_ >= vectors]:
        raise TextmillError(
            f"the model has {vectors:,} token vectors and none for {', '.join(missing)}; "
            f"start from a model's weights with model.init_from"
        )
    if tokenizer.inner.token_to_id(tokenizer.chat.stop) != tokenizer.eos_id:
        end = tokenizer.inner.id_to_token(tokenizer.eos_id)
        raise TextmillError(
            f"the stop token of the chat template is {tokenizer.chat.stop}, "
            f"but the tokenizer's end-of-text token is {end}; "
            f"make the tokenizer again with: textmill fit-tokenizer WHERE --force"
        )


def _check_counts(counts: ChatCounts, length: int, tokenizer: TextTokenizer) -> None:
    if not counts.loss_tokens:
        raise TextmillError(
            f"no token has loss: none of {counts.conversations:,} conversations has an assistant's turn that is not "
            f"masked; check the roles in the sources and corpus.chat, then run: textmill tokenize WHERE --force"
        )
    if not counts.with_stop:
        stop = tokenizer.inner.id_to_token(tokenizer.eos_id)
        if counts.truncated:
            raise TextmillError(
                f"train.length: truncating to {length:,} removes every stop token, so the model would never stop; "
                f"raise train.length (the longest has {counts.longest:,} tokens)"
            )
        raise TextmillError(
            f"the stop token {stop} never has loss, so the model would never stop; "
            f"make the tokens again with: textmill tokenize WHERE --force"
        )


def _warn_about_counts(counts: ChatCounts, train: TrainConfig, length: int) -> None:
    if counts.truncated > WARN_TRUNCATED * counts.conversations:
        warn(
            f"{counts.truncated:,} conversations are truncated at their start "
            f"to train.length={length:,}; the longest has {counts.longest:,} tokens"
        )
    if counts.cut_questions:
        warn(
            f"{counts.cut_questions:,} conversations have a question and an answer that together are longer than "
            f"train.length={length:,}: the middle of the question is cut out, then the end of the answer; "
            f"raise train.length"
        )
    if counts.without_loss > WARN_WITHOUT_LOSS * counts.conversations:
        warn(
            f"{counts.without_loss:,} conversations have no loss tokens, so nothing is learned from them; "
            f"look for conversations without an answer, or raise train.length"
        )
    with_loss = counts.conversations - counts.without_loss
    if (without_stop := with_loss - counts.with_stop) > WARN_WITHOUT_LOSS * with_loss:
        warn(
            f"in {without_stop:,} conversations the stop token has no loss, so the model may not learn to stop; "
            f"raise train.length"
        )
