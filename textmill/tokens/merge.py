"""The command merge: joins several token stores into one, in the given order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import create_folder, format_path, manifest_entry, write_bytes
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.encoding import format_counts
from textmill.tokens.lineage import lineage_path, new_lineage
from textmill.tokens.store import StoreWriter, TokenStore, loss_mask_path, open_store, store_paths, store_prefix

SAME_ENTRIES = ("tokenizer", "vocab", "eos_id")
"""Manifest entries that stores must have in common to be joined."""
SAME_SETTINGS = ("tokens.level", "tokens.append_end", "tokens.prepend_begin")
"""Settings that all stores must have been made with."""
QUARANTINE = "quarantine.jsonl"


def merge(out: str, parts: list[str], force: Force = "no") -> Path:
    """Join folders written by `tokenize`, split by split, or prefixes of .bin and .idx; return its path."""
    folders = [Path(part) for part in parts if (Path(part) / MANIFEST).is_file()]
    if len(parts) < 2:
        raise TextmillError(f"merge: needs at least two stores, found {len(parts)}; run: textmill merge OUT A B ...")
    if not folders:
        return _merge_prefixes(store_prefix(Path(out)), [store_prefix(Path(part)) for part in parts], force)
    if len(folders) != len(parts):
        bare = next(part for part in parts if Path(part) not in folders)
        raise TextmillError(
            f"{bare}: not a folder written by 'textmill tokenize', but others are; join only folders or only prefixes"
        )
    return _merge_folders(Path(out), folders, force)


def _merge_prefixes(out: Path, parts: list[Path], force: Force) -> Path:
    stores = [open_store(part) for part in parts]
    if store_paths(out)[0].exists() and force == "no":
        raise TextmillError(f"{store_paths(out)[0]}: already exists; give another name, or replace it with --force")
    create_folder(out.parent, "OUT")
    _join(out, stores)
    joined = open_store(out)
    print(f"merge: {format_path(out)}: {len(joined):,} documents, {joined.tokens:,} tokens from {len(stores)} stores")
    return out


def _merge_folders(out: Path, parts: list[Path], force: Force) -> Path:
    manifests = [open_manifest(part, "tokenize") for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        if problem := _find_problem(part, manifest, parts[0], manifests[0]):
            raise TextmillError(f"{part}: {problem}")
    made_from = {f"part {number}": manifest["fingerprint"] for number, manifest in enumerate(manifests)}
    # The result can be used like the output of tokenize, so it gets the config of its first part.
    stage = Stage("tokenize", out, {"merged": made_from}, (parts[0] / "run.yaml").read_text(encoding="utf-8"))
    if stage.is_done(force):
        print(f"merge: done already: {format_path(out)}")
        return out
    counts = {split: [manifest["splits"][split] for manifest in manifests] for split in SPLITS}
    splits: dict[str, dict[str, int]] = {split: _sum_counts(counts[split]) for split in SPLITS}
    with stage.unfinished_folder() as unfinished:
        files: dict[str, dict[str, Any]] = {}
        for split in SPLITS:
            files |= _join_split(unfinished / split, [part / split for part in parts])
        files[QUARANTINE] = _join_quarantines(unfinished / QUARANTINE, parts)
        same = {name: manifests[0][name] for name in SAME_ENTRIES}
        stage.write_manifest(unfinished, files, {**same, "splits": splits})
    print(f"merge: {format_path(out)}: {format_counts(splits)}")
    return out


def _find_problem(part: Path, manifest: dict[str, Any], first: Path, first_manifest: dict[str, Any]) -> str:
    """Why a folder cannot be joined with the first one; empty if it can."""
    for name in SAME_ENTRIES:
        if manifest.get(name) != first_manifest.get(name):
            return f"{name} differs from {first}; only stores of the same tokenizer can be joined"
    for name in SAME_SETTINGS:
        if manifest["made_from"].get(name) != first_manifest["made_from"].get(name):
            return f"{name} differs from {first}; only stores made with the same settings can be joined"
    for split in SPLITS:
        if not (part / f"{split}.idx").is_file():
            return f"has no store for the split {split}; name the folders inside it that have one"
    if manifest["made_from"].get("tokens.kind") == "features":
        return "contains feature rows, which cannot be joined; join folders made without tokens.kind=features"
    if "labels" in manifest:
        return "contains examples with labels, which cannot be joined; name all their files in corpus.sources"
    return ""


def _join_split(out: Path, parts: list[Path]) -> dict[str, dict[str, Any]]:
    """Join the stores of one split; return the manifest entries of the written files. All are prefixes of stores."""
    _join(out, [open_store(part) for part in parts])
    lineage = _join_lineages(out, parts)
    written = (*reversed(store_paths(out)), *lineage, loss_mask_path(out))
    return {path.name: manifest_entry(path) for path in written if path.is_file()}


def _join_quarantines(out: Path, parts: list[Path]) -> dict[str, Any]:
    """Join the files of records that could not be used; return the manifest entry."""
    paths = [part / QUARANTINE for part in parts if (part / QUARANTINE).is_file()]
    return write_bytes(out, (line for path in paths for line in path.read_bytes().splitlines(keepends=True)))


def _sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    """Add up the counts that all stores have; some stores have no counts of bytes and words."""
    return {name: sum(one[name] for one in counts) for name in counts[0] if all(name in one for one in counts)}


def _join_lineages(prefix: Path, parts: list[Path]) -> list[Path]:
    """Write the joined lineage if every part has one; return the written files."""
    paths = [lineage_path(part) for part in parts]
    if not all(path.is_file() for path in paths):
        return []
    with new_lineage(lineage_path(prefix)) as lineage:
        for path in paths:
            lineage.add_file(path)
    return [lineage_path(prefix)]


def _join(prefix: Path, stores: list[TokenStore]) -> None:
    with (
        progress("merge", total=sum(store.tokens for store in stores), unit="tokens") as bar,
        StoreWriter(prefix, stores[0].ids.dtype, has_loss_mask=stores[0].loss_mask is not None) as out,
    ):
        for store in stores:
            out.add_store(store)
            bar.advance(store.tokens)
