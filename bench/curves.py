"""Plot the losses of runs as SVG: a panel per run, training loss as a thin line, valid loss with points.

python bench/curves.py OUT.svg TITLE=RUN_FOLDER_OR_METRICS.jsonl ...
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDE, HIGH, LEFT, RIGHT, TOP, BELOW = 420, 300, 46, 24, 34, 40
"""Pixels of a panel and of its margins."""
HEADROOM = 1.1
"""The upper end of a panel, as a multiple of the first valid loss."""
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """One run's losses by step."""

    title: str
    train: Points
    valid: Points

    @property
    def lowest(self) -> tuple[float, float]:
        """Step and value of the lowest valid loss."""
        return min(self.valid, key=lambda point: point[1])


def read_curves(title: str, where: Path) -> Curves:
    """Read a run's curves from its metrics."""
    lines = [
        json.loads(line)
        for line in (where / "metrics.jsonl" if where.is_dir() else where).read_text(encoding="utf-8").splitlines()
    ]
    train, valid = (
        [(line["step"], line[name]) for line in lines if line.get(name) is not None] for name in ("loss", "valid_loss")
    )
    return Curves(title, train, valid)


def draw_panel(curves: Curves, left: int) -> list[str]:
    """Return the SVG elements of one run."""
    every = [*curves.train, *curves.valid]
    most_x = max(x for x, _ in every)
    # From the lowest loss to a little above the first valid loss: the first steps would hide the rest.
    low, high = math.floor(10 * min(y for _, y in every)) / 10, math.ceil(10 * HEADROOM * curves.valid[0][1]) / 10

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = left + LEFT + (WIDE - LEFT - RIGHT) * point[0] / most_x
        return round(x, 1), round(TOP + (HIGH - TOP - BELOW) * (high - min(point[1], high)) / (high - low), 1)

    def line(points: Points, style: str) -> str:
        return f'<polyline fill="none" {style} points="{" ".join(f"{x},{y}" for x, y in map(at, points))}"/>'

    elements = [f'<text x="{left + LEFT}" y="20" font-weight="bold">{escape(curves.title)}</text>']
    for number in range(5):
        value = low + (high - low) * number / 4
        (x, _), (_, y) = at((most_x * number / 4, low)), at((0, value))
        elements += [
            f'<line x1="{left + LEFT}" x2="{left + WIDE - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{left + LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.1f}</text>',
            f'<text x="{x}" y="{HIGH - BELOW + 16}" text-anchor="middle">{most_x * number / 4:,.0f}</text>',
        ]
    x, y = at(curves.lowest)
    elements += [
        line(curves.train, 'stroke="#9ab" stroke-width="1"'),
        line(curves.valid, 'stroke="#c40" stroke-width="2"'),
    ]
    elements += [f'<circle cx="{cx}" cy="{cy}" r="3" fill="#c40"/>' for cx, cy in map(at, curves.valid)]
    elements.append(f'<text x="{x}" y="{y - 9}" text-anchor="end" fill="#c40">{curves.lowest[1]:.3f}</text>')
    return elements


def draw(runs: list[Curves]) -> str:
    """Return all panels side by side as SVG, on white because the page may be dark."""
    wide = WIDE * len(runs)
    names = '<tspan fill="#789">loss in training</tspan>, <tspan fill="#c40">valid loss</tspan>'
    legend = f'<text x="{LEFT}" y="{HIGH - 6}">steps; {names}</text>'
    panels = [part for number, curves in enumerate(runs) for part in draw_panel(curves, number * WIDE)]
    size = f'viewBox="0 0 {wide} {HIGH}" width="{wide}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{wide}" height="{HIGH}" fill="white"/>', *panels, legend, "</svg>"]) + "\n"


def main(arguments: list[str]) -> None:
    """Draw the named runs."""
    runs = [
        read_curves(title, Path(where)) for title, _, where in (argument.partition("=") for argument in arguments[1:])
    ]
    Path(arguments[0]).write_text(draw(runs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
