"""What a run learns from and is measured on: the stores that `tokenize` made, or existing ones, cut and weighted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.files import hash_file, hash_json
from textmill.stages import MANIFEST, open_manifest
from textmill.tokens.store import TokenStore, open_store, prefix_of
from textmill.tokens.tokenizer import TextTokenizer, open_tokenizer


@dataclass(frozen=True)
class Share:
    """One store of a split, and how much of the samples it gives."""

    store: TokenStore
    weight: float


@dataclass(frozen=True)
class Splits:
    """The stores of each split, and the tokenizer whose ids they hold."""

    stores: dict[str, list[Share]]
    tokenizer: TextTokenizer
    fingerprint: str
    """Of the tokens, however they came; another one is another training."""
    facts: dict[str, Any]
    """The manifest of what `tokenize` made; nothing of existing stores."""

    def of(self, split: str) -> list[TokenStore]:
        """A split's stores that hold anything."""
        return [share.store for share in self.stores[split] if share.store.tokens]


def open_splits(config: RunConfig) -> Splits:
    """The splits of a config, after checking that tokens and tokenizer belong together."""
    folder = config.folder_of("tokenizer")
    if config.tokens.use:
        tokenizer = open_tokenizer(folder if (folder / MANIFEST).is_file() or not config.tokenizer.use else Path(config.tokenizer.use))
        parts = [_used(Path(one.path), config.corpus.split, tokenizer) for one in config.tokens.use]
        weights = [one.weight for one in config.tokens.use]
        mark = hash_json([[part[1], weight] for part, weight in zip(parts, weights, strict=True)])
        return Splits(_shares([part for part, _ in parts], weights), tokenizer, mark, {})
    tokens = config.folder_of("tokens")
    facts, tokenizer = open_manifest(tokens), open_tokenizer(folder)
    stores, mark = _made(tokens, tokenizer, folder)
    return Splits(_shares([stores], [1.0]), tokenizer, mark, facts)


def _shares(parts: list[dict[str, TokenStore]], weights: list[float]) -> dict[str, list[Share]]:
    return {split: [Share(part[split], weight) for part, weight in zip(parts, weights, strict=True)] for split in SPLITS}


def _made(folder: Path, tokenizer: TextTokenizer, named: Path) -> tuple[dict[str, TokenStore], str]:
    """A folder that `tokenize` or `merge` made: its splits stand in it."""
    manifest = open_manifest(folder)
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise TextmillError(f"{folder}: was made with another tokenizer than {named}; make it anew with: textmill tokenize --force")
    return {split: open_store(folder / split) for split in SPLITS}, manifest["fingerprint"]


def _used(path: Path, shares: Sequence[float], tokenizer: TextTokenizer) -> tuple[dict[str, TokenStore], str]:
    """An existing store: a folder of ours as it is split, a Megatron prefix split here."""
    if (path / MANIFEST).is_file():
        return _made(path, tokenizer, Path("the tokenizer of this run"))
    store = open_store(prefix_of(path))
    edges = contiguous(shares, len(store))
    parts: dict[str, TokenStore] = {split: store.part(edges[number], edges[number + 1]) for number, split in enumerate(SPLITS)}
    return parts, hash_json([hash_file(store.index.path), store.tokens, edges])


def contiguous(shares: Sequence[float], count: int) -> list[int]:
    """Megatron's split of documents as they stand: borders by rounded shares, what is too much taken off all but the first."""
    total = sum(shares)
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + round(share / total * count))
    return [0, *(edge - (edges[-1] - count) for edge in edges[1:])]
