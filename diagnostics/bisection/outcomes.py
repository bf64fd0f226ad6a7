"""What a trial gave, what is concluded about a state, and the two reasons to give up. Standard library only."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Self

SKIP_CODE = 125  # "this state cannot be judged", as for git bisect run


class Outcome(enum.StrEnum):
    """About one state of code and packages."""

    GOOD = "good"
    BAD = "bad"
    UNDECIDED = "undecided"  # too noisy for the trials that were allowed
    SKIPPED = "skipped"  # the command said so, or printed no number
    UNBUILDABLE = "cannot be built"


class BadInput(ValueError):
    """What was asked for makes no sense; the message says what was found and what to do."""


class CannotBuild(RuntimeError):
    """This state cannot be had: the installer refuses the versions, or the commit lacks the folder; the message says why."""


class NotObserved(RuntimeError):
    """Something outside of the question failed (network, disk): nothing can be concluded now."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the command."""

    returncode: int  # negative: the signal that ended it
    figure: float | None  # what --metric found
    seconds: float
    timed_out: bool = False
    last_line: str = ""  # of its output, masked

    @property
    def failed(self) -> bool:
        """Whether it ended other than with 0 or SKIP_CODE."""
        return self.timed_out or self.returncode not in (0, SKIP_CODE)

    @property
    def sentence(self) -> str:
        """What it gave, in a few words."""
        ended = "timed out" if self.timed_out else f"exit code {self.returncode}"
        return f"{ended if self.figure is None else f'{self.figure:g}'} ({self.seconds:.1f} s)"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_dict` wrote. Raises KeyError or TypeError on anything else."""
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class State:
    """Code and packages that the command runs with; None means what is there already."""

    commit: str | None
    pins: tuple[str, ...] | None  # sorted requirement lines
    label: str = dataclasses.field(compare=False)
