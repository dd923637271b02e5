"""The account of every record, and how it is told to a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from textmill.corpus.document import SPLITS
from textmill.files import shown

Counts = dict[str, Any]


def account(names: Sequence[str], read: Sequence[Counts], duplicates: Sequence[int], written: Sequence[Counts]) -> Counts:
    """Add up what became of every record of every piece; `names` says which source each piece is of."""
    by_source: dict[str, Counts] = {}
    by_split: dict[str, Counts] = {split: {"documents": 0, "bytes": 0, "characters": 0} for split in SPLITS}
    for name, counts, copies, splits in zip(names, read, duplicates, written, strict=True):
        kept = sum(split["documents"] for split in splits.values())
        dropped = Counter(counts["dropped"]) + Counter({"duplicate": copies})
        one = by_source.setdefault(name, {"records": 0, "kept": 0, "dropped": {}, "quarantined": 0})
        _add(one, {"records": counts["records"], "kept": kept, "dropped": dropped, "quarantined": counts["quarantined"]})
        for split, amounts in splits.items():
            for key in by_split[split]:
                by_split[split][key] += amounts[key]
    total: Counts = {"records": 0, "kept": 0, "dropped": {}, "quarantined": 0}
    for one in by_source.values():
        _add(total, one)
    assert total["records"] == total["kept"] + sum(total["dropped"].values()) + total["quarantined"], f"a record is lost: {total}"
    return {**total, "by_split": by_split, "by_source": by_source}


def _add(total: Counts, one: Counts) -> None:
    for key in ("records", "kept", "quarantined"):
        total[key] += one[key]
    total["dropped"] = dict(sorted((Counter(total["dropped"]) + Counter(one["dropped"])).items()))


def describe(counts: Counts, folder: Path, shares: Sequence[float]) -> list[str]:
    """The account as lines for a person, with advice where a split came out empty."""
    rules = ", ".join(f"{rule} {number:,}" for rule, number in counts["dropped"].items())
    rows = [
        ("records", counts["records"], f"from {_plural(len(counts['by_source']), 'file')}"),
        ("kept", counts["kept"], ""),
        ("dropped", sum(counts["dropped"].values()), rules),
        ("quarantined", counts["quarantined"], f"see {shown(folder / 'quarantine.jsonl')}" if counts["quarantined"] else ""),
    ]
    for split, amounts in counts["by_split"].items():
        rows.append((split, amounts["documents"], f"documents, {amounts['bytes'] / 1e6:,.2f} MB"))
    lines = [f"prepare: {shown(folder)}"]
    lines += [f"  {name:<12}{number:>14,}  {note}".rstrip() for name, number, note in rows]
    for split, share in zip(SPLITS, shares, strict=True):
        if share and not counts["by_split"][split]["documents"]:
            lines.append(
                f"{split} is empty: {_plural(counts['kept'], 'document')} are too few for its share of {share / sum(shares):.1%}; "
                f"make more and smaller ones with a smaller corpus.section or corpus.documents=block, or raise its share in corpus.split"
            )
    return lines


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
