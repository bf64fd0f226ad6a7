"""The words that the gate and the watch decide with, and their exit codes. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What was decided. Only `PASS`, `WIN` and `CLEARED` let a build through."""

    PASS = "PASS"  # noqa: S105 - a verdict, no password
    WIN = "WIN"  # faster: record a new baseline
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"  # one night below the limit, not confirmed yet
    CLEARED = "CLEARED"  # below the limit, but the baseline build is as slow tonight: the machine, not the code
    HARDWARE = "HARDWARE"  # throughput and control workloads disagree: the machine changed, nothing is known of the code
    UNKNOWN = "UNKNOWN"  # more pairs are needed
    INVALID = "INVALID"  # the measurement does not count
    INSUFFICIENT = "INSUFFICIENT"  # not enough data to decide, and no more to come

    @property
    def exit_code(self) -> int:
        """Of a command: 0 fine, 1 a regression, 3 not decided."""
        if self in {Kind.PASS, Kind.WIN, Kind.CLEARED}:
            return 0
        return 1 if self is Kind.FAIL else 3
