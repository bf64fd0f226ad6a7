"""What a bench says: figures with unit, ceiling and goal, as a table and as JSON. Imports no torch.

A bench is a module of this package that is run in a process of its own and prints one JSON line (`Result`) last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number. `ceiling` is what the machine could do at best, in the same unit and measured in the same process."""

    name: str
    value: float | None  # None: could not be measured, `note` says why
    unit: str
    ceiling: float | None = None
    goal: float | None = None
    better: Literal["higher", "lower"] = "lower"
    note: str = ""

    @property
    def share_of_ceiling(self) -> float | None:
        """How near the ceiling, 1 at best; None without one."""
        if self.value is None or self.ceiling is None or not self.value or not self.ceiling:
            return None
        return self.value / self.ceiling if self.better == "higher" else self.ceiling / self.value

    @property
    def meets_goal(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.value is None or self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one bench measured."""

    bench: str
    shape: str
    device: str
    figures: tuple[Figure, ...]
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON values: settings and counts behind the figures

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with shares and goals worked out for readers."""
        values = dataclasses.asdict(self)
        for row, figure in zip(values["figures"], self.figures, strict=True):
            row |= {"share_of_ceiling": figure.share_of_ceiling, "meets_goal": figure.meets_goal}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        known = {f.name for f in dataclasses.fields(Figure)}
        figures = tuple(Figure(**{key: row[key] for key in known}) for row in values["figures"])
        return cls(**{**values, "figures": figures})


def table(result: Result) -> Table:
    """The figures for a terminal."""
    made = Table(title=f"{result.bench}: {result.shape} on {result.device}", title_justify="left")
    for name in ("figure", "value", "unit", "ceiling", "share", "goal", ""):
        made.add_column(name, justify="right" if name in {"value", "ceiling", "share", "goal"} else "left")
    for one in result.figures:
        share = "" if one.share_of_ceiling is None else f"{one.share_of_ceiling:.1%}"
        goal = "" if one.goal is None else f"{'>=' if one.better == 'higher' else '<='} {_number(one.goal)}"
        met = {True: "met", False: "missed", None: ""}[one.meets_goal]
        note = f"{met}{'; ' if met and one.note else ''}{one.note}"
        made.add_row(one.name, _number(one.value), one.unit, _number(one.ceiling, ""), share, goal, note)
    return made


def _number(value: float | None, absent: str = "-") -> str:
    if value is None:
        return absent
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
