"""What a run learns from and is measured on: the stores that `tokenize` made, or existing ones, cut and weighted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from textmill.config import RunConfig
from textmill.config.renamed import rename_settings
from textmill.config.tokens import FeaturesConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import hash_file, hash_json
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.store import TokenStore, open_store, paths_of, prefix_of
from textmill.tokens.token_tables import Table, find_tables, is_dataset, named_files, open_tables, rows_of
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_named, open_tokenizer

STRETCHES, STRETCH = 64, 1 << 15
"""Places of a store that are looked at to know it again, and tokens of each."""


@dataclass(frozen=True)
class Features:
    """Rows of one length that were cut from a store, or that the store was made of."""

    table: Table
    rule: FeaturesConfig | None = None
    """How they were cut; none: a row is a document of the store."""
    closed: bool = False
    """Whether the store's documents end with a token that was not counted in cutting."""


@dataclass(frozen=True)
class Share:
    """One store of a split, and how much of the samples it gives."""

    store: TokenStore
    weight: float
    features: Features | None = None
    """Its rows, where `train.layout` asks for them."""


@dataclass(frozen=True)
class Splits:
    """The stores of each split, and the tokenizer whose ids they hold."""

    stores: dict[str, list[Share]]
    tokenizer: TextTokenizer
    fingerprint: str
    """Of the tokens, however they came; another one is another training."""
    facts: dict[str, Any]
    """The manifest of what `tokenize` made; nothing of existing stores."""

    def shares(self, split: str) -> list[Share]:
        """A split's shares that hold anything."""
        return [share for share in self.stores[split] if share.store.tokens]

    def of(self, split: str) -> list[TokenStore]:
        """A split's stores that hold anything."""
        return [share.store for share in self.shares(split)]


@dataclass(frozen=True)
class _Part:
    """What one existing store, or the stage before, gives to each split."""

    stores: dict[str, TokenStore]
    mark: str
    features: dict[str, Features] | None = None


def open_splits(config: RunConfig, tokenizer: TextTokenizer | None = None) -> Splits:
    """The splits of a config, after checking that tokens and tokenizer, the config's own if none is given, belong together."""
    if config.tokens.use:
        tokenizer = tokenizer or tokenizer_of(config)
        parts = [_used(config, number, tokenizer) for number in range(len(config.tokens.use))]
        weights = [one.weight for one in config.tokens.use]
        mark = hash_json([[part.mark, weight] for part, weight in zip(parts, weights, strict=True)])
        return Splits(_shares(parts, weights), tokenizer, mark, {})
    folder, tokens = config.folder_of("tokenizer"), config.folder_of("tokens")
    facts, tokenizer = open_manifest(tokens), tokenizer or open_tokenizer(folder)
    part = _made(tokens, tokenizer, folder, config.train.layout == "features")
    return Splits(_shares([part], [1.0]), tokenizer, part.mark, facts)


def tokenizer_of(config: RunConfig) -> TextTokenizer:
    """The tokenizer of existing tokens: that of the stage before, or the one that is named."""
    folder = config.folder_of("tokenizer")
    if not (folder / MANIFEST).is_file() and not config.tokenizer.use:
        raise TextmillError(
            "tokenizer.use: nothing is named; tokens.use names existing tokens, so say which tokenizer they were made with"
        )
    named = (
        open_named(config.tokenizer.use, config.tokenizer.end_token, config.tokenizer.lowercase)
        if config.tokenizer.use
        else None
    )
    if named is None:
        return open_tokenizer(folder)
    if (folder / MANIFEST).is_file() and open_manifest(folder)["tokenizer"] != named.fingerprint:
        raise TextmillError(
            f"{folder}: is another tokenizer than tokenizer.use={config.tokenizer.use}; set one of them back"
        )
    return named


def _shares(parts: list[_Part], weights: list[float]) -> dict[str, list[Share]]:
    return {
        split: [
            Share(part.stores[split], weight, part.features[split] if part.features else None)
            for part, weight in zip(parts, weights, strict=True)
        ]
        for split in SPLITS
    }


def _made(folder: Path, tokenizer: TextTokenizer, named: Path | str, rows: bool) -> _Part:
    """A folder that `tokenize` or `merge` made: its splits stand in it, and its rows where it has some."""
    manifest = open_manifest(folder)
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise TextmillError(
            f"{folder}: was made with another tokenizer than {named}; make it anew with: textmill tokenize --force"
        )
    stores: dict[str, TokenStore] = {split: open_store(folder / split) for split in SPLITS}
    made_from = rename_settings(manifest["made_from"])
    if not rows or made_from.get("tokens.kind") != "features":
        return _Part(stores, manifest["fingerprint"])
    features = {name: made_from[f"tokens.features.{name}"] for name in FeaturesConfig.model_fields}
    rule, closed = FeaturesConfig(**features), bool(made_from["tokens.append_end"])
    names = {
        split: sorted(name for name in manifest["files"] if name.startswith(f"features/{split}-")) for split in SPLITS
    }
    tables = {split: _whole(tuple(folder / name for name in names[split])) for split in SPLITS}
    return _Part(stores, manifest["fingerprint"], {split: Features(tables[split], rule, closed) for split in SPLITS})


