"""Write and read the documents that prepare dropped, with the rule and, for a duplicate, what it repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.corpus.shards import ShardWriter, new_shard, open_shard
from textmill.storage.files import read_json

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("source", pa.string()),
        ("id", pa.string()),
        ("rule", pa.string()),
        ("duplicate_of_source", pa.string()),
        ("duplicate_of_id", pa.string()),
        ("similarity", pa.float32()),
    ]
)
FILTERED_SCHEMA = pa.schema([("text", pa.string()), ("id", pa.string()), ("rule", pa.string())])
"""What the first pass records of documents that a filter dropped."""
REPEAT_DTYPE = np.dtype(
    [("row", np.int64), ("chunk", np.int64), ("other", np.int64), ("similarity", np.float32), ("near", np.bool_)]
)
"""A dropped duplicate: its row, the chunk and row of the document that it repeats, and whether it is only similar."""
NAMES_FILE = "names.json"
"""The name of the source of each chunk."""
EXACT = "duplicate"
NEAR = "near_duplicate"
CONTAMINATED = "contaminated"


def dropped_name(number: int) -> str:
    """The file name of the dropped documents of one chunk."""
    return f"dropped-{number:05d}.parquet"


def list_dropped_files(folder: Path) -> list[Path]:
    """The files of dropped documents in a corpus folder, in order; empty without `corpus.keep_dropped`."""
    return sorted(folder.glob("dropped-*.parquet"), key=lambda path: (len(path.name), path.name))


def read_dropped(folder: Path, rule: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dropped documents of a corpus folder, or those that one rule dropped."""
    for path in list_dropped_files(folder):
        with open_shard(path) as shard:
            for batch in shard.iter_batches(use_threads=False):
                rows = batch if rule is None else batch.filter(pc.equal(batch.column("rule"), rule))
                yield from rows.to_pylist()


def write_dropped(path: Path, work: Path, number: int, repeats: NDArray[Any], contaminated: NDArray[np.int64]) -> None:
    """Write the dropped documents of a chunk: those of filters, then duplicates, then contaminated ones."""
    names = read_json(work / NAMES_FILE)
    with new_shard(path, SCHEMA) as writer:
        with open_shard(work / f"{number:05d}.filtered") as filtered:
            for batch in filtered.iter_batches(use_threads=False):
                table = pa.Table.from_batches([batch])
                empty = pa.nulls(table.num_rows, pa.string())
                source = pa.array([names[number]] * table.num_rows, pa.string())
                columns = [table["text"], source, table["id"], table["rule"], empty, empty]
                writer.add(pa.table([*columns, pa.nulls(table.num_rows, pa.float32())], schema=SCHEMA))
        if len(repeats):
            _write_repeats(writer, work, number, repeats, names)
        if len(contaminated):
            texts = _take(work / f"{number:05d}.parquet", ["text", "id"], contaminated)
            count = len(contaminated)
            source = pa.array([names[number]] * count, pa.string())
            rule = pa.array([CONTAMINATED] * count, pa.string())
            empty = pa.nulls(count, pa.string())
            columns = [texts["text"], source, texts["id"], rule, empty, empty]
            writer.add(pa.table([*columns, pa.nulls(count, pa.float32())], schema=SCHEMA))


def _write_repeats(writer: ShardWriter, work: Path, number: int, repeats: NDArray[Any], names: Sequence[str]) -> None:
    texts = _take(work / f"{number:05d}.parquet", ["text", "id"], repeats["row"])
    repeated_ids: list[str] = [""] * len(repeats)
    for chunk in np.unique(repeats["chunk"]).tolist():
        places = np.flatnonzero(repeats["chunk"] == chunk)
        repeated = _take(work / f"{chunk:05d}.parquet", ["id"], repeats["other"][places])
        for place, id_ in zip(places.tolist(), repeated["id"].to_pylist(), strict=True):
            repeated_ids[place] = id_
    rules = [NEAR if is_near else EXACT for is_near in repeats["near"].tolist()]
    columns = [
        texts["text"],
        pa.array([names[number]] * len(repeats), pa.string()),
        texts["id"],
        pa.array(rules, pa.string()),
        pa.array([names[chunk] for chunk in repeats["chunk"].tolist()], pa.string()),
        pa.array(repeated_ids, pa.string()),
        pa.array(repeats["similarity"], pa.float32()),
    ]
    writer.add(pa.table(columns, schema=SCHEMA))


def _take(path: Path, columns: list[str], rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a shard, in the order that they are named."""
    with open_shard(path) as shard:
        tables = []
        start = 0
        for group in range(shard.num_row_groups):
            count = shard.metadata.row_group(group).num_rows
            group_rows = np.unique(rows[(rows >= start) & (rows < start + count)])
            if len(group_rows):
                table = shard.read_row_group(group, columns, use_threads=False)
                tables.append(table.take(pa.array(group_rows - start)))
            start += count
    return pa.concat_tables(tables).take(pa.array(np.searchsorted(np.unique(rows), rows)))
