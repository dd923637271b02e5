"""Write and read the documents that prepare dropped, with the rule and, for a duplicate, what it repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.corpus.chunk_task import CONTAMINATED, DROPPED, DUPLICATE, GAP, NEAR_DUPLICATE, ChunkTask, chunk_file
from textmill.corpus.shards import list_shards, new_shard, open_shard, shard_name, take_rows
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
FILTERED_SCHEMA = pa.schema([("text", pa.string()), ("id", pa.string()), ("source", pa.int32()), ("rule", pa.string())])
"""What the first pass records of documents that a filter dropped; the source is its number in the chunk."""
REPEAT_DTYPE = np.dtype(
    [("row", np.int64), ("chunk", np.int64), ("other", np.int64), ("similarity", np.float32), ("near", np.bool_)]
)
"""A dropped duplicate: its row, the chunk and row of the document that it repeats, and whether it is only similar."""


def read_dropped(folder: Path, rule: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the dropped documents of a corpus folder, or those that one rule dropped."""
    for path in list_shards(folder, "dropped"):
        with open_shard(path) as shard:
            for batch in shard.iter_batches(use_threads=False):
                rows = batch if rule is None else batch.filter(pc.equal(batch.column("rule"), rule))
                yield from rows.to_pylist()


def write_dropped(task: ChunkTask) -> None:
    """Write the dropped documents of a chunk: those of filters, then duplicates, then contaminated ones."""
    sources = pa.array(task.source_names, pa.string())
    with new_shard(task.folder / shard_name("dropped", task.number), SCHEMA) as writer:
        with open_shard(task.path("filtered")) as filtered:
            for batch in filtered.iter_batches(use_threads=False):
                writer.add(_to_table(batch, sources.take(batch["source"]), batch["rule"]))
        source_of_row = task.sources_of_rows()
        repeats = np.fromfile(task.path("repeats"), REPEAT_DTYPE)
        if len(repeats):
            texts = take_rows(task.path("parquet"), ["text", "id"], repeats["row"])
            rules = pa.array(np.where(repeats["near"], NEAR_DUPLICATE, DUPLICATE))
            repeated_sources, repeated_ids = _find_repeated(task.folder, repeats)
            similarities = pa.array(repeats["similarity"], pa.float32())
            names = sources.take(pa.array(source_of_row[repeats["row"]]))
            writer.add(_to_table(texts, names, rules, repeated_sources, repeated_ids, similarities))
        for rule in (CONTAMINATED, GAP):
            rows = np.flatnonzero(task.read_splits() == DROPPED[rule])
            if len(rows):
                texts = take_rows(task.path("parquet"), ["text", "id"], rows)
                rules = pa.array([rule] * len(rows), pa.string())
                writer.add(_to_table(texts, sources.take(pa.array(source_of_row[rows])), rules))


def _to_table(texts: Any, sources: Any, rules: Any, *duplicate_of: Any) -> pa.Table:
    """Rows with the columns `text` and `id` as dropped documents; `duplicate_of`: the last three columns, if any."""
    count = texts.num_rows
    empty = (pa.nulls(count, pa.string()), pa.nulls(count, pa.string()), pa.nulls(count, pa.float32()))
    return pa.table([texts["text"], sources, texts["id"], rules, *(duplicate_of or empty)], schema=SCHEMA)


def _find_repeated(folder: Path, repeats: NDArray[Any]) -> tuple[pa.Array, pa.Array]:
    """The source and the id of the document that each duplicate repeats."""
    sources = [""] * len(repeats)
    ids = [""] * len(repeats)
    for chunk in np.unique(repeats["chunk"]).tolist():
        names: list[str] = read_json(chunk_file(folder, chunk, "names"))
        ends = np.cumsum(np.fromfile(chunk_file(folder, chunk, "rows"), np.int64))
        places = np.flatnonzero(repeats["chunk"] == chunk)
        rows = repeats["other"][places]
        source_of_row = np.searchsorted(ends, rows, side="right").tolist()
        found = take_rows(chunk_file(folder, chunk, "parquet"), ["id"], rows)["id"].to_pylist()
        for place, source, name in zip(places.tolist(), source_of_row, found, strict=True):
            sources[place] = names[source]
            ids[place] = name
    return pa.array(sources, pa.string()), pa.array(ids, pa.string())
