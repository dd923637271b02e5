"""Opens the train, valid and test data of a run: stores written by `tokenize`, or existing ones, split and weighted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.config.tokenizer import FeaturesConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import find_damage, hash_file, hash_json
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.batches.blend import StoreWeight
from textmill.tokens.existing_tokens import (
    Table,
    UsedEntry,
    converted_folder,
    count_rows,
    has_masked_rows,
    input_accounts,
    open_tables,
    split_borders,
    used_entries,
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
    name: str = ""
    """The name of the part of the corpus that it has, if `corpus.sources` names parts."""


@dataclass(frozen=True)
class Splits:
    """The stores of each split, and the tokenizer that their ids belong to."""

    by_split: dict[str, list[WeightedStore]]
    tokenizer: TextTokenizer
    fingerprint: str
    """The fingerprint of all tokens; a run cannot be resumed with another one."""
    manifest: dict[str, Any]
    """The manifest written by `tokenize`; for existing stores only `splits`: the counts of each split, where known."""
    files: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """The files that training reads and that a manifest lists, with their length and checksum there."""

    sources: list[StoreWeight] = field(default_factory=list)
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
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By split what `tokenize` counted; empty for tokens of other tools."""


def open_splits(config: RunConfig, tokenizer: TextTokenizer | None = None) -> Splits:
    """Open the splits of a config and check that they were made with the tokenizer (default: the one of the config)."""
    if config.tokens.use:
        tokenizer = tokenizer or tokenizer_of(config.folder_of("tokenizer"), config.tokenizer, config.train.layout)
        entries = used_entries(config.tokens, config.corpus)
        return _open_used(entries, config.folder_of("tokens"), tokenizer, config.train.layout)
    folder = config.folder_of("tokenizer")
    tokens = config.folder_of("tokens")
    manifest = open_manifest(tokens, "tokenize")
    tokenizer = tokenizer or open_tokenizer(folder)
    source = _open_folder(tokens, tokenizer, folder, config.train.layout == "features")
    stores: dict[str, list[WeightedStore]] = {split: [_weighted_store(source, split, 1.0)] for split in SPLITS}
    weights = config.corpus.weights
    if "sources" not in manifest or source.features:
        if weights:
            problem = "train.layout=features reads rows of all sources" if source.features else f"{tokens} has none"
            raise TextmillError(
                f"corpus.sources: weights need named parts of the tokens; {problem}; remove the weights, or prepare "
                "and tokenize again with --force"
            )
        return Splits(stores, tokenizer, source.fingerprint, manifest, source.files, [(source.fingerprint, 1.0)])
    return _open_named(source, manifest, weights, tokenizer)


