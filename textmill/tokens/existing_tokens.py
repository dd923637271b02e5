"""Token ids that other tools wrote (`tokens.use`): stores are used in place, datasets are converted into stores.

A dataset has a column `input_ids`: Parquet files, a folder of `datasets.save_to_disk`, or BERT's examples in TFRecord
files (bert_examples.py), numpy's .npy, pickled lists of arrays and nanoGPT's .bin (array_rows.py).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from textmill.config import CorpusConfig, RunConfig, TokensConfig
from textmill.config.load import split_paths
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.split import split_from_name, split_from_path
from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.runners import Runner, open_runner
from textmill.storage.files import format_path, hash_file, manifest_entry, read_json
from textmill.storage.progress import progress
from textmill.storage.remote_folders import fetch, first_line, is_url
from textmill.storage.stages import MANIFEST, Force, Stage, open_manifest
from textmill.tokens.array_rows import ArrayRows, is_array_file, is_raw_file
from textmill.tokens.batches.batch import check_ids
from textmill.tokens.bert_examples import ExampleRows
from textmill.tokens.encoding import format_counts
from textmill.tokens.store import StoreWriter, dtype_for, open_store, store_paths, store_prefix
from textmill.tokens.tfrecord import is_tfrecord
from textmill.tokens.vocabulary.tokenizer import tokenizer_of

DICT_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
"""Files that `save_to_disk` writes: one for a DatasetDict, one in the folder of each Dataset."""
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
TFRECORD = re.compile(r"\.tfrecords?$")
IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
TYPES = "token_type_ids"
PAIR = "next_sentence_label"
"""Columns that are read."""
ROWS = 1024
"""Rows read at a time."""


def tokenize_existing(config: RunConfig, force: Force = "no") -> Path:
    """Convert the datasets among `tokens.use` into stores; return the tokens folder."""
    folder = config.folder_of("tokens")
    if config.tokens.kind != "store":
        raise TextmillError(
            f"tokens.kind={config.tokens.kind}: its rows are cut from a corpus, but tokens.use names existing tokens; "
            "remove one of them"
        )
    entries = used_entries(config.tokens, config.corpus)
    tables = [entry for entry in entries if entry.kind == "table"]
    if not tables:
        print("tokenize: nothing to do: tokens.use names token stores, which are read in place")
        return folder
    tokenizer = tokenizer_of(config.folder_of("tokenizer"), config.tokenizer, config.train.layout)
    for entry in tables:
        if is_raw_file(entry.path) and tokenizer.vocab > 1 << 16:
            raise TextmillError(
                f"tokens.use: {entry.path}: has no {entry.path.stem}.idx next to it, so its ids would be nanoGPT's of "
                f"16 bits, which cannot count {tokenizer.vocab:,} tokens; name another file, or put the .idx next to it"
            )
    accounts, mtimes = input_accounts(tables, open_manifest(folder) if (folder / MANIFEST).is_file() else {})
    made_from = {"corpus.own_splits": config.corpus.own_splits, "tokenizer": tokenizer.fingerprint, **accounts}
    made_from |= {f"split.{entry.number}": list(entry.fractions) for entry in tables}
    stage = Stage("tokenize", folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"tokenize: done already: {format_path(folder)} ({format_counts(open_manifest(folder)['splits'])})")
        return folder
    with stage.unfinished_folder() as part:
        folders = [converted_folder(part, entry.number, len(entries)) for entry in tables]
        splits = _convert(tables, folders, tokenizer.vocab, open_runner(config.runner))
        pairs = [where / f"{split}.{end}" for where in folders for split in SPLITS for end in ("bin", "idx")]
        files = {path.relative_to(part).as_posix(): manifest_entry(path) for path in pairs}
        shared = {
            "tokenizer": tokenizer.fingerprint,
            "vocab": tokenizer.vocab,
            "eos_id": tokenizer.eos_id,
            "mtimes": mtimes,
        }
        used = {str(entry.number): entry.path.name for entry in tables}
        stage.write_manifest(part, files, {**shared, "used": used, "splits": splits})
    print(f"tokenize: {format_path(folder)}: {format_counts(splits)}")
    return folder


@dataclass(frozen=True)
class UsedEntry:
    """An entry of `tokens.use`, `tokens.use_valid` or `tokens.use_test`."""

    number: int
    """Its place among the entries of the three settings."""
    path: Path
    kind: Literal["folder", "prefix", "table"]
    """A folder of textmill, a prefix of .bin and .idx, or a dataset of rows."""
    weight: float
    split: Split | None
    """The split that all of it belongs to; None for an entry of `tokens.use`."""
    fractions: tuple[float, ...]
    """How it is split if it has no splits of its own."""
    keep_splits: bool
    """Whether splits of its own count, if it has any."""


def used_entries(tokens: TokensConfig, corpus: CorpusConfig) -> list[UsedEntry]:
    """The entries of the three settings, in this order; refuses evaluation data among those to train on."""
    named: list[tuple[str, float, Split | None]] = [(used.path, used.weight, None) for used in tokens.use]
    named += [(path, 1.0, "valid") for path in tokens.use_valid]
    named += [(path, 1.0, "test") for path in tokens.use_test]
    train, valid, test = corpus.split
    if tokens.use_valid:
        valid = 0.0
    if tokens.use_valid or tokens.use_test:
        test = 0.0
    entries = []
    for number, (name, weight, split) in enumerate(named):
        path = fetch(name) if is_url(name) else Path(name)
        fractions = tuple(float(split == one) for one in SPLITS) if split else (train, valid, test)
        entry = UsedEntry(number, path, existing_kind(path), weight, split, fractions, corpus.own_splits)
        _check_names(entry)
        entries.append(entry)
    return entries


def _check_names(entry: UsedEntry) -> None:
    """Refuse to train on what is named after another split and would be split by `corpus.split`."""
    has_splits = entry.kind == "folder" or (entry.kind == "table" and None not in _named_tables(entry))
    split = split_from_name(entry.path.name)
    if entry.split is None and entry.keep_splits and not has_splits and split not in (None, "train"):
        raise TextmillError(
            f"tokens.use: {entry.path}: is named after the {split} split, but would be trained on; name it in "
            f"tokens.use_{split} instead, or set corpus.own_splits=false to train on it anyway"
        )


def existing_kind(path: Path) -> Literal["folder", "prefix", "table"]:
    """The kind of existing tokens: a folder of textmill, a prefix of .bin and .idx, or a dataset of rows."""
    if (path / MANIFEST).is_file() and open_manifest(path).get("verb") == "tokenize":
        return "folder"
    if store_paths(store_prefix(path))[0].is_file():
        return "prefix"
    if is_dataset(path) or find_table_files(path):
        return "table"
    raise TextmillError(
        f"tokens.use: {path}: no tokens found; name a prefix of .bin and .idx files, a folder written by textmill or "
        f"datasets.save_to_disk, Parquet files with a column input_ids, or a .npy, .pickle or nanoGPT's .bin with ids"
    )


def converted_folder(folder: Path, number: int, count: int) -> Path:
    """Where `tokenize` writes the stores of a dataset: the tokens folder, or a subfolder of it if there are several."""
    return folder if count == 1 else folder / f"used-{number}"


def input_accounts(tables: Sequence[UsedEntry], manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Length and checksum, and mtime, of each file of datasets, by the numbers of their entries.

    A file with the length and mtime that the manifest has is not read again.
    """
    known = manifest.get("made_from", {})
    times = manifest.get("mtimes", {})
    accounts = {}
    mtimes = {}
    files = [(f"{entry.number}/{name}", file) for entry in tables for name, file in named_files(entry.path)]
    for name, path in files:
        if not path.is_file():
            raise TextmillError(f"{path}: file not found, but its dataset lists it")
        state = path.stat()
        before = known.get(f"inputs.{name}", {})
        same = before.get("bytes") == state.st_size and times.get(name) == state.st_mtime_ns
        accounts[f"inputs.{name}"] = before if same else {"bytes": state.st_size, "sha256": hash_file(path)}
        mtimes[name] = state.st_mtime_ns
    return accounts, mtimes


