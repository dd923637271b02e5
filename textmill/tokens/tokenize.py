"""The verb tokenize: every document of the corpus as token ids, in one store a split."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.shards import read_texts, shards_of
from textmill.files import account_of, read_json, remove_folder, shown, write_json
from textmill.progress import progress
from textmill.runners import open_runner
from textmill.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.fitting import fit_tokenizer
from textmill.tokens.store import dtype_for, open_store
from textmill.tokens.tokenizer import TextTokenizer, open_tokenizer
from textmill.tokens.writer import StoreWriter

PARTS = "parts"
COUNTED = ("documents", "tokens", "bytes", "words")


@dataclass(frozen=True)
class Piece:
    """One shard of the corpus and the store that comes of it."""

    split: str
    shard: Path
    prefix: Path
    tokenizer: Path
    append_end: bool


def tokenize(config: RunConfig, force: Force = "no") -> Path:
    """Make the token stores of all splits; return their folder."""
    folder, corpus = config.folder_of("tokens"), config.folder_of("corpus")
    source = open_manifest(corpus)
    if not (config.folder_of("tokenizer") / MANIFEST).is_file():
        print("tokenize: no tokenizer yet; fitting one first")
        fit_tokenizer(config)
    tokenizer = open_manifest(config.folder_of("tokenizer"))
    made_from = {**config.results("tokens"), "corpus": source["fingerprint"], "tokenizer": tokenizer["tokenizer"]}
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.done(force):
        print(f"tokenize: done already: {shown(folder)} ({_spoken(open_manifest(folder)['splits'])})")
        return folder
    with stage.building() as part:
        facts = _encode_all(config, part)
        _join(part, facts, dtype_for(tokenizer["vocab"]))
        files = {f"{split}.{end}": account_of(part / f"{split}.{end}") for split in SPLITS for end in ("bin", "idx")}
        splits: dict[str, dict[str, int]] = {
            split: {name: sum(one[name] for one in facts[split].values()) for name in COUNTED} for split in SPLITS
        }
        shared = {name: tokenizer[name] for name in ("tokenizer", "vocab", "end")}
        remove_folder(part / PARTS)
        stage.finish(part, files, {**shared, "splits": splits})
    print(f"tokenize: {shown(folder)}: {_spoken(splits)}")
    return folder


def _encode_all(config: RunConfig, part: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Encode every shard on the runner; the facts of each, in shard order."""
    corpus = config.folder_of("corpus")
    (part / PARTS).mkdir(exist_ok=True)
    pieces = [
        Piece(split, shard, part / PARTS / shard.stem, config.folder_of("tokenizer"), config.tokens.append_end)
        for split in SPLITS
        for shard in shards_of(corpus, split)
    ]
    facts: dict[str, dict[str, dict[str, int]]] = {split: {} for split in SPLITS}
    total = sum(split["bytes"] for split in read_json(corpus / "account.json")["by_split"].values())
    with progress("tokenize", total=total, unit="bytes") as bar:
        for piece, counts in zip(pieces, open_runner(config.runner).map(encode_piece, pieces), strict=True):
            facts[piece.split][piece.prefix.name] = counts
            bar.advance(counts["bytes"])
    return facts


def encode_piece(piece: Piece) -> dict[str, int]:
    """Encode one shard into its own store; done already, if its facts stand there."""
    done = piece.prefix.with_name(piece.prefix.name + ".json")
    if done.exists():
        found: dict[str, int] = read_json(done)
        return found
    tokenizer = _open(piece.tokenizer)
    counts = dict.fromkeys(COUNTED, 0)
    with StoreWriter(piece.prefix, dtype_for(tokenizer.vocab)) as store:
        for texts in read_texts(piece.shard):
            ending = np.full(int(piece.append_end), tokenizer.end, np.int64)
            rows = [np.concatenate([ids, ending]) for ids in tokenizer.encode_many(texts)]
            store.add(rows)
            counts["documents"] += len(rows)
            counts["tokens"] += sum(map(len, rows))
            counts["bytes"] += sum(len(text.encode()) for text in texts)
            counts["words"] += sum(len(text.split()) for text in texts)
    write_json(done, counts)
    return counts


@lru_cache(maxsize=1)
def _open(folder: Path) -> TextTokenizer:
    # One worker a core already: the library's own threads would only get in each other's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return open_tokenizer(folder)


def _join(part: Path, facts: dict[str, dict[str, dict[str, int]]], dtype: np.dtype[Any]) -> None:
    """Join each split's pieces, in shard order, into one store."""
    for split in SPLITS:
        with StoreWriter(part / split, dtype) as store:
            for name in facts[split]:
                store.add_store(open_store(part / PARTS / name))


def _spoken(splits: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"])
