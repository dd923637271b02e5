"""The losses of runs as a picture: a panel for each, what was trained on as a thin line, the valid split as points.

python bench/curves.py OUT.svg TITLE=RUN_FOLDER_OR_METRICS.jsonl ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDE, HIGH, LEFT, RIGHT, TOP, BELOW = 420, 300, 46, 14, 34, 40
"""Pixels of a panel and of what is around its drawing."""
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """One run's losses by step."""

    title: str
    train: Points
    valid: Points

    @property
    def lowest(self) -> tuple[float, float]:
        """Where the valid loss was least."""
        return min(self.valid, key=lambda point: point[1])


def read(title: str, where: Path) -> Curves:
    """A run's curves from its metrics."""
    lines = [
        json.loads(line)
        for line in (where / "metrics.jsonl" if where.is_dir() else where).read_text(encoding="utf-8").splitlines()
    ]
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return Curves(title, train, [(line["step"], line["valid_loss"]) for line in lines if "valid_loss" in line])


def panel(curves: Curves, left: int) -> list[str]:
    """The drawing of one run."""
    every = [*curves.train, *curves.valid]
    most_x, most_y = max(x for x, _ in every), max(y for _, y in every)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = left + LEFT + (WIDE - LEFT - RIGHT) * point[0] / most_x
        return round(x, 1), round(TOP + (HIGH - TOP - BELOW) * (1 - point[1] / most_y), 1)

    def line(points: Points, look: str) -> str:
        return f'<polyline fill="none" {look} points="{" ".join(f"{x},{y}" for x, y in map(at, points))}"/>'

    drawn = [f'<text x="{left + LEFT}" y="20" font-weight="bold">{escape(curves.title)}</text>']
    for number in range(5):
        (x, _), (_, y) = at((most_x * number / 4, 0)), at((0, most_y * number / 4))
        drawn += [
            f'<line x1="{left + LEFT}" x2="{left + WIDE - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{left + LEFT - 6}" y="{y + 4}" text-anchor="end">{most_y * number / 4:.1f}</text>',
            f'<text x="{x}" y="{HIGH - BELOW + 16}" text-anchor="middle">{most_x * number / 4:,.0f}</text>',
        ]
    x, y = at(curves.lowest)
    drawn += [
        line(curves.train, 'stroke="#9ab" stroke-width="1"'),
        line(curves.valid, 'stroke="#c40" stroke-width="2"'),
    ]
    drawn += [f'<circle cx="{cx}" cy="{cy}" r="3" fill="#c40"/>' for cx, cy in map(at, curves.valid)]
    drawn.append(f'<text x="{x}" y="{y - 9}" text-anchor="middle" fill="#c40">{curves.lowest[1]:.3f}</text>')
    return drawn


def picture(runs: list[Curves]) -> str:
    """All panels side by side, on white: a page may be dark."""
    wide = WIDE * len(runs)
    told = f'<text x="{LEFT}" y="{HIGH - 6}">steps; <tspan fill="#789">loss in training</tspan>, <tspan fill="#c40">valid loss</tspan></text>'
    panels = [part for number, curves in enumerate(runs) for part in panel(curves, number * WIDE)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {HIGH}" width="{wide}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{wide}" height="{HIGH}" fill="white"/>', *panels, told, "</svg>"]) + "\n"


def main(words: list[str]) -> None:
    """Draw what is named."""
    runs = [read(title, Path(where)) for title, _, where in (word.partition("=") for word in words[1:])]
    Path(words[0]).write_text(picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
