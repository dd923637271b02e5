"""Counts as lines with bars."""

from __future__ import annotations

BAR = 40


def show_shares(title: str, counts: dict[str, int], most: int = 12) -> None:
    """A bar for each count, the order kept; what is beyond `most` is summed up."""
    total = sum(counts.values())
    if not total:
        return
    rows = list(counts.items())
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: -row[1])
        rows = [*rows[: most - 1], (f"{len(rows) - most + 1} more", sum(count for _, count in rows[most - 1 :]))]
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, count in rows:
        print(f"  {name:<{width}} {count:>12,} {count / total:>6.1%} {'█' * round(BAR * count / total)}")
