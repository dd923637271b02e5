"""Write and read the documents that prepare dropped, with the rule and, for a duplicate, what it repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from textmill.corpus.chunk_task import ChunkTask
from textmill.corpus.shards import new_shard, open_shard, take_rows
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


def write_dropped(task: ChunkTask) -> None:
    """Write the dropped documents of a chunk: those of filters, then duplicates, then contaminated ones."""
    names: list[str] = read_json(task.folder / "work" / NAMES_FILE)
    source = task.chunk.source.name
    with new_shard(task.folder / dropped_name(task.chunk.number), SCHEMA) as writer:
        with open_shard(task.path("filtered")) as filtered:
            for batch in filtered.iter_batches(use_threads=False):
                writer.add(_to_table(batch, source, batch["rule"]))
        repeats = np.fromfile(task.path("repeats"), REPEAT_DTYPE)
        if len(repeats):
            texts = take_rows(task.path("parquet"), ["text", "id"], repeats["row"])
            rules = pa.array([NEAR if is_near else EXACT for is_near in repeats["near"].tolist()], pa.string())
            repeated_sources = pa.array([names[chunk] for chunk in repeats["chunk"].tolist()], pa.string())
            repeated_ids = pa.array(_repeated_ids(task.folder / "work", repeats), pa.string())
            similarities = pa.array(repeats["similarity"], pa.float32())
            writer.add(_to_table(texts, source, rules, repeated_sources, repeated_ids, similarities))
        if task.config.decontaminate and task.config.decontaminate_action == "drop":
            rows = task.read_contaminated()
            if len(rows):
                texts = take_rows(task.path("parquet"), ["text", "id"], rows)
                writer.add(_to_table(texts, source, pa.array([CONTAMINATED] * len(rows), pa.string())))


def _to_table(texts: Any, source: str, rules: Any, *duplicate_of: Any) -> pa.Table:
    """Rows with the columns `text` and `id` as dropped documents; `duplicate_of`: the last three columns, if any."""
    count = texts.num_rows
    empty = (pa.nulls(count, pa.string()), pa.nulls(count, pa.string()), pa.nulls(count, pa.float32()))
    sources = pa.array([source] * count, pa.string())
    return pa.table([texts["text"], sources, texts["id"], rules, *(duplicate_of or empty)], schema=SCHEMA)


def _repeated_ids(work: Path, repeats: NDArray[Any]) -> list[str]:
    """The id of the document that each duplicate repeats."""
    ids = [""] * len(repeats)
    for chunk in np.unique(repeats["chunk"]).tolist():
        places = np.flatnonzero(repeats["chunk"] == chunk)
        repeated = take_rows(work / f"{chunk:05d}.parquet", ["id"], repeats["other"][places])
        for place, id_ in zip(places.tolist(), repeated["id"].to_pylist(), strict=True):
            ids[place] = id_
    return ids
