"""The command tokenize with `tokens.use`: converts datasets of token ids into stores; stores are used in place."""

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
from textmill.tokens.splits import converted_folder, existing_kind, split_borders, tokenizer_of, used_path
from textmill.tokens.store import dtype_for, open_store, store_paths
from textmill.tokens.store_writer import StoreWriter
from textmill.tokens.token_tables import IDS, MASK, Table, named_files, open_tables, strip_padding


@dataclass(frozen=True)
class Conversion:
    """A task for one worker: a split of a dataset, and the store to write it to."""

    table: Table
    prefix: Path
    vocab: int


def tokenize_existing(config: RunConfig, force: Force = "no") -> Path:
    """Convert the datasets among `tokens.use` into stores; return the tokens folder."""
    folder = config.folder_of("tokens")
    if config.tokens.kind != "store":
        raise TextmillError(
            f"tokens.kind={config.tokens.kind}: its rows are cut from a corpus, but tokens.use names existing tokens; "
            "remove one of them"
        )
    paths = {number: used_path(config, number) for number in range(len(config.tokens.use))}
    tables = {number: path for number, path in paths.items() if existing_kind(path) == "table"}
    if not tables:
        print("tokenize: nothing to do: tokens.use names token stores, which are read in place")
        return folder
    tokenizer = tokenizer_of(config)
    inputs = {f"{number}/{name}": path for number, where in tables.items() for name, path in named_files(where).items()}
    accounts, mtimes = _check_inputs(inputs, folder)
    made_from = {"corpus.split": config.corpus.split, "tokenizer": tokenizer.fingerprint, **accounts}
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({_format_counts(open_manifest(folder)['splits'])})")
        return folder
    with stage.unfinished_folder() as part:
        folders = {number: part / converted_folder(config, number).relative_to(folder) for number in tables}
        splits = _convert(config, tables, folders, tokenizer.vocab)
        pairs = [where / f"{split}.{end}" for where in folders.values() for split in SPLITS for end in ("bin", "idx")]
        files = {path.relative_to(part).as_posix(): manifest_entry(path) for path in pairs}
        shared = {"tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab, "end": tokenizer.end, "mtimes": mtimes}
        used = {str(number): path.name for number, path in tables.items()}
        stage.write_manifest(part, files, {**shared, "used": used, "splits": splits})
    print(f"tokenize: {format_path(folder)}: {_format_counts(splits)}")
    return folder


def _check_inputs(inputs: dict[str, Path], folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Length and checksum, and mtime, of each file; a file with the recorded length and mtime is not read again."""
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    known = manifest.get("made_from", {})
    times = manifest.get("mtimes", {})
    accounts = {}
    mtimes = {}
    for name, path in inputs.items():
        if not path.is_file():
            raise TextmillError(f"{path}: file not found, but its dataset lists it")
        state = path.stat()
        before = known.get(f"inputs.{name}", {})
        same = before.get("bytes") == state.st_size and times.get(name) == state.st_mtime_ns
        accounts[f"inputs.{name}"] = before if same else {"bytes": state.st_size, "sha256": hash_file(path)}
        mtimes[name] = state.st_mtime_ns
    return accounts, mtimes


def _convert(
    config: RunConfig, tables: dict[int, Path], folders: dict[int, Path], vocab: int
) -> dict[str, dict[str, int]]:
    """Convert every split of every dataset on the runner; return the counts of each split over all datasets."""
    edges_of = partial(split_borders, config.corpus.split)
    tasks: list[tuple[str, Conversion]] = []
    for number, where in tables.items():
        folders[number].mkdir(exist_ok=True)
        for left in folders[number].glob("*.tmp-*"):  # left by a run that was killed
            left.unlink()
        opened = open_tables(where, edges_of)
        tasks += [(split, Conversion(opened[split], folders[number] / split, vocab)) for split in SPLITS]
    splits: dict[str, dict[str, int]] = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
    with progress("tokenize", total=sum(task.table.count for _, task in tasks), unit="rows") as bar:
        found = open_runner(config.runner).map(convert_split, [task for _, task in tasks])
        for (split, task), counts in zip(tasks, found, strict=True):
            splits[split] = {name: splits[split][name] + counts[name] for name in counts}
            bar.advance(task.table.count)
    return splits


def convert_split(task: Conversion) -> dict[str, int]:
    """Write the rows of one split as a store, one document per row, unless the store exists; return the counts."""
    if not store_paths(task.prefix)[0].is_file():
        with StoreWriter(task.prefix, dtype_for(task.vocab)) as store:
            for path, first, columns in task.table.read_columns(IDS, MASK):
                ids = columns[IDS]
                mask = columns.get(MASK)
                if mask is not None:
                    if not np.array_equal(mask.lengths, ids.lengths):
                        where = f"{path}: near row {task.table.first + first:,}"
                        raise TextmillError(f"{where}, {MASK} and {IDS} differ in length; make the dataset again")
                    ids = strip_padding(ids, mask)
                check_ids(ids.values, task.vocab, path)
                store.add_flat(ids.values, ids.lengths)
    written = open_store(task.prefix)
    return {"documents": len(written), "tokens": written.tokens}


def _format_counts(splits: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{split} {counts['tokens']:,} tokens" for split, counts in splits.items() if counts["tokens"])
