"""The command merge: several token stores joined into one, in the order given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import create_folder, format_path, manifest_entry, write_bytes
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.lineage import LineageWriter, lineage_path
from textmill.tokens.store import TokenStore, mask_path, open_store, paths_of, prefix_of
from textmill.tokens.store_writer import StoreWriter

SHARED = ("tokenizer", "vocab", "end")
"""What stores must have in common to be one."""
ALIKE = ("tokens.level", "tokens.append_end", "tokens.prepend_begin")
"""How they must have been made."""
BAD = "quarantine.jsonl"


def merge(out: str, parts: list[str], force: Force = "no") -> Path:
    """Join folders that `tokenize` made, split by split, or bare .bin/.idx prefixes; return what was made."""
    folders = [Path(part) for part in parts if (Path(part) / MANIFEST).is_file()]
    if len(parts) < 2:
        raise TextmillError(f"merge: found {len(parts)} store to join; say: textmill merge OUT A B ...")
    if not folders:
        return _merge_prefixes(prefix_of(Path(out)), [prefix_of(Path(part)) for part in parts], force)
    if len(folders) != len(parts):
        bare = next(part for part in parts if Path(part) not in folders)
        raise TextmillError(f"{bare}: is no folder that 'textmill tokenize' made, and others are; join like with like")
    return _merge_folders(Path(out), folders, force)


def _merge_prefixes(out: Path, parts: list[Path], force: Force) -> Path:
    stores = [open_store(part) for part in parts]
    if paths_of(out)[0].exists() and force == "no":
        raise TextmillError(f"{paths_of(out)[0]}: stands there already; name another, or make it anew with --force")
    create_folder(out.parent, "OUT")
    _join(out, stores)
    made = open_store(out)
    print(f"merge: {format_path(out)}: {len(made):,} documents, {made.tokens:,} tokens of {len(stores)} stores")
    return out


def _merge_folders(out: Path, parts: list[Path], force: Force) -> Path:
    manifests = [open_manifest(part) for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        if differs := [name for name in SHARED if manifest.get(name) != manifests[0].get(name)]:
            raise TextmillError(
                f"{part}: has another {differs[0]} than {parts[0]}; only stores of one tokenizer can be joined"
            )
        if differs := [
            name for name in ALIKE if manifest["made_from"].get(name) != manifests[0]["made_from"].get(name)
        ]:
            raise TextmillError(
                f"{part}: has another {differs[0]} than {parts[0]}; only stores made alike can be joined"
            )
        if missing := [split for split in SPLITS if not (part / f"{split}.idx").is_file()]:
            raise TextmillError(f"{part}: has no store of its {missing[0]} split; name the folders inside it that have")
        if manifest["made_from"].get("tokens.kind") == "features":
            raise TextmillError(
                f"{part}: holds rows, which are not joined; join folders made without tokens.kind=features"
            )
    made_from = {f"part {number}": manifest["fingerprint"] for number, manifest in enumerate(manifests)}
    # The joined store is a stage of the same chain, so it knows the config that its first part came from.
    stage = Stage("tokenize", out, {"merged": made_from}, (parts[0] / "run.yaml").read_text(encoding="utf-8"))
    if stage.is_done(force):
        print(f"merge: done already: {format_path(out)}")
        return out
    with stage.unfinished_folder() as part:
        files: dict[str, dict[str, Any]] = {}
        for split in SPLITS:
            _join(part / split, [open_store(folder / split) for folder in parts])
            lineage = _join_lineages(part / split, [folder / split for folder in parts])
            made = (*reversed(paths_of(part / split)), *lineage, mask_path(part / split))
            files |= {path.name: manifest_entry(path) for path in made if path.is_file()}
        lines = (
            line
            for folder in parts
            if (folder / BAD).is_file()
            for line in (folder / BAD).read_bytes().splitlines(keepends=True)
        )
        files[BAD] = write_bytes(part / BAD, lines)
        splits = {split: _summed([manifest["splits"][split] for manifest in manifests]) for split in SPLITS}
        stage.write_manifest(part, files, {**{name: manifests[0][name] for name in SHARED}, "splits": splits})
    spoken = ", ".join(f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items())
    print(f"merge: {format_path(out)}: {spoken}")
    return out


def _summed(counts: list[dict[str, int]]) -> dict[str, int]:
    """The sums of what all have counted; bytes and words are not known of every store."""
    return {name: sum(one[name] for one in counts) for name in counts[0] if all(name in one for one in counts)}


def _join_lineages(prefix: Path, parts: list[Path]) -> list[Path]:
    """The joined lineage, where every part has one."""
    paths = [lineage_path(part) for part in parts]
    if not all(path.is_file() for path in paths):
        return []
    with LineageWriter(lineage_path(prefix)) as lineage:
        for path in paths:
            lineage.add_file(path)
    return [lineage_path(prefix)]


def _join(prefix: Path, stores: list[TokenStore]) -> None:
    with (
        progress("merge", total=sum(store.tokens for store in stores), unit="tokens") as bar,
        StoreWriter(prefix, stores[0].ids.dtype, masked=stores[0].asked is not None) as out,
    ):
        for store in stores:
            out.add_store(store)
            bar.advance(store.tokens)
