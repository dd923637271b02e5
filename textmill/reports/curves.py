"""Curves with few points: averages of neighbouring points for pages, and Braille pictures for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

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
