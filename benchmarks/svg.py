"""Charts as SVG that a page holds in itself: no script, no font, and colours that the page's style decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 440, 250  # units of the drawing, few of them so that its words can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 38  # room around a plot
COLOURS = ("#0f8b8d", "#d1702e", "#7a6ff0", "#b8527f", "#5f8f2e", "#b08900", "#4a90d9", "#8a8a8a")
IDEAL = "if none waited"
"""The end of the name of a line that is dashed."""
Point = tuple[float, float]


def bars(groups: Mapping[str, Sequence[tuple[str, float, str]]], title: str) -> str:
    """Groups of bars, each with its name, its value, and that in words; the longest of every group is as long."""
    drawn, top = [], 0
    for group, rows in groups.items():
        drawn.append(f'<text x="0" y="{top + 16}" font-weight="600">{escape(group)}</text>')
        for number, (name, value, words) in enumerate(rows):
            top += 24
            width = max(1.0, (WIDTH - 250) * value / (max(most for _, most, _ in rows) or 1))
            colour = COLOURS[number % len(COLOURS)]
            drawn.append(f'<text x="0" y="{top + 13}">{escape(name)}</text>')
            drawn.append(f'<rect fill="{colour}" x="180" y="{top + 3}" width="{width:.1f}" height="12"/>')
            drawn.append(f'<text x="{186 + width:.1f}" y="{top + 13}">{escape(words)}</text>')
        top += 34
    return _svg(top, title, drawn)


def curves(series: Mapping[str, Sequence[Point]], title: str, across: str, up: str, log: bool = False) -> str:
    """A line through the points of each series; an ideal one is dashed. Speeds begin at 0, losses do not."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    scale: Callable[[float], float] = math.log2 if log else float
    low_x, low_y = min(scale(x) for x, _ in points), 0.0 if log else min(y for _, y in points)
    wide = max(scale(x) for x, _ in points) - low_x or 1.0
    high = max(y for _, y in points) - low_y or 1.0

    def place(x: float, y: float) -> Point:
        right = LEFT + (WIDTH - LEFT - RIGHT) * (scale(x) - low_x) / wide
        return right, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low_y) / high

    drawn = []
    for y in ticks(low_y, low_y + high):
        _, down = place(points[0][0], y)
        drawn.append(f'<path d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>')
        drawn.append(f'<text x="{LEFT - 5}" y="{down + 4:.1f}" text-anchor="end">{y:,.4g}</text>')
    for x in sorted({x for x, _ in points}) if log else ticks(low_x, low_x + wide):
        right, _ = place(x, low_y)
        drawn.append(f'<text x="{right:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:,.4g}</text>')
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(across)}</text>')
    drawn.append(f'<text x="0" y="{HEIGHT - 6}">{escape(up)}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour, dashed = COLOURS[number % len(COLOURS)], ' stroke-dasharray="4 4"' if name.endswith(IDEAL) else ""
        places = [place(*point) for point in line]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>')
        if len(places) <= 20:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        top = HEIGHT + 4 + 16 * number
        drawn.append(f'<rect fill="{colour}" x="0" y="{top}" width="12" height="4"/>')
        drawn.append(f'<text x="18" y="{top + 7}">{escape(name)}</text>')
    return _svg(HEIGHT + 4 + 16 * len(series), title, drawn)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, at most six of them."""
    size = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _svg(height: int, title: str, drawn: Sequence[str]) -> str:
    begin = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return begin + "".join(drawn) + "</svg>"
