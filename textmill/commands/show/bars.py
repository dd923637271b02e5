"""Prints counts as a bar chart."""

from __future__ import annotations

BAR_WIDTH = 40


def print_bars(title: str, counts: dict[str, int], max_rows: int = 12) -> None:
    """One bar per count, in the order given; with more than `max_rows` the smallest are summed in one row."""
    total = sum(counts.values())
    if not total:
        return
    rows = list(counts.items())
    if len(rows) > max_rows:
        rows = sorted(rows, key=lambda row: -row[1])
        rows = [
            *rows[: max_rows - 1],
            (f"{len(rows) - max_rows + 1} more", sum(count for _, count in rows[max_rows - 1 :])),
        ]
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, count in rows:
        print(f"  {name:<{width}} {count:>12,} {count / total:>6.1%} {'█' * round(BAR_WIDTH * count / total)}")