def _open_named(
    source: _SplitSource, manifest: dict[str, Any], weights: dict[str, float], tokenizer: TextTokenizer
) -> Splits:
    """The parts of a tokens folder by the names of `corpus.sources`: blended by weight, and measured one by one.

    Without weights the train split is one store: each sample may be of any part.
    """
    if unknown := sorted(weights.keys() ^ manifest["sources"].keys() if weights else ()):
        raise TextmillError(f"corpus.sources: '{unknown[0]}' is not in the tokens; run: textmill run WHERE --force")
    parts: dict[str, list[WeightedStore]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        end = 0
        for name, counts in manifest["sources"].items():
            begin, end = end, end + counts[split]["documents"]
            store = source.stores[split].slice(begin, end)
            parts[split].append(WeightedStore(store, weights.get(name, 1.0), name=name))
        if end != len(source.stores[split]):  # sources without a name are before the others
            parts[split] = [_weighted_store(source, split, 1.0)]
    if not weights:
        parts["train"] = [_weighted_store(source, "train", 1.0)]
        return Splits(parts, tokenizer, source.fingerprint, manifest, source.files, [(source.fingerprint, 1.0)])
    if empty := [part.name for part in parts["train"] if not part.store.tokens]:
        raise TextmillError(f"corpus.sources: '{empty[0]}' has no tokens in the train split; remove it or its weight")
    fingerprints = [(hash_json([source.fingerprint, part.name]), part.weight) for part in parts["train"]]
    # How often each part is read is not known here.
    counts = {split: found for split, found in manifest["splits"].items() if split != "train"}
    fingerprint = hash_json([source.fingerprint, weights])
    return Splits(parts, tokenizer, fingerprint, {**manifest, "splits": counts}, source.files, fingerprints)


def _open_used(entries: list[UsedEntry], folder: Path, tokenizer: TextTokenizer, layout: str) -> Splits:
    """The stores of `tokens.use`; those of `tokens.use_valid` and `tokens.use_test` replace its valid and test
    split."""
    opened = [_open_existing(entry, folder, len(entries), tokenizer, layout) for entry in entries]
    files: dict[Path, dict[str, Any]] = {}
    for source in opened:
        files |= source.files
    pairs = list(zip(entries, opened, strict=True))
    # Evaluation data that `tokens.use` may name too has no rows to train on.
    has_rows = [(entry, source) for entry, source in pairs if not entry.split and source.stores["train"].tokens]
    to_train = has_rows or [(entry, source) for entry, source in pairs if not entry.split]
    by_split = {"train": to_train}
    for split in ("valid", "test"):
        own = [(entry, source) for entry, source in pairs if entry.split == split]
        shared = [(entry, source) for entry, source in pairs if not entry.split]
        by_split[split] = own or shared
    stores = {
        split: [_weighted_store(source, split, entry.weight) for entry, source in chosen]
        for split, chosen in by_split.items()
    }
    # How often each of several stores is read is not known here.
    counts = {split: chosen[0][1].counts.get(split) for split, chosen in by_split.items() if len(chosen) == 1}
    fingerprint = hash_json([[source.fingerprint, entry.weight, entry.split] for entry, source in pairs])
    sources = [(source.fingerprint, entry.weight) for entry, source in to_train]
    return Splits(stores, tokenizer, fingerprint, {"splits": counts}, files, sources)


def _weighted_store(source: _SplitSource, split: str, weight: float) -> WeightedStore:
    return WeightedStore(source.stores[split], weight, source.features[split] if source.features else None)


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
        return _SplitSource(stores, manifest["fingerprint"], files=files, counts=manifest["splits"])
    settings = {name: made_from[f"tokens.features.{name}"] for name in FeaturesConfig.model_fields}
    rule = FeaturesConfig(**settings)
    has_end_token = bool(made_from["tokens.append_end"])
    names = {
        split: sorted(name for name in manifest["files"] if name.startswith(f"features/{split}-")) for split in SPLITS
    }
    tables = {split: _open_table(tuple(folder / name for name in names[split])) for split in SPLITS}
    features: dict[str, FeatureRows] = {split: FeatureRows(tables[split], rule, has_end_token) for split in SPLITS}
    return _SplitSource(stores, manifest["fingerprint"], features, files, manifest["splits"])


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


def _open_existing(entry: UsedEntry, folder: Path, count: int, tokenizer: TextTokenizer, layout: str) -> _SplitSource:
    """Open one of `count` entries; only a Megatron prefix is split here, the others have splits already."""
    path = entry.path
    number = entry.number
    if entry.kind == "folder":
        source = _open_folder(path, tokenizer, "the tokenizer of this run", layout == "features")
        return source if entry.split is None else _as_one_split(source, entry)
    if entry.kind == "prefix":
        store = open_store(store_prefix(path))
        edges = split_borders(entry.fractions, len(store))
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
    is_same_split = made_from[f"split.{number}"] == list(entry.fractions)
    is_same_split &= made_from["corpus.own_splits"] == entry.keep_splits
    if input_accounts([entry], manifest)[0] != converted or not is_same_split:
        raise TextmillError(
            f"{folder}: {path} or its split has changed since it was converted; run: textmill tokenize WHERE --force"
        )
    files = _check_files(folder, manifest)
    where = converted_folder(folder, number, count)
    tables = open_tables(entry) if layout in ("features", "masked") else {}
    if layout == "masked" and not all(map(has_masked_rows, tables.values())):
        tables = {}
    return _SplitSource(
        {split: open_store(where / split) for split in SPLITS},
        hash_json([manifest["fingerprint"], made_from, number]),
        {split: FeatureRows(table) for split, table in tables.items()} or None,
        files,
    )


def _as_one_split(source: _SplitSource, entry: UsedEntry) -> _SplitSource:
    """A folder of textmill all of whose documents belong to one split: it may have only one that is not empty."""
    filled = [split for split in SPLITS if source.stores[split].tokens]
    if len(filled) != 1:
        raise TextmillError(
            f"tokens.use_{entry.split}: {entry.path}: has several splits ({', '.join(filled)}); name one: "
            f"{entry.path / (entry.split or 'valid')}"
        )
    stores = dict(source.stores)
    stores[entry.split or "valid"] = source.stores[filled[0]]
    features = source.features and {split: source.features[filled[0]] for split in SPLITS}
    counts: dict[str, dict[str, int]] = {entry.split or "valid": source.counts[filled[0]]} if source.counts else {}
    return replace(source, stores=stores, features=features, counts=counts)


def _hash_sampled_ids(store: TokenStore) -> str:
    """A hash of evenly spaced ranges of ids: notices a replaced file without reading all of it."""
    starts = np.linspace(0, max(0, store.tokens - SAMPLE_TOKENS), SAMPLE_RANGES, dtype=np.int64).tolist()
    ranges = (store.ids[start : start + SAMPLE_TOKENS].tobytes() for start in starts)
    return hashlib.sha256(b"".join(ranges)).hexdigest()
