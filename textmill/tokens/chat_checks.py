"""Before the first step of a chat run: what is asked, what is cut, whether the stop token is learned; what cannot work is refused here."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from textmill.config import TrainConfig
from textmill.errors import TextmillError, warn
from textmill.tokens.splits import Splits
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

BLOCK = 1 << 13
"""Conversations that are looked at together."""
SHOWN, CHARACTERS = 3, 600
ASKED, UNASKED, CUT = "asked", "not asked", "cut"
STYLES = {ASKED: "bold green", UNASKED: "dim", CUT: "red strike"}
MARKS = {ASKED: ("{+", "+}"), UNASKED: ("", ""), CUT: ("[-", "-]")}
MANY, SOME = 0.1, 0.01
"""Shares above which cut conversations, and those that ask nothing, are warned of."""

Piece = tuple[str, str]
"""Whether it is asked, not asked or cut; and its text."""


@dataclass(frozen=True)
class Facts:
    """What conversations are when they are laid out, summed over some of them."""

    conversations: int = 0
    tokens: int = 0
    asked: int = 0
    """Tokens that bear loss, before anything is cut."""
    left: int = 0
    """Those of them that are left after cutting."""
    cut: int = 0
    """Conversations longer than a sample."""
    over_long: int = 0
    """Conversations whose answers alone do not fit."""
    silent: int = 0
    """Conversations of which nothing is asked."""
    answering: int = 0
    """Conversations with an answer before cutting."""
    stopping: int = 0
    """Conversations in which the stop token is asked."""
    longest: int = 0

    def __add__(self, other: Facts) -> Facts:
        sums = Facts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))
        return replace(sums, longest=max(self.longest, other.longest))


def preflight(train: TrainConfig, data: Splits, length: int, vectors: int) -> None:
    """Show three conversations, say what share is asked and cut, and refuse what would be found out days later; plain text passes."""
    stores = data.of("train")
    if not data.of("valid"):
        warn(
            "there is no valid split, so nothing will tell when to stop or which step is best; give it a share in corpus.split"
        )
    if train.layout != "chat":
        if any(store.asked is not None for store in stores):
            warn(
                f"the tokens are conversations, and train.layout={train.layout} asks every token, questions too; set train.layout=chat"
            )
        return
    tokenizer = data.tokenizer
    _check_tokens(tokenizer, vectors)
    facts = sum((measure(store, length, train.chat.truncate, tokenizer.end) for store in stores), Facts())
    for store in stores[:1]:
        for number, pieces in enumerate(samples_of(store, tokenizer, length, train.chat.truncate), 1):
            show(f"sample {number}", pieces)
    print(_spoken(facts, length, tokenizer), flush=True)
    _refuse(facts, train, length, tokenizer)
    _warn(facts, train, length)
    _check_apart(stores, data.of("valid"))


def measure(store: TokenStore, length: int, cut: str, stop: int) -> Facts:
    """The facts of a store's conversations in samples of `length`."""
    facts = Facts()
    for begin in range(0, len(store) if store.asked is not None else 0, BLOCK):
        edges = store.borders(np.arange(begin, min(begin + BLOCK, len(store)) + 1, dtype=np.int64))
        asked = np.asarray(store.asked[edges[0] : edges[-1]]) > 0 if store.asked is not None else np.zeros(0, np.bool_)
        stops = asked & (np.asarray(store.ids[edges[0] : edges[-1]]) == stop)
        before, stops_before = (np.concatenate([[0], np.cumsum(one)]) for one in (asked, stops))
        firsts, lasts = edges[:-1] - edges[0], edges[1:] - edges[0]
        first, last = kept_of(firsts, lasts, length, cut)
        whole, left = before[lasts] - before[firsts], before[last] - before[first]
        sizes = lasts - firsts
        facts += Facts(
            len(sizes), int(sizes.sum()), int(whole.sum()), int(left.sum()), int((sizes > length + 1).sum()), int((whole > length).sum()),
            int((left == 0).sum()), int((whole > 0).sum()), int((stops_before[last] > stops_before[first]).sum()), int(sizes.max()),
        )  # fmt: skip
    return facts


