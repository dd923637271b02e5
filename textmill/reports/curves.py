"""Curves with few points: averages of neighbouring points for pages, and Braille pictures for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""The bits of a Braille character's dots, by row and column."""
BLANK = 0x2800


def reduce_points(points: Sequence[Point], limit: int) -> list[list[float]]:
    """At most `limit` rows of x, mean, lowest and highest value; x is the last one of the points in a row."""
    if not points:
        return []
    values = np.asarray(points, float)
    edges = np.linspace(0, len(values), min(limit, len(values)) + 1).astype(int)
    starts = edges[:-1]
    y = values[:, 1]
    means = np.add.reduceat(y, starts) / np.diff(edges)
    rows = np.stack([values[edges[1:] - 1, 0], means, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)])
    return rows.T.tolist()  # type: ignore[no-any-return]


def draw_curve(points: Sequence[Point], *, width: int, height: int) -> list[str]:
    """A curve as lines of Braille characters with the y-axis at the left; `width` includes the axis."""
    rows = np.asarray([row[:2] for row in reduce_points(points, 4 * width)])
    low = float(rows[:, 1].min())
    high = float(rows[:, 1].max())
    labels = [_label(high), _label(low)]
    axis = max(map(len, labels)) + 1
    dots = _dots(rows, max(8, width - axis), height, low, high)
    names = {0: labels[0], height - 1: labels[1]}
    return [
        f"{names.get(row, ''):>{axis - 1}}┤" + "".join(chr(BLANK + int(cell)) for cell in line)
        for row, line in enumerate(dots)
    ]


def _dots(rows: NDArray[np.float64], columns: int, height: int, low: float, high: float) -> NDArray[np.int64]:
    """The Braille bits of each character; neighbouring points are joined by a line."""
    span_x = max(rows[-1, 0] - rows[0, 0], 1e-12)
    span_y = max(high - low, 1e-12)
    x = (rows[:, 0] - rows[0, 0]) / span_x * (2 * columns - 1)
    y = (high - rows[:, 1]) / span_y * (4 * height - 1)
    places = np.arange(2 * columns)
    heights = np.interp(places, x, y).round().astype(int) if len(rows) > 1 else np.full(len(places), round(y[0]))
    cells = np.zeros((height, columns), np.int64)
    for column in places.tolist():
        before = heights[max(column - 1, 0)]
        for dot in range(min(before, heights[column]), max(before, heights[column]) + 1):
            cells[dot // 4, column // 2] |= DOTS[dot % 4, column % 2]
    return cells


def _label(value: float) -> str:
    return f"{value:.4g}"


WIDTH = 800
HEIGHT = 400
LEFT = 60
RIGHT = 20
TOP = 20
BOTTOM = 40
COLORS = ("#2f8fd8", "#e0662e", "#1fa57a", "#d073ab", "#d99a1c", "#7b8cff", "#a97b4f", "#4fb3c9")
GREY = "#888888"
"""Readable on a white and on a dark page."""
MAX_POINTS = 800
TICKS = 5


@dataclass(frozen=True)
class Curves:
    """Curves as a picture, which a notebook shows, and as text, which any other Python prints."""

    svg: str
    text: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text


def build_svg(curves: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """The curves by name, with axes and a legend; curves without points are left out."""
    rows = {name: reduce_points(points, MAX_POINTS) for name, points in curves.items() if points}
    xs = [row[0] for one in rows.values() for row in one]
    ys = [row[1] for one in rows.values() for row in one]
    x_range = (min(xs), max(xs))
    y_range = (min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * _share(x, *x_range),
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(y, *y_range),
        )

    parts = [*_axes(x_range, y_range, x_label, y_label)]
    for number, (name, one) in enumerate(rows.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(row[0], row[1])) for row in one)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="{path}"/>')
        parts.append(_text(WIDTH - RIGHT, TOP + 16 * (number + 1), name, "end", color))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return "\n".join([head, *parts, "</svg>", ""])


def _axes(x_range: Point, y_range: Point, x_label: str, y_label: str) -> list[str]:
    parts = []
    for number in range(TICKS + 1):
        share = number / TICKS
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        x_value, y_value = (low + (high - low) * share for low, high in (x_range, y_range))
        parts.append(f'<path stroke="{GREY}" stroke-opacity="0.3" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{y_value:.4g}", "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{x_value:,.0f}", "middle"))
    parts.append(_text((WIDTH + LEFT) / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(_text(LEFT, TOP - 6, y_label, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, color: str = GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
