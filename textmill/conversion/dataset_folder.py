"""`export.kind=dataset`: a prepared corpus as a Hugging Face dataset, with a card made from its account.

The Parquet files are written with pyarrow, as the datasets library does; it is not needed, and finds the splits by the
head of the card. Paths of this machine are cut to what the sources do not have in common.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from textmill.config import CorpusConfig, ExportConfig
from textmill.config.yaml_text import format_yaml
from textmill.corpus.conversations import turns_from_json
from textmill.corpus.document import SPLITS
from textmill.corpus.shards import list_shards, open_shard
from textmill.errors import TextmillError
from textmill.storage.files import format_path, manifest_entry, read_json, write_text
from textmill.storage.stages import Force, Stage, open_manifest

CARD = "README.md"
SPLIT_NAMES = {"train": "train", "valid": "validation", "test": "test"}
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SETTINGS = (
    "rules",
    "min_chars",
    "languages",
    "dedup",
    "decontaminate",
    "split",
    "documents",
    "section_chars",
    "preset",
)
"""Settings of the corpus that the card names."""
SHOWN_SOURCES = 50
"""Sources that the card lists."""


def export_dataset(export: ExportConfig, settings: CorpusConfig, corpus: Path, force: Force) -> Path:
    """Write a corpus, which was made with these settings, into `export.folder`."""
    folder = Path(str(export.folder))
    if export.precision != ExportConfig().precision:
        raise TextmillError("export.kind: a dataset has no weights; remove export.precision")
    manifest = open_manifest(corpus, "prepare")
    if folder.resolve().is_relative_to(corpus.resolve()):
        raise TextmillError(f"export.folder: {folder} is inside the corpus {corpus}; name a folder elsewhere")
    account = read_json(corpus / "account.json")
    made_from = {"export.kind": "dataset", "corpus": manifest["fingerprint"], "shards": manifest["files"]}
    made_from |= {"export.license": export.license, "export.name": export.name}
    stage = Stage("export", folder, made_from, None)
    if stage.is_done(force):
        print(f"export: done already: {format_path(folder)}")
        return folder
    common = _common_folder(list(account["by_source"]))
    with stage.unfinished_folder() as part:
        (part / "data").mkdir(exist_ok=True)
        files: dict[str, dict[str, Any]] = {}
        for split in SPLITS:
            shards = list_shards(corpus, split)
            for number, shard in enumerate(shards):
                name = f"data/{SPLIT_NAMES[split]}-{number:05d}-of-{len(shards):05d}.parquet"
                files[name] = _write_shard(shard, part / name, common)
        card = _card(export, settings, account, common, files)
        files[CARD] = write_text(part / CARD, card)
        stage.write_manifest(part, files, {"documents": manifest["documents"]})
    megabytes = sum(entry["bytes"] for entry in files.values()) / 1e6
    print(f"export: {format_path(folder)}: {manifest['documents']:,} documents as a dataset, {megabytes:,.1f} MB")
    print(f"export: open it with datasets.load_dataset({format_path(folder)!r})")
    return folder


def _common_folder(sources: list[str]) -> str:
    """The folder that all local sources are in; '' if there is none."""
    folders = [
        os.path.dirname(os.path.abspath(name)) for name in sources if os.path.dirname(name) and "://" not in name
    ]
    return os.path.commonpath(folders) if folders else ""


def _short_name(name: str, common: str) -> str:
    """The name of a source below the common folder: the folders of this machine are nobody's business."""
    if not os.path.dirname(name) or "://" in name:
        return name
    path = os.path.abspath(name)
    return os.path.relpath(path, common) if path.startswith(common + os.sep) else os.path.basename(name)


def _write_shard(shard: Path, path: Path, common: str) -> dict[str, Any]:
    """Copy a shard with short names and with conversations as lists; return its manifest entry."""
    with open_shard(shard) as source:
        schema = pa.schema(
            [
                pa.field(one.name, MESSAGES) if one.name == "messages" else one
                for one in source.schema_arrow.remove_metadata()
            ]
        )
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for group in range(source.num_row_groups):
                writer.write_table(_convert(source.read_row_group(group, use_threads=False), common).cast(schema))
    return manifest_entry(path)


def _convert(table: pa.Table, common: str) -> pa.Table:
    for number, name in enumerate(table.column_names):
        values = table.column(name)
        if name == "source":
            short = [_short_name(value, common) for value in values.to_pylist()]
            table = table.set_column(number, name, pa.array(short, pa.string()))
        elif name == "messages":
            turns = [
                None if value is None else [{"role": role, "content": text} for role, text in turns_from_json(value)]
                for value in values.to_pylist()
            ]
            table = table.set_column(number, name, pa.array(turns, MESSAGES))
    return table


def _card(
    export: ExportConfig, settings: CorpusConfig, account: dict[str, Any], common: str, files: dict[str, dict[str, Any]]
) -> str:
    """The card in Markdown: splits, sources, what was changed and dropped, settings and checksums."""
    splits = {split: amounts for split, amounts in account["by_split"].items() if amounts["documents"]}
    data_files = [{"split": SPLIT_NAMES[split], "path": f"data/{SPLIT_NAMES[split]}-*.parquet"} for split in splits]
    head: dict[str, Any] = {"license": export.license} if export.license else {}
    head |= {"tags": ["textmill"], "configs": [{"config_name": "default", "data_files": data_files}]}
    corpus = settings.model_dump(mode="json")
    lines = [f"---\n{format_yaml(head).rstrip()}\n---\n", f"# {export.name or Path(str(export.folder)).name}\n"]
    lines += ["A corpus prepared with textmill.\n"]
    if not export.license:
        lines += ["No licence was given; ask who made it before you use it.\n"]
    lines += ["| split | documents | bytes | characters |", "|---|---|---|---|"]
    lines += [
        f"| {SPLIT_NAMES[split]} | {one['documents']:,} | {one['bytes']:,} | {one['characters']:,} |"
        for split, one in splits.items()
    ]
    lines += ["\n## Sources\n", "| source | records | kept | dropped | unreadable |", "|---|---|---|---|---|"]
    lines += [
        f"| `{_short_name(source, common)}` | {one['records']:,} | {one['kept']:,} | "
        f"{sum(one['dropped'].values()):,} | {one['quarantined']:,} |"
        for source, one in list(account["by_source"].items())[:SHOWN_SOURCES]
    ]
    if len(account["by_source"]) > SHOWN_SOURCES:
        lines.append(f"\nand {len(account['by_source']) - SHOWN_SOURCES:,} more; each document names its own.")
    lines += ["\n## What was changed and dropped\n", "| | documents |", "|---|---|"]
    lines += [f"| changed by the rule `{rule}` | {number:,} |" for rule, number in account["changed"].items()]
    lines += [f"| dropped: {reason} | {number:,} |" for reason, number in account["dropped"].items()]
    lines += [f"| unreadable | {account['quarantined']:,} |", "\n## Settings\n"]
    lines += [
        f"- `corpus.{key}`: `{json.dumps(corpus[key], ensure_ascii=False)}`" for key in SETTINGS if corpus.get(key)
    ]
    lines += ["\n## SHA-256 of the files\n", "```"]
    lines += [f"{entry['sha256']}  {path}" for path, entry in files.items()]
    return "\n".join([*lines, "```\n"])
