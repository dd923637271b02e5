"""The account of every record, and how it is told to a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from textmill.corpus.document import SPLITS
from textmill.storage.files import shown

Counts = dict[str, Any]


def account(
    names: Sequence[str], read: Sequence[Counts], duplicates: Sequence[dict[str, int]], written: Sequence[Counts]
) -> Counts:
    """Add up what became of every record of every piece: its source in `names`, the copies that went, by kind, in `duplicates`."""
    by_source: dict[str, Counts] = {}
    by_split: dict[str, Counts] = {split: {"documents": 0, "bytes": 0, "characters": 0} for split in SPLITS}
    for name, counts, copies, splits in zip(names, read, duplicates, written, strict=True):
        kept = sum(split["documents"] for split in splits.values())
        dropped = Counter(counts["dropped"]) + Counter(copies)
        _add(by_source.setdefault(name, _nothing()), {**counts, "kept": kept, "dropped": dropped})
        for split, amounts in splits.items():
            for key in by_split[split]:
                by_split[split][key] += amounts[key]
    total = _nothing()
    for one in by_source.values():
        _add(total, one)
    assert total["records"] == total["kept"] + sum(total["dropped"].values()) + total["quarantined"], (
        f"a record is lost: {total}"
    )
    return {**total, "by_split": by_split, "by_source": by_source}


def _nothing() -> Counts:
    return {"records": 0, "kept": 0, "changed": {}, "dropped": {}, "quarantined": 0}


def _add(total: Counts, one: Counts) -> None:
    for key in ("records", "kept", "quarantined"):
        total[key] += one[key]
    for key in ("changed", "dropped"):
        total[key] = dict(sorted((Counter(total[key]) + Counter(one[key])).items()))


def describe(counts: Counts, folder: Path, shares: Sequence[float]) -> list[str]:
    """The account as lines for a person, with advice where a split came out empty."""
    rules = {
        key: ", ".join(f"{rule} {number:,}" for rule, number in counts[key].items()) for key in ("changed", "dropped")
    }
    rows = [
        ("records", counts["records"], f"from {_plural(len(counts['by_source']), 'file')}"),
        ("kept", counts["kept"], ""),
        ("dropped", sum(counts["dropped"].values()), rules["dropped"]),
        (
            "quarantined",
            counts["quarantined"],
            f"see {shown(folder / 'quarantine.jsonl')}" if counts["quarantined"] else "",
        ),
    ]
    for split, amounts in counts["by_split"].items():
        rows.append((split, amounts["documents"], f"documents, {amounts['bytes'] / 1e6:,.2f} MB"))
    lines = [f"prepare: {shown(folder)}"]
    lines += [f"  {name:<12}{number:>14,}  {note}".rstrip() for name, number, note in rows]
    if rules["changed"]:
        lines.insert(3, f"  {'changed':<28}{rules['changed']}")
    for split, share in zip(SPLITS, shares, strict=True):
        if share and not counts["by_split"][split]["documents"]:
            lines.append(
                f"{split} is empty: {_plural(counts['kept'], 'document')} are too few for its share of {share / sum(shares):.1%}; "
                f"make more and smaller ones with a smaller corpus.section or corpus.documents=block, or raise its share in corpus.split"
            )
    return lines


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
