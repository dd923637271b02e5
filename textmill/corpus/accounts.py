"""Count what happened to every record, and print the counts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from textmill.corpus.document import SPLITS
from textmill.storage.files import format_path

Counts = dict[str, Any]
AMOUNTS = ("documents", "bytes", "characters")
"""What is counted of each split."""


def build_account(sources: Iterable[str], read: Iterable[dict[str, Counts]], written: Iterable[Counts]) -> Counts:
    """Sum the counts of all chunks: by source what was read, kept and dropped; by split what was written.

    `sources`: the name that each source is counted under.
    """
    by_source: dict[str, Counts] = {}
    by_split: dict[str, Counts] = {split: dict.fromkeys(AMOUNTS, 0) for split in SPLITS}
    for name in sources:
        by_source.setdefault(name, _empty_counts())["files"] += 1
    for counts_by_source in read:
        for name, counts in counts_by_source.items():
            _add(by_source[name], counts)
    for splits in written:
        for split, amounts in splits.items():
            for key in by_split[split]:
                by_split[split][key] += amounts[key]
    total = _empty_counts()
    for counts_to_add in by_source.values():
        _add(total, counts_to_add)
    kept = sum(amounts["documents"] for amounts in by_split.values())
    assert total["records"] == total["kept"] + sum(total["dropped"].values()) + total["quarantined"], (
        f"the counts do not add up: {total}"
    )
    assert total["kept"] == kept, f"{total['kept']:,} documents are kept, and {kept:,} written"
    return {**total, "by_split": by_split, "by_source": by_source}


def _empty_counts() -> Counts:
    counts: Counts = {"files": 0, "records": 0, "kept": 0, "changed": {}, "dropped": {}}
    return counts | {"quarantined": 0, "quarantined_bytes": 0, "garbled": 0}


def _add(total: Counts, counts_to_add: Counts) -> None:
    for key in ("files", "records", "kept", "quarantined", "quarantined_bytes", "garbled"):
        total[key] += counts_to_add.get(key, 0)
    for key in ("changed", "dropped"):
        total[key] = dict(sorted((Counter(total[key]) + Counter(counts_to_add.get(key, {}))).items()))


def format_account(counts: Counts, folder: Path, ratios: Sequence[float]) -> list[str]:
    """The account as lines to print, with advice for each empty split."""
    lines = [f"prepare: {format_path(folder)}"]
    lines.append(_format_row("records", counts["records"], f"from {format_count(counts['files'], 'file')}"))
    lines.append(_format_row("kept", counts["kept"]))
    if counts["changed"]:
        lines.append(f"  {'changed':<28}{_format_rules(counts['changed'])}")
    lines.append(_format_row("dropped", sum(counts["dropped"].values()), _format_rules(counts["dropped"])))
    if counts["quarantined"]:
        note = f"{format_bytes(counts['quarantined_bytes'])}; see {format_path(folder / 'quarantine.jsonl')}"
        lines.append(_format_row("quarantined", counts["quarantined"], note))
        lines.append(f"{'':<30}the first: {_first_quarantined(folder)}")
    else:
        lines.append(_format_row("quarantined", 0))
    if counts.get("garbled"):
        worst = max(counts["by_source"], key=lambda name: counts["by_source"][name]["garbled"])
        note = f"kept documents have many replacement characters or NUL, most in {worst}: a wrong encoding?"
        lines.append(_format_row("garbled", counts["garbled"], note))
    for name, hits in counts.get("contamination", {}).items():
        short = f", of which {hits['too_short']:,} are too short to recognise" if hits["too_short"] else ""
        note = f"documents share n-grams with {name}: {hits['found']:,} of its {hits['examples']:,} examples{short}"
        lines.append(_format_row("contaminated", hits["documents"], note))
    if kept := counts["split_files"]:
        files = ", ".join(f"{split} {format_count(kept[split], 'file')}" for split in SPLITS if split in kept)
        lines.append(f"  {'own splits':<28}{files} (corpus.own_splits=false pools them)")
    for split, amounts in counts["by_split"].items():
        lines.append(_format_row(split, amounts["documents"], f"documents, {amounts['bytes'] / 1e6:,.2f} MB"))
    for name, source in counts.get("by_name", {}).items():
        documents = sum(source[split]["documents"] for split in SPLITS)
        size = sum(source[split]["bytes"] for split in SPLITS)
        lines.append(_format_row(name, documents, f"documents, {size / 1e6:,.2f} MB"))
    for split, ratio in zip(SPLITS, ratios, strict=True):
        if ratio and not counts["by_split"][split]["documents"]:
            lines.append(
                f"{split} is empty: too few documents ({counts['kept']:,}) for a ratio of "
                f"{ratio / sum(ratios):.1%}; add documents, raise the ratio in corpus.split, or cut plain text into "
                "smaller documents with corpus.section_chars or corpus.documents=block, and records with "
                "corpus.cut_records=true"
            )
    return lines


def _format_row(name: str, number: int, note: str = "") -> str:
    return f"  {name:<12}{number:>14,}  {note}".rstrip()


def _format_rules(counts: dict[str, int]) -> str:
    return ", ".join(f"{rule} {number:,}" for rule, number in counts.items())


def _first_quarantined(folder: Path) -> str:
    """File, place and reason of the first record that could not be read; the reason says what to do."""
    with (folder / "quarantine.jsonl").open(encoding="utf-8") as file:
        row = json.loads(file.readline())
    name = format_path(Path(row["file"])) if os.path.isabs(row["file"]) else row["file"]
    return f"{name}, {row['place']}: {row['reason']}"


def format_bytes(count: int) -> str:
    """A number of bytes for people to read."""
    return f"{count / 1e6:,.2f} MB" if count >= 10_000 else f"{count:,} bytes"


def format_count(number: int, noun: str) -> str:
    """A number of things: "1 file", "1,200 files"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
