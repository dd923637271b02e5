"""The loss curves of runs as one SVG file, for a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from textmill.reports.curves import Point, reduce_points

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