def _convert(
    tables: Sequence[UsedEntry], folders: Sequence[Path], vocab: int, runner: Runner
) -> dict[str, dict[str, int]]:
    """Convert every split of every dataset on the runner; return the counts of each split over all datasets."""
    tasks: list[tuple[str, Conversion]] = []
    for entry, folder in zip(tables, folders, strict=True):
        folder.mkdir(exist_ok=True)
        opened = open_tables(entry)
        tasks += [(split, Conversion(opened[split], folder / split, vocab)) for split in SPLITS]
    splits: dict[str, dict[str, int]] = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
    with progress("tokenize", total=sum(task.table.count for _, task in tasks), unit="rows") as bar:
        found = runner.map(convert_split, [task for _, task in tasks])
        for (split, task), counts in zip(tasks, found, strict=True):
            splits[split] = {name: splits[split][name] + counts[name] for name in counts}
            bar.advance(task.table.count)
    return splits


@dataclass(frozen=True)
class Conversion:
    """A task for one worker: a split of a dataset, and the store to write it to."""

    table: Table
    prefix: Path
    vocab: int


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


def strip_padding(ids: ListColumn, mask: ListColumn) -> ListColumn:
    """Remove masked positions at the start and end of each row; masked positions between tokens stay."""
    ends = np.cumsum(ids.lengths)
    starts = ends - ids.lengths
    seen = np.flatnonzero(mask.values)
    rows = np.searchsorted(ends, seen, side="right")
    first = starts.copy()
    last = starts.copy()
    first[rows[::-1]] = seen[::-1]  # if a row occurs more than once, the last assignment counts
    last[rows] = seen + 1
    lengths = last - first
    return ListColumn(ids.values[expand_ranges(first, lengths)], lengths)


