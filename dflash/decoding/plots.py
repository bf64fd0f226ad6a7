"""Pictures of an evaluation as SVG files that stand alone: acceptance by position, acceptance length by tree budget. No library.

Both are drawn from the summary that `evaluate` writes. Points have tooltips (`<title>`) with their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 360
MOST_LEVELS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 36, 48
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#444444")  # told apart by their dashes, too
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "12 4")


@dataclass(frozen=True)
class Point:
    """One value; `low` and `high` are the ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Points of one kind, in the order of x."""

    name: str
    points: Sequence[Point]


def acceptance_svg(summary: dict[str, Any]) -> str:
    """Conditional acceptance by draft position, a line for the chain and for each tree."""
    lines = [
        Line(name, [Point(k, rate) for k, rate in enumerate(part["acceptance_per_position"], 1) if rate is not None])
        for name, part in _parts(summary)
    ]
    positions = max((len(part["acceptance_per_position"]) for _, part in _parts(summary)), default=0)
    ticks = [(float(k), str(k)) for k in range(1, positions + 1)]
    return _chart("P(position accepted | those before accepted)", "draft position", lines, ticks, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


def budget_svg(summary: dict[str, Any]) -> str:
    """τ with its 95 % interval by tree budget (a logarithmic axis); the chain is a level line."""
    trees = [(math.log2(part["budget"]), part) for part in summary["trees"] if part["tau"] is not None]
    ticks = [(x, str(part["budget"])) for x, part in sorted(trees, key=lambda tree: tree[0])]
    points = [Point(x, part["tau"], *(part["tau_ci95"] or ())) for x, part in sorted(trees, key=lambda tree: tree[0])]
    lines = [Line("trees", points)]
    if summary["tau"] is not None and ticks:
        lines.append(Line("chain", [Point(ticks[0][0], summary["tau"]), Point(ticks[-1][0], summary["tau"])]))
    block_size = summary["block_size"]
    whole = range(block_size, 0, -math.ceil(block_size / MOST_LEVELS))
    return _chart(
        "acceptance length τ", "tree budget (nodes)", lines, ticks, [1.0, *(float(n) for n in reversed(whole) if n > 1)]
    )


def _parts(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("chain", summary), *((f"tree of {part['budget']}", part) for part in summary["trees"])]


def _chart(title: str, x_label: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]], levels: Sequence[float]) -> str:
    first, last = (ticks[0][0], ticks[-1][0]) if ticks else (0.0, 1.0)
    low, high = levels[0], levels[-1]

    def x(value: float) -> float:
        share = (value - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for value in levels:
        parts.append(f'<path stroke="#ddd" d="M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    parts += [
        f'<text x="{x(at):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>' for at, name in ticks
    ]
    for number, line in enumerate(lines):
        parts.append(_draw(line, number, [(x(p.x), y(p.y)) for p in line.points], [_whisker(p, x, y) for p in line.points]))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _whisker(point: Point, x: Any, y: Any) -> str:
    if point.low is None or point.high is None:
        return ""
    return f'<path d="M{x(point.x):.1f} {y(point.low):.1f}V{y(point.high):.1f}"/>'


def _draw(line: Line, number: int, places: Sequence[tuple[float, float]], whiskers: Sequence[str]) -> str:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(_told(line.name, point))}</title></circle>'
        for (x, y), point in zip(places, line.points, strict=True)
    )
    legend_y = _TOP + 8 + 20 * number
    legend = (
        f'<path d="M{WIDTH - _RIGHT + 12} {legend_y}h24" stroke-dasharray="{dash}"/>'
        f'<text x="{WIDTH - _RIGHT + 42}" y="{legend_y + 4}" fill="black" stroke="none">{escape(line.name)}</text>'
    )
    return (
        f'<g stroke="{colour}" fill="none" stroke-width="1.8"><polyline points="{path}" stroke-dasharray="{dash}"/>'
        f"{''.join(whiskers)}{legend}{marks}</g>"
    )


def _told(name: str, point: Point) -> str:
    interval = "" if point.low is None or point.high is None else f" [{point.low:.2f}, {point.high:.2f}]"
    return f"{name}: {point.y:.3f}{interval}"
