"""The command tokenize where `tokens.use` names existing tokens: stores are left as they stand, rows of datasets become stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.runners import open_runner
from textmill.storage.files import format_path, hash_file, manifest_entry, read_json
from textmill.storage.progress import progress
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.batches.layout import check_ids
from textmill.tokens.splits import contiguous, kind_of, place_of, tokenizer_of
from textmill.tokens.store import dtype_for, open_store, paths_of
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.token_tables import IDS, MASK, Table, named_files, open_tables, unpadded


@dataclass(frozen=True)
class Piece:
    """A split of a dataset, and the store that comes of it."""

    table: Table
    prefix: Path
    vocab: int


def tokenize_used(config: RunConfig, force: Force = "no") -> Path:
    """Convert the datasets among `tokens.use` into stores; return the tokens folder."""
    folder = config.folder_of("tokens")
    if config.tokens.kind == "features":
        raise TextmillError(
            "tokens.kind=features: rows are cut from a corpus, and tokens.use names existing tokens; take one of the two out"
        )
    tables = {
        number: Path(one.path) for number, one in enumerate(config.tokens.use) if kind_of(Path(one.path)) == "table"
    }
    if not tables:
        print("tokenize: nothing to do: tokens.use names token stores, and they are read where they stand")
        return folder
    tokenizer = tokenizer_of(config)
    inputs = {f"{number}/{name}": path for number, where in tables.items() for name, path in named_files(where).items()}
    accounts, mtimes = _look_at(inputs, folder)
    made_from = {"corpus.split": config.corpus.split, "tokenizer": tokenizer.fingerprint, **accounts}
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({_spoken(open_manifest(folder)['splits'])})")
        return folder
    with stage.unfinished_folder() as part:
        places = {number: part / place_of(config, number).relative_to(folder) for number in tables}
        splits = _convert(config, tables, places, tokenizer.vocab)
        pairs = [place / f"{split}.{end}" for place in places.values() for split in SPLITS for end in ("bin", "idx")]
        files = {path.relative_to(part).as_posix(): manifest_entry(path) for path in pairs}
        shared = {"tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab, "end": tokenizer.end, "mtimes": mtimes}
        stage.write_manifest(
            part,
            files,
            {**shared, "used": {str(number): path.name for number, path in tables.items()}, "splits": splits},
        )
    print(f"tokenize: {format_path(folder)}: {_spoken(splits)}")
    return folder


def _look_at(inputs: dict[str, Path], folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Length and checksum, and time, of each file; one with the recorded length and time is not read again."""
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    known, times = manifest.get("made_from", {}), manifest.get("mtimes", {})
    accounts, mtimes = {}, {}
    for name, path in inputs.items():
        if not path.is_file():
            raise TextmillError(f"{path}: no such file, and the dataset that it is of names it")
        state, before = path.stat(), known.get(f"inputs.{name}", {})
        same = before.get("bytes") == state.st_size and times.get(name) == state.st_mtime_ns
        accounts[f"inputs.{name}"] = before if same else {"bytes": state.st_size, "sha256": hash_file(path)}
        mtimes[name] = state.st_mtime_ns
    return accounts, mtimes


def _convert(
    config: RunConfig, tables: dict[int, Path], places: dict[int, Path], vocab: int
) -> dict[str, dict[str, int]]:
    """Every split of every dataset on the runner; the counts of each split, over all datasets."""
    edges_of = partial(contiguous, config.corpus.split)
    pieces: list[tuple[str, Piece]] = []
    for number, where in tables.items():
        places[number].mkdir(exist_ok=True)
        for left in places[number].glob("*.tmp-*"):  # half written by a run that was killed
            left.unlink()
        opened = open_tables(where, edges_of)
        pieces += [(split, Piece(opened[split], places[number] / split, vocab)) for split in SPLITS]
    splits: dict[str, dict[str, int]] = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
    with progress("tokenize", total=sum(piece.table.count for _, piece in pieces), unit="rows") as bar:
        found = open_runner(config.runner).map(convert_piece, [piece for _, piece in pieces])
        for (split, piece), counts in zip(pieces, found, strict=True):
            splits[split] = {name: splits[split][name] + counts[name] for name in counts}
            bar.advance(piece.table.count)
    return splits


def convert_piece(piece: Piece) -> dict[str, int]:
    """Write one split's rows as a store, a row a document, nothing added; done already, if the pair stands there."""
    if not paths_of(piece.prefix)[0].is_file():
        with StoreWriter(piece.prefix, dtype_for(piece.vocab)) as store:
            for path, first, columns in piece.table.columns(IDS, MASK):
                ids, mask = columns[IDS], columns.get(MASK)
                if mask is not None:
                    if not np.array_equal(mask.lengths, ids.lengths):
                        where = f"{path}: about row {piece.table.first + first:,}"
                        raise TextmillError(f"{where}, {MASK} and {IDS} differ in length; make the dataset anew")
                    ids = unpadded(ids, mask)
                check_ids(ids.values, piece.vocab, path)
                store.add_flat(ids.values, ids.lengths)
    made = open_store(piece.prefix)
    return {"documents": len(made), "tokens": made.tokens}


def _spoken(splits: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"])