@dataclass(frozen=True)
class Table:
    """Consecutive rows of one or more files."""

    files: tuple[Path, ...]
    first: int
    """The number of the first row, counted over all files."""
    count: int

    def read_columns(self, *names: str) -> Iterator[tuple[Path, int, dict[str, ListColumn]]]:
        """(file, number of the first row, columns) for batches of rows; a missing attention mask is left out."""
        before = 0
        for path in self.files:
            for batch in read_batches(path, names):
                begin = max(self.first - before, 0)
                end = min(self.first + self.count - before, batch.num_rows)
                if begin < end:
                    rows = batch.slice(begin, end - begin)
                    present = [name for name in names if name in rows.schema.names]
                    columns = {name: read_list_column(rows.column(name), path, name) for name in present}
                    yield path, before + begin - self.first, columns
                before += batch.num_rows
                if before >= self.first + self.count:
                    return


@dataclass(frozen=True)
class ListColumn:
    """A column of lists: all values concatenated, and the length of each list."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]


def open_tables(entry: UsedEntry) -> dict[str, Table]:
    """The rows of each split: by the names of files and folders, or, if these name no split, by their fractions."""
    named = _named_tables(entry)
    if None in named:
        files = named[None]
        edges = split_borders(entry.fractions, sum(map(count_rows, files)))
        return {
            split: Table(files, edges[number], edges[number + 1] - edges[number]) for number, split in enumerate(SPLITS)
        }
    tables: dict[str, Table] = {}
    for split in SPLITS:
        files = named.get(split, ())
        tables[split] = Table(files, 0, sum(map(count_rows, files)))
    return tables


def _named_tables(entry: UsedEntry) -> dict[str | None, tuple[Path, ...]]:
    """The files of each split of a dataset; under None those of a dataset without splits."""
    where = entry.path
    if not entry.keep_splits:
        return {None: tuple(path for _, path in named_files(where))}
    named = _saved_files(where) if is_dataset(where) else _files_by_name(where, find_table_files(where))
    if entry.split is None:
        return named
    if len(named) > 1:
        raise TextmillError(
            f"tokens.use_{entry.split}: {where}: has several splits ({', '.join(map(str, named))}); name the files or "
            "the folder of one"
        )
    return {None: next(iter(named.values()))}


def split_borders(fractions: Sequence[float], count: int) -> list[int]:
    """Where each split starts and ends if documents are split in their order, as Megatron does it.

    Each split gets its rounded fraction; the rounding error is taken off all borders but the first. Fractions 90, 5, 5
    of 1,000 documents -> [0, 900, 950, 1000]
    """
    total = sum(fractions)
    edges = [0]
    for fraction in fractions:
        edges.append(edges[-1] + round(fraction / total * count))
    return [0, *(edge - (edges[-1] - count) for edge in edges[1:])]


def is_dataset(path: Path) -> bool:
    """Whether the folder was written by `datasets.save_to_disk`."""
    return (path / DICT_FILE).is_file() or (path / STATE_FILE).is_file()


def find_table_files(where: Path) -> list[Path]:
    """The files with rows of a file name, folder or glob; files of Apache Beam have no ending."""
    if where.is_file():
        return [where]
    if where.is_dir():
        found = sorted(
            path
            for path in where.rglob("*")
            if path.is_file()
            and (path.suffix in (".parquet", ".npy") or SHARD.search(path.name) or TFRECORD.search(path.name))
        )
    else:
        names = (name for path in split_paths(str(where)) for name in glob.glob(path, recursive=True))
        found = sorted(path for path in map(Path, names) if path.is_file())
    return found


def named_files(where: Path) -> list[tuple[str, Path]]:
    """The files of a dataset with their path in it, so that two files of the same name stay different."""
    saved = _saved_files(where).values() if is_dataset(where) else [find_table_files(where)]
    files = [path for some in saved for path in some]
    if where.is_dir():
        return [
            (path.relative_to(where).as_posix() if path.is_relative_to(where) else path.name, path) for path in files
        ]
    return [(f"{number} {path.name}", path) for number, path in enumerate(files)]


def _saved_files(folder: Path) -> dict[str | None, tuple[Path, ...]]:
    if not (folder / DICT_FILE).is_file():
        return {None: _arrow_files(folder)}
    splits: dict[str | None, tuple[Path, ...]] = {}
    for name in read_json(folder / DICT_FILE)["splits"]:
        split = split_from_name(name)
        if split is None:
            raise TextmillError(
                f"{folder}: unknown split '{name}'; known are train, validation and test; "
                f"to use it anyway, name its own folder: {folder / name}"
            )
        splits[split] = splits.get(split, ()) + _arrow_files(folder / name)
    return splits


def _arrow_files(folder: Path) -> tuple[Path, ...]:
    state = read_json(folder / STATE_FILE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise TextmillError(
            f"{folder}: is a selection of other rows; save it again with dataset.flatten_indices().save_to_disk(...)"
        )
    return tuple(folder / file["filename"] for file in state["_data_files"])


def _files_by_name(where: Path, files: Sequence[Path]) -> dict[str | None, tuple[Path, ...]]:
    """Group files by split: the one that a file, or else a folder above it, is named after."""
    splits: dict[str | None, tuple[Path, ...]] = {}
    for path in files:
        inside = path.relative_to(where).parts if where.is_dir() else (path.name,)
        split = split_from_path(inside)
        splits[split] = (*splits.get(split, ()), path)
    if None in splits and len(splits) > 1:
        raise TextmillError(
            f"{where}: {splits[None][0].name} is not named after a split, but other files are; "
            f"name all files train-*, validation-* or test-*, or none, or set corpus.own_splits=false to pool them"
        )
    return splits


def count_rows(path: Path) -> int:
    """The number of rows in a file; an Arrow stream must be read up to its last batch header."""
    with _open_table(path) as file:
        if isinstance(file, pq.ParquetFile):
            return int(file.metadata.num_rows)
        return len(file) if isinstance(file, ArrayRows | ExampleRows) else sum(batch.num_rows for batch in file)


def read_batches(path: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a file with these columns; a missing column is an error, except `attention_mask`."""
    with _open_table(path) as file:
        known = _schema_of(file).names
        if missing := [name for name in names if name not in known and name != MASK]:
            raise TextmillError(f"{path}: has no column '{missing[0]}'; found {known[:12]}")
        wanted = [name for name in names if name in known]
        if isinstance(file, pq.ParquetFile):
            yield from file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False)
            return
        for batch in file:
            yield from (batch.slice(start, ROWS).select(wanted) for start in range(0, batch.num_rows, ROWS))


