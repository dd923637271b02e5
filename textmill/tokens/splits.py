"""Opens the train, valid and test data of a run: stores written by `tokenize`, or existing ones, split and weighted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig, TokensConfig
from textmill.config.tokenizer import FeaturesConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import find_damage, hash_file, hash_json
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.batches.blend import Source
from textmill.tokens.existing_tokens import (
    Table,
    converted_folder,
    count_rows,
    existing_kind,
    has_masked_rows,
    input_accounts,
    open_tables,
    split_borders,
    used_path,
)
from textmill.tokens.store import TokenStore, open_store, store_prefix
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer, tokenizer_of

SAMPLE_RANGES = 64
SAMPLE_TOKENS = 1 << 15
"""The fingerprint of a store without a manifest reads this many ranges of ids, with this many tokens each."""

STORE_FILES = (".bin", ".idx", ".mask", ".labels")
"""The files that training reads; others, such as quarantined records, may be left out of a copy."""


@dataclass(frozen=True)
class FeatureRows:
    """Feature rows (rows of one length): cut from a store, or the rows that the store was made from."""

    table: Table
    rule: FeaturesConfig | None = None
    """How they were cut from the documents; None: each row is one document of the store."""
    has_end_token: bool = False
    """Whether the documents of the store end with an end-of-text token that is left out of the rows."""


@dataclass(frozen=True)
class WeightedStore:
    """One store of a split, and its weight in the blend of samples."""

    store: TokenStore
    weight: float
    features: FeatureRows | None = None
    """Its ready-made rows, if `train.layout` uses them."""


@dataclass(frozen=True)
class Splits:
    """The stores of each split, and the tokenizer that their ids belong to."""

    by_split: dict[str, list[WeightedStore]]
    tokenizer: TextTokenizer
    fingerprint: str
    """The fingerprint of all tokens; a run cannot be resumed with another one."""
    manifest: dict[str, Any]
    """The manifest written by `tokenize`; empty for existing stores."""
    files: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """The files that training reads and that a manifest lists, with their length and checksum there."""

    sources: list[Source] = field(default_factory=list)
    """The fingerprint and the weight of each store of the train split."""

    def nonempty(self, split: str) -> list[WeightedStore]:
        """The stores of a split that have tokens, with their weights."""
        return [weighted for weighted in self.by_split[split] if weighted.store.tokens]

    def stores(self, split: str) -> list[TokenStore]:
        """The stores of a split that have tokens."""
        return [weighted.store for weighted in self.nonempty(split)]


@dataclass(frozen=True)
class _SplitSource:
    """The stores of one entry of `tokens.use`, or of the tokens folder, by split."""

    stores: dict[str, TokenStore]
    fingerprint: str
    features: dict[str, FeatureRows] | None = None
    files: dict[Path, dict[str, Any]] = field(default_factory=dict)


def open_splits(config: RunConfig, tokenizer: TextTokenizer | None = None) -> Splits:
    """Open the splits of a config and check that they were made with the tokenizer (default: the one of the config)."""
    if config.tokens.use:
        tokenizer = tokenizer or tokenizer_of(config.folder_of("tokenizer"), config.tokenizer)
        folder = config.folder_of("tokens")
        sources = [
            _open_existing(config.tokens, number, folder, tokenizer, config.corpus.split, config.train.layout)
            for number in range(len(config.tokens.use))
        ]
        weights = [entry.weight for entry in config.tokens.use]
        fingerprints = [(source.fingerprint, weight) for source, weight in zip(sources, weights, strict=True)]
        files: dict[Path, dict[str, Any]] = {}
        for source in sources:
            files |= source.files
        stores = _weighted_stores(sources, weights)
        return Splits(stores, tokenizer, hash_sources(fingerprints), {}, files, fingerprints)
    folder = config.folder_of("tokenizer")
    tokens = config.folder_of("tokens")
    manifest = open_manifest(tokens, "tokenize")
    tokenizer = tokenizer or open_tokenizer(folder)
    source = _open_folder(tokens, tokenizer, folder, config.train.layout == "features")
    stores = _weighted_stores([source], [1.0])
    return Splits(stores, tokenizer, source.fingerprint, manifest, source.files, [(source.fingerprint, 1.0)])


def hash_sources(sources: Sequence[Source]) -> str:
    """The fingerprint of several stores and their weights."""
    return hash_json([list(source) for source in sources])


def _weighted_stores(sources: list[_SplitSource], weights: list[float]) -> dict[str, list[WeightedStore]]:
    by_split: dict[str, list[WeightedStore]] = {split: [] for split in SPLITS}
    for source, weight in zip(sources, weights, strict=True):
        for split in SPLITS:
            features = source.features[split] if source.features else None
            by_split[split].append(WeightedStore(source.stores[split], weight, features))
    return by_split


def _open_folder(folder: Path, tokenizer: TextTokenizer, named: Path | str, with_features: bool) -> _SplitSource:
    """Open a folder written by `tokenize` or `merge`, with its feature rows if requested and present."""
    manifest = open_manifest(folder, "tokenize")
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise TextmillError(
            f"{folder}: was made with another tokenizer than {named}; make it again: textmill tokenize WHERE --force"
        )
    files = _check_files(folder, manifest)
    stores: dict[str, TokenStore] = {split: open_store(folder / split) for split in SPLITS}
    made_from = manifest["made_from"]
    if not with_features or made_from.get("tokens.kind") != "features":
        return _SplitSource(stores, manifest["fingerprint"], files=files)
    settings = {name: made_from[f"tokens.features.{name}"] for name in FeaturesConfig.model_fields}
    rule = FeaturesConfig(**settings)
    has_end_token = bool(made_from["tokens.append_end"])
    names = {
        split: sorted(name for name in manifest["files"] if name.startswith(f"features/{split}-")) for split in SPLITS
    }
    tables = {split: _open_table(tuple(folder / name for name in names[split])) for split in SPLITS}
    features: dict[str, FeatureRows] = {split: FeatureRows(tables[split], rule, has_end_token) for split in SPLITS}
    return _SplitSource(stores, manifest["fingerprint"], features, files)


def _check_files(folder: Path, manifest: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Compare the fingerprint and the length of every file with the manifest; return the files for a full check."""
    listed: dict[str, dict[str, Any]] = manifest["files"]
    files = {
        name: entry for name, entry in listed.items() if name.endswith(STORE_FILES) or name.startswith("features/")
    }
    damage = find_damage(folder, files, deep=False)
    if manifest["fingerprint"] != hash_json({name: entry["sha256"] for name, entry in listed.items()}):
        damage.insert(0, f"{MANIFEST} does not match its own fingerprint")
    if damage:
        raise TextmillError(
            f"{folder}: {damage[0]}; put the file back, or make it again with: textmill tokenize WHERE --force"
        )
    return {folder / name: entry for name, entry in files.items()}