def _whole(files: tuple[Path, ...]) -> Table:
    return Table(files, 0, sum(map(rows_of, files)))


def kind_of(path: Path) -> Literal["folder", "prefix", "table"]:
    """What existing tokens are: a folder of ours, a prefix of .bin and .idx, or rows of a dataset."""
    if (path / MANIFEST).is_file() and open_manifest(path).get("verb") == "tokenize":
        return "folder"
    if paths_of(prefix_of(path))[0].is_file():
        return "prefix"
    if is_dataset(path) or find_tables(path):
        return "table"
    raise TextmillError(
        f"tokens.use: {path}: no tokens there; name a prefix of .bin and .idx files, a folder that textmill or datasets.save_to_disk made, "
        f"or Parquet files with a column input_ids"
    )


def place_of(config: RunConfig, number: int) -> Path:
    """Where `tokenize` puts the stores of an existing dataset: the tokens folder, or one in it for each of several."""
    folder = config.folder_of("tokens")
    return folder if len(config.tokens.use) == 1 else folder / f"used-{number}"


def _used(config: RunConfig, number: int, tokenizer: TextTokenizer) -> _Part:
    """Existing tokens: a folder of ours as it is split, a Megatron prefix split here, a dataset as it was converted."""
    path, rows = Path(config.tokens.use[number].path), config.train.layout == "features"
    kind = kind_of(path)
    if kind == "folder":
        return _made(path, tokenizer, "the tokenizer of this run", rows)
    if kind == "table":
        return _converted(config, number, path, tokenizer)
    store = open_store(prefix_of(path))
    edges = contiguous(config.corpus.split, len(store))
    parts: dict[str, TokenStore] = {
        split: store.part(edges[number], edges[number + 1]) for number, split in enumerate(SPLITS)
    }
    return _Part(parts, hash_json([hash_file(store.index.path), store.tokens, _sampled(store), edges]))


def _converted(config: RunConfig, number: int, path: Path, tokenizer: TextTokenizer) -> _Part:
    folder = config.folder_of("tokens")
    manifest = open_manifest(folder) if (folder / MANIFEST).is_file() else {}
    if manifest.get("used", {}).get(str(number)) != path.name:
        raise TextmillError(f"tokens.use: {path}: its rows are not converted yet; run: textmill tokenize")
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise TextmillError(f"{folder}: was made for another tokenizer; make it anew with: textmill tokenize --force")
    if not _as_converted(manifest, number, path) or manifest["made_from"]["corpus.split"] != config.corpus.split:
        raise TextmillError(
            f"{folder}: holds other rows than {path} has now, or another split; run: textmill tokenize --force"
        )
    stores: dict[str, TokenStore] = {split: open_store(place_of(config, number) / split) for split in SPLITS}
    mark = hash_json([manifest["fingerprint"], manifest["made_from"], number])
    if config.train.layout != "features":
        return _Part(stores, mark)
    tables = open_tables(path, partial(contiguous, config.corpus.split))
    return _Part(stores, mark, {split: Features(tables[split]) for split in SPLITS})


def _as_converted(manifest: dict[str, Any], number: int, path: Path) -> bool:
    """Whether the files of a dataset are those that were converted; one with another time is read to see."""
    known = {name: account for name, account in manifest["made_from"].items() if name.startswith(f"inputs.{number}/")}
    files = {f"inputs.{number}/{name}": one for name, one in named_files(path).items()}
    return known.keys() == files.keys() and all(
        _same(files[name], known[name], manifest["mtimes"], name) for name in files
    )


def _same(path: Path, account: dict[str, Any], times: dict[str, int], name: str) -> bool:
    state = path.stat()
    if state.st_size != account["bytes"]:
        return False
    return times.get(name.removeprefix("inputs.")) == state.st_mtime_ns or hash_file(path) == account["sha256"]


def _sampled(store: TokenStore) -> str:
    """A hash of stretches all over the ids: a file that was replaced is noticed without reading it all."""
    starts = np.linspace(0, max(0, store.tokens - STRETCH), STRETCHES, dtype=np.int64).tolist()
    return hashlib.sha256(b"".join(store.ids[start : start + STRETCH].tobytes() for start in starts)).hexdigest()


def contiguous(shares: Sequence[float], count: int) -> list[int]:
    """Megatron's split of documents as they stand: borders by rounded shares, what is too much taken off all but the first."""
    total = sum(shares)
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + round(share / total * count))
    return [0, *(edge - (edges[-1] - count) for edge in edges[1:])]
