"""The line of a series as inline SVG: nights with band and limit, and marks where something changed. Pure; no library.

Every mark has a `<title>`, which a browser shows as a tooltip. Colours are classes of the page's style sheet; kinds differ in
shape, too. The text scales with the picture: made to be 350 to 700 pixels wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from xml.sax.saxutils import escape, quoteattr

from regression.change_points import ChangePoint
from regression.verdict import Kind
from regression.watch import NightVerdict

WIDTH, HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 18, 24
_TICKS = 4


@dataclass(frozen=True)
class _Scales:
    x: Callable[[datetime], float]
    y: Callable[[float], float]
    low: float
    high: float


def svg(
    name: str,
    verdicts: Sequence[NightVerdict],
    *,
    changes: Sequence[ChangePoint] = (),
    environment: Mapping[datetime, str] | None = None,
) -> str:
    """The picture of one series. `environment`: what changed beside the code, by the time of the night that has it first.

    Raises ValueError without a night.
    """
    if not verdicts:
        raise ValueError(f"{name}: no night to draw")
    scales = _scales(verdicts)
    parts = [
        *_axes(verdicts, scales),
        *(part for run in _levels(verdicts) for part in _band(run, scales)),
        *_rules(verdicts, scales, changes, environment or {}),
        _polyline("line", [_place(one, scales) for one in verdicts if one.kind is not Kind.INVALID]),
        *(_mark(one, scales) for one in verdicts),
    ]
    label = quoteattr(f"{name}: {len(verdicts)} nights")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label={label}>{"".join(parts)}</svg>'


def _scales(verdicts: Sequence[NightVerdict]) -> _Scales:
    times = [one.night.time.timestamp() for one in verdicts]
    values = [one.night.value for one in verdicts if one.night.value is not None]
    values += [limit for one in verdicts for limit in (one.limit, _upper(one)) if limit is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room, high + room
    begin, span = min(times), max(times) - min(times)

    def x(time: datetime) -> float:
        share = (time.timestamp() - begin) / span if span else 0.5
        return _LEFT + 6 + share * (WIDTH - _LEFT - _RIGHT - 12)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    return _Scales(x, y, low, high)


def _axes(verdicts: Sequence[NightVerdict], scales: _Scales) -> list[str]:
    parts = []
    for number in range(_TICKS):
        value = scales.low + (scales.high - scales.low) * (number + 0.5) / _TICKS
        y = scales.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
    first, last = verdicts[0].night.time, verdicts[-1].night.time
    parts.append(f'<text x="{_LEFT}" y="{HEIGHT - 7}">{first:%Y-%m-%d}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{last:%Y-%m-%d}</text>')
    parts.append(f'<text x="{_LEFT}" y="11">tok/s per device</text>')
    return parts


def short(value: float) -> str:
    """A number for an axis, 4 digits at most."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.4g}{unit}"
    return f"{value:.4g}"


def _levels(verdicts: Sequence[NightVerdict]) -> list[list[NightVerdict]]:
    """The nights that have a limit, apart where a new level was accepted."""
    levels: list[list[NightVerdict]] = [[]]
    for one in verdicts:
        if one.night.accepted:
            levels.append([])
        if one.limit is not None:
            levels[-1].append(one)
    return [level for level in levels if level]


def _band(level: Sequence[NightVerdict], scales: _Scales) -> list[str]:
    """From the limit to as far above the median; an end is drawn out, so that one night has a band, too."""
    places = [scales.x(one.night.time) for one in level]
    places[0], places[-1] = places[0] - 3, places[-1] + 3
    if len(level) == 1:
        places, level = [places[0] - 3, places[0] + 6], [level[0], level[0]]
    lower = [(x, scales.y(one.limit or 0.0)) for x, one in zip(places, level, strict=True)]
    upper = [(x, scales.y(_upper(one) or 0.0)) for x, one in zip(places, level, strict=True)]
    middle = [(x, scales.y(one.median or 0.0)) for x, one in zip(places, level, strict=True)]
    area = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*lower, *reversed(upper)))
    return [f'<polygon class="band" points="{area}"/>', _polyline("middle", middle), _polyline("limit", lower)]


def _rules(
    verdicts: Sequence[NightVerdict], scales: _Scales, changes: Sequence[ChangePoint], environment: Mapping[datetime, str]
) -> list[str]:
    """Vertical lines: change points, environment changes, accepted levels."""
    shown = {one.night.time for one in verdicts}
    told = [
        *(("environment", time, f"environment: {text}") for time, text in environment.items()),
        *(
            ("change", one.night.time, f"change point: {one.change:+.1%}, from {short(one.before)} to {short(one.after)}")
            for one in changes
        ),
        *(("accepted", one.night.time, f"accepted: {one.night.accepted}") for one in verdicts if one.night.accepted),
    ]
    letters = {"environment": "E", "change": "C", "accepted": "A"}
    shifts = {"environment": -2, "change": 0, "accepted": 2}  # marks of one night stand side by side
    parts = []
    for kind, time, text in told:
        if time in shown:
            x = scales.x(time) + shifts[kind]
            where = f'<text x="{x + 4 * shifts[kind]:.1f}" y="{_TOP - 7}" text-anchor="middle">{letters[kind]}</text>'
            parts.append(
                f'<g class="{kind}"><title>{escape(f"{time:%Y-%m-%d %H:%M} UTC, {text}")}</title>'
                f'<path d="M{x:.1f} {_TOP - 4}V{HEIGHT - _BOTTOM}"/>{where}</g>'
            )
    return parts


def _mark(one: NightVerdict, scales: _Scales) -> str:
    x, y = _place(one, scales)
    value = "no throughput" if one.night.value is None else f"{one.night.value:,.1f} tok/s per device"
    title = escape(f"{one.night.time:%Y-%m-%d %H:%M} UTC, {value}. {one.sentence}")
    return f'<path class="{one.kind}" d="{_SHAPES[one.kind](x, y)}"><title>{title}</title></path>'


def _place(one: NightVerdict, scales: _Scales) -> tuple[float, float]:
    """A night without a throughput lies at the bottom."""
    return scales.x(one.night.time), HEIGHT - _BOTTOM - 4 if one.night.value is None else scales.y(one.night.value)


def _circle(x: float, y: float) -> str:
    return f"M{x - 2.2:.1f} {y:.1f}a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0 -4.4 0z"


def _square(x: float, y: float) -> str:
    return f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z"


def _triangle(x: float, y: float) -> str:
    return f"M{x:.1f} {y + 4:.1f}l4.2 -7.4h-8.4z"


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2z"


def _cross(x: float, y: float) -> str:
    return f"M{x - 3:.1f} {y - 3:.1f}l6 6M{x + 3:.1f} {y - 3:.1f}l-6 6"


_SHAPES = {
    **dict.fromkeys(Kind, _circle),
    Kind.FAIL: _square,
    Kind.SUSPECT: _triangle,
    Kind.CLEARED: _diamond,
    Kind.HARDWARE: _diamond,
    Kind.INVALID: _cross,
}


def _polyline(kind: str, points: Sequence[tuple[float, float]]) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _upper(one: NightVerdict) -> float | None:
    return None if one.median is None or one.limit is None else 2 * one.median - one.limit