def _open_table(files: tuple[Path, ...]) -> Table:
    return Table(files, 0, sum(map(count_rows, files)))


def _open_existing(
    tokens: TokensConfig, number: int, folder: Path, tokenizer: TextTokenizer, fractions: Sequence[float], layout: str
) -> _SplitSource:
    """Open one entry of `tokens.use`; only a Megatron prefix is split here, the others have splits already."""
    path = used_path(tokens.use[number].path)
    kind = existing_kind(path)
    if kind == "folder":
        return _open_folder(path, tokenizer, "the tokenizer of this run", layout == "features")
    if kind == "prefix":
        store = open_store(store_prefix(path))
        edges = split_borders(fractions, len(store))
        stores: dict[str, TokenStore] = {}
        for place, split in enumerate(SPLITS):
            stores[split] = store.slice(edges[place], edges[place + 1])
        fingerprint = hash_json([hash_file(store.index.path), store.tokens, _hash_sampled_ids(store), edges])
        return _SplitSource(stores, fingerprint)
    manifest = open_manifest(folder) if (folder / MANIFEST).is_file() else {}
    if manifest.get("used", {}).get(str(number)) != path.name:
        raise TextmillError(
            f"tokens.use: {path}: its rows are not converted to a token store yet; run: textmill tokenize"
        )
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise TextmillError(
            f"{folder}: was made with another tokenizer; make it again: textmill tokenize WHERE --force"
        )
    made_from = manifest["made_from"]
    converted = {name: account for name, account in made_from.items() if name.startswith(f"inputs.{number}/")}
    if input_accounts({number: path}, manifest)[0] != converted or made_from["corpus.split"] != fractions:
        raise TextmillError(
            f"{folder}: {path} or corpus.split has changed since it was converted; run: textmill tokenize WHERE --force"
        )
    files = _check_files(folder, manifest)
    where = converted_folder(folder, number, len(tokens.use))
    tables = open_tables(path, fractions) if layout in ("features", "masked") else {}
    if layout == "masked" and not all(map(has_masked_rows, tables.values())):
        tables = {}
    return _SplitSource(
        {split: open_store(where / split) for split in SPLITS},
        hash_json([manifest["fingerprint"], made_from, number]),
        {split: FeatureRows(table) for split, table in tables.items()} or None,
        files,
    )


def _hash_sampled_ids(store: TokenStore) -> str:
    """A hash of evenly spaced ranges of ids: notices a replaced file without reading all of it."""
    starts = np.linspace(0, max(0, store.tokens - SAMPLE_TOKENS), SAMPLE_RANGES, dtype=np.int64).tolist()
    ranges = (store.ids[start : start + SAMPLE_TOKENS].tobytes() for start in starts)
    return hashlib.sha256(b"".join(ranges)).hexdigest()