def kept_of(
    firsts: NDArray[np.int64], lasts: NDArray[np.int64], length: int, cut: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """The tokens of each conversation that a sample can ask: all but its first, or what cutting leaves of them."""
    if cut == "start":
        return np.maximum(firsts + 1, lasts - length), lasts
    return np.minimum(firsts + 1, lasts), np.minimum(lasts, firsts + 1 + length)


def samples_of(store: TokenStore, tokenizer: TextTokenizer, length: int, cut: str) -> Iterator[list[Piece]]:
    """A few conversations in pieces; the last is one that is cut, where there is such."""
    places = list(dict.fromkeys(len(store) * number // SHOWN for number in range(SHOWN)))
    if len(long := np.flatnonzero(store.sizes() > length + 1)) and not set(places) & set(long.tolist()):
        places[-1] = int(long[0])
    for place in places if len(store) and store.asked is not None else []:
        begin, end = store.borders(np.array([place, place + 1])).tolist()
        first, last = (int(edge[0]) for edge in kept_of(np.array([begin]), np.array([end]), length, cut))
        ids, asked = store.ids[begin:end].tolist(), store.asked[begin:end].tolist() if store.asked is not None else []
        kinds = [
            CUT if not first - 1 <= begin + at < last else ASKED if mark else UNASKED for at, mark in enumerate(asked)
        ]
        runs = groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0])
        yield [(kind, tokenizer.decode(id_ for _, id_ in run)) for kind, run in runs]


def show(name: str, pieces: list[Piece]) -> None:
    """One conversation, coloured on a terminal, marked elsewhere: {+asked+}, [-cut-]."""
    short = [(kind, _shortened(text.replace("\n", "\\n"))) for kind, text in pieces]
    if not sys.stdout.isatty():
        print(f"{name}: {''.join(text.join(MARKS[kind]) for kind, text in short)}")
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(
        Text.assemble(f"{name}: ", *((text, STYLES[kind]) for kind, text in short)), soft_wrap=True
    )


def _shortened(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS // 2]} ... {text[-CHARACTERS // 2 :]}"


def _spoken(facts: Facts, length: int, tokenizer: TextTokenizer) -> str:
    count = max(1, facts.conversations)
    stop = tokenizer.inner.id_to_token(tokenizer.end)
    return (
        f"chat: {facts.conversations:,} conversations, {facts.tokens:,} tokens, {facts.left / max(1, facts.tokens):.1%} asked; "
        f"truncated {facts.cut / count:.1%} (longer than {length + 1:,}), unsupervised {facts.silent / count:.1%}, "
        f"over-long {facts.over_long / count:.1%} (answers alone do not fit); stop token {stop} asked in {facts.stopping / count:.1%}"
    )


def _check_tokens(tokenizer: TextTokenizer, vectors: int) -> None:
    if tokenizer.chat is None:
        raise TextmillError(
            "tokenizer.chat: the tokenizer has no chat template; set tokenizer.chat=default and make tokenizer and tokens anew"
        )
    ids = {token: tokenizer.inner.token_to_id(token) for token in tokenizer.chat.tokens}
    if bare := [token for token, id_ in ids.items() if id_ is None or id_ >= vectors]:
        raise TextmillError(
            f"the model has {vectors:,} vectors and none for {', '.join(bare)}; start from weights with model.init_from"
        )
    if tokenizer.inner.token_to_id(tokenizer.chat.stop) != tokenizer.end:
        end = tokenizer.inner.id_to_token(tokenizer.end)
        raise TextmillError(
            f"the chat template stops with {tokenizer.chat.stop}, the tokenizer ends with {end}; make the tokenizer anew"
        )


def _refuse(facts: Facts, train: TrainConfig, length: int, tokenizer: TextTokenizer) -> None:
    if not facts.asked:
        raise TextmillError(
            f"nothing is asked: none of {facts.conversations:,} conversations has a turn of the assistant, or all of it is masked; "
            f"look at the roles in the sources and at corpus.chat, and make the tokens anew"
        )
    mend = f"raise train.length (the longest has {facts.longest:,} tokens)" + (
        "" if train.chat.truncate == "start" else ", or set train.chat.truncate=start"
    )
    if not facts.left:
        raise TextmillError(f"train.length: cutting to {length:,} removes every answer, so nothing is asked; {mend}")
    if not facts.stopping:
        stop = tokenizer.inner.id_to_token(tokenizer.end)
        if facts.cut:
            raise TextmillError(
                f"train.length: cutting to {length:,} removes every stop token, so the model would never stop; {mend}"
            )
        raise TextmillError(
            f"the stop token {stop} is never asked, so the model would never stop; make the tokens anew with: textmill tokenize --force"
        )


def _warn(facts: Facts, train: TrainConfig, length: int) -> None:
    if facts.cut > MANY * facts.conversations:
        warn(
            f"{facts.cut:,} conversations lose their {train.chat.truncate} to train.length={length:,}; the longest has {facts.longest:,} tokens"
        )
    if facts.silent > SOME * facts.conversations:
        warn(
            f"{facts.silent:,} conversations ask nothing and teach nothing; look for turns without an answer, or raise train.length"
        )
    if (endless := facts.answering - facts.stopping) > SOME * facts.answering:
        warn(
            f"in {endless:,} conversations the stop token is not asked, so the model may not learn to stop; raise train.length"
        )


def _check_apart(train: list[TokenStore], valid: list[TokenStore]) -> None:
    """A valid split that was trained on measures memory; half of it is no accident."""
    digests = {digest for store in valid for digest in _digests(store)}
    if not digests:
        return
    both = len({digest for store in train for digest in _digests(store) if digest in digests})
    if 2 * both >= len(digests):
        raise TextmillError(
            f"{both:,} of {len(digests):,} valid conversations are in train too, so the valid loss would mean nothing; "
            f"set corpus.dedup=exact, and take copies out of corpus.source_splits and tokens.use"
        )
    if both:
        warn(
            f"{both:,} of {len(digests):,} valid conversations are in train too; set corpus.dedup=exact to keep them apart"
        )


def _digests(store: TokenStore) -> Iterator[bytes]:
    for begin in range(0, len(store), BLOCK):
        edges = store.borders(np.arange(begin, min(begin + BLOCK, len(store)) + 1, dtype=np.int64))
        ids = np.ascontiguousarray(store.ids[edges[0] : edges[-1]]).astype(np.int32)
        edges = edges - edges[0]
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield hashlib.blake2b(ids[first:last].data, digest_size=16).digest()
