"""Prints token stores for people to read: sizes, lengths, frequent tokens, and documents split into their tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from textmill.commands.show.bars import print_bars
from textmill.config import RunConfig
from textmill.counters import uniform_from
from textmill.storage.files import format_path
from textmill.tokens.batches.masking import count_tokens, write_token_counts
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.store import BLOCK, TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

MAX_COUNTED = 20_000_000
"""At most this many tokens are counted to find the frequent ones."""
FREQUENT = 20
SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 80


def show_tokens(config: RunConfig) -> None:
    """Print the token stores of a config."""
    splits = open_splits(config)
    train = splits.stores("train")
    dtype = train[0].ids.dtype if train else "no train split"
    print(f"{format_path(config.folder_of('tokens'))}: {splits.tokenizer.vocab:,} vocabulary entries, {dtype}")
    for split in splits.by_split:
        stores = splits.stores(split)
        documents = sum(map(len, stores))
        tokens = sum(store.tokens for store in stores)
        print(f"  {split:<6} {documents:>12,} documents {tokens:>16,} tokens {_bytes_per_token(splits, split, tokens)}")
    print_bars("tokens per document", _lengths([store for split in splits.by_split for store in splits.stores(split)]))
    if not train:
        return
    counted = min(MAX_COUNTED, sum(store.tokens for store in train))
    print_bars(f"most frequent of {counted:,} train tokens", _frequent(train, splits.tokenizer), max_rows=FREQUENT + 1)
    print("\na few documents, token by token")
    for number in range(min(SHOWN_DOCUMENTS, len(train[0]))):
        _show_document(train[0], int(uniform_from(config.train.seed, number) * len(train[0])), splits.tokenizer)


def save_token_counts(config: RunConfig, path: Path) -> None:
    """Write how often each token occurs in the train split."""
    splits = open_splits(config)
    counts = count_tokens(splits.stores("train"), splits.tokenizer.vocab)
    write_token_counts(path, counts, splits.tokenizer.fingerprint)
    seen = int((counts > 0).sum())
    total = int(counts.sum())
    print(f"{format_path(path)}: {total:,} train tokens; {seen:,} of {len(counts):,} vocabulary entries occur")


def _bytes_per_token(splits: Splits, split: str, tokens: int) -> str:
    counts = splits.manifest.get("splits", {}).get(split)
    return f"{counts['bytes'] / tokens:>6.2f} bytes per token" if counts and tokens else ""


def _lengths(stores: list[TokenStore]) -> dict[str, int]:
    """Documents by their number of tokens, in powers of four."""
    counts = np.zeros(32, np.int64)
    for store in stores:
        for start in range(0, len(store), BLOCK):
            places = np.arange(start, min(start + BLOCK, len(store)) + 1, dtype=np.int64)
            sizes = np.maximum(np.diff(store.document_starts(places)), 1)
            counts += np.bincount((np.log2(sizes) // 2).astype(int), minlength=32)
    filled = np.flatnonzero(counts)
    powers = range(int(filled[0]), int(filled[-1]) + 1) if len(filled) else range(0)
    return {f"{4**power:,} to {4 ** (power + 1) - 1:,}": int(counts[power]) for power in powers}


def _frequent(stores: list[TokenStore], tokenizer: TextTokenizer) -> dict[str, int]:
    """The most frequent tokens, and all others together."""
    counts = count_tokens(stores, tokenizer.vocab, MAX_COUNTED)
    top = np.argsort(-counts, kind="stable")[:FREQUENT].tolist()
    named = {f"{token:>6} {_name(token, tokenizer)}": int(counts[token]) for token in top if counts[token]}
    return {**named, "all others": int(counts.sum()) - sum(named.values())}


def _name(token: int, tokenizer: TextTokenizer) -> str:
    """A token's text, or its vocabulary entry if it is part of a character."""
    text = tokenizer.decode([token])
    return repr(text) if "\ufffd" not in text else str(tokenizer.inner.id_to_token(token))


def _show_document(store: TokenStore, number: int, tokenizer: TextTokenizer) -> None:
    begin, end = store.document_starts(np.array([number, number + 1])).tolist()
    ids = np.asarray(store.ids[begin : min(end, begin + SHOWN_TOKENS)]).tolist()
    print(f"--- document {number:,}, {end - begin:,} tokens")
    texts = list(token_texts(ids, tokenizer))
    if not sys.stdout.isatty():
        print("|".join(texts))
        return
    from rich.console import Console
    from rich.text import Text

    styles = ("black on bright_cyan", "black on bright_yellow")
    Console(highlight=False).print(
        Text.assemble(*((text, styles[number % 2]) for number, text in enumerate(texts))), soft_wrap=True
    )


def token_texts(ids: list[int], tokenizer: TextTokenizer) -> Iterator[str]:
    """The text of each token; tokens that share a character are joined."""
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd") or len(waiting) > 8:
            yield text
            waiting = []
    if waiting:
        yield tokenizer.decode(waiting)