def has_masked_rows(table: Table) -> bool:
    """Whether the rows are BERT's masked examples; true for a table without rows."""
    for path in table.files[:1]:
        with _open_table(path) as file:
            return PAIR in _schema_of(file).names
    return True


@contextmanager
def _open_table(path: Path) -> Iterator[Any]:
    """A file of Parquet, TFRecord or numpy, or an Arrow stream over mapped memory; errors name the file."""
    if _is_examples(path):
        yield ExampleRows(path)
        return
    if is_array_file(path):
        yield ArrayRows(path)
        return
    try:
        with pa.memory_map(str(path)) as stream:
            if stream.size() >= 4 and stream.read(4) == b"PAR1":
                with pq.ParquetFile(path) as file:
                    yield file
            else:
                stream.seek(0)
                with pa.ipc.open_stream(stream) as batches:
                    yield batches
    except FileNotFoundError:
        raise TextmillError(f"{path}: file not found") from None
    except (pa.ArrowException, OSError) as error:
        raise TextmillError(f"{path}: not a complete Parquet file or Arrow stream ({first_line(error)})") from None


def _schema_of(file: Any) -> pa.Schema:
    return file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema


def _is_examples(path: Path) -> bool:
    return path.is_file() and (TFRECORD.search(path.name) is not None or is_tfrecord(path))


def read_list_column(column: pa.Array, path: Path, name: str) -> ListColumn:
    """Convert an Arrow column of lists, without copying."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise TextmillError(f"{path}: column '{name}' has the type {kind}; expected a list of integers per row")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise TextmillError(f"{path}: column '{name}' has empty cells (null); expected a list of integers per row")
    if name != MASK and not pa.types.is_integer(values.type):
        raise TextmillError(f"{path}: column '{name}' has lists of {values.type}; token ids are integers")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return ListColumn(values.to_numpy(zero_copy_only=False), lengths)
