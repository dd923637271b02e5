"""Token stores of texts that are not part of a run, written to a temporary folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from textmill.tokens.store import TokenStore, dtype_for, open_store
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

BLOCK_CHARACTERS = 1 << 22
"""Characters of texts that are encoded at a time."""


@contextmanager
def temporary_store(texts: Iterable[str], tokenizer: TextTokenizer, *, append_end: bool) -> Iterator[TokenStore]:
    """The tokens of texts, each perhaps followed by an end-of-text token; removed when the block ends."""
    with TemporaryDirectory(prefix="textmill-evaluate-") as folder:
        with StoreWriter(Path(folder) / "text", dtype_for(tokenizer.vocab)) as writer:
            for block in _blocks(texts):
                ends = [tokenizer.end] if append_end else []
                writer.add([[*ids.tolist(), *ends] for ids in tokenizer.encode_many(block)])
        yield open_store(Path(folder) / "text")


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    characters = 0
    for text in texts:
        block.append(text)
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block = []
            characters = 0
    if block:
        yield block
