"""Simulated measurements on a machine whose speed wanders: what the control workloads are worth. Part of `regression.simulate`.

What decides is `watch.replay`; invented are only the numbers. A measurement is ln T = machine + noise, its two controls are
ln C = machine + noise of their own: what slows the one slows the others by as much. Known limit: on a real machine it may not,
for instance where a neighbour uses the memory and not the cores; then the corrected limit is wide, and the verdict HARDWARE.

- The front door: a recorded baseline of 5 measurements; a measurement below a limit is made again, at most 3 in all.
- The nights: a machine that takes another speed, within 10 % of the usual, every tenth night.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np

from regression.baseline import MEASUREMENTS
from regression.measurement import ATTEMPTS
from regression.verdict import Kind
from regression.watch import WINDOW, Night, replay

MEASUREMENT_SD = CONTROL_SD = 0.01
MACHINE_RANGE, MACHINE_CHANGES = 0.10, 0.1  # speeds of a machine around the usual; nights on which it takes another
_START = datetime(2026, 1, 1, tzinfo=UTC)


def night(
    number: int, loss: float, machine: float, generator: np.random.Generator, *, controls: bool, sd: float, recorded: bool = False
) -> Night:
    """One measurement of code that is slower by `loss`, on a machine of this speed (1: the usual)."""
    measured, *beside = generator.normal(0, [sd, CONTROL_SD, CONTROL_SD]).tolist()
    return Night(
        series="simulated",
        time=_START + timedelta(days=number),
        value=(1 - loss) * machine * math.exp(measured),
        controls=tuple((name, machine * math.exp(noise)) for name, noise in zip(("copy", "matmul"), beside, strict=True))
        if controls
        else (),
        recorded=recorded,
    )


def front_kind(
    loss: float, machine: float, generator: np.random.Generator, *, controls: bool = True, sd: float = MEASUREMENT_SD
) -> Kind:
    """The front door's verdict on code that is slower by `loss`, on a machine that got this fast since the baseline."""
    nights = [night(n, 0.0, 1.0, generator, controls=controls, sd=sd, recorded=True) for n in range(MEASUREMENTS)]
    kind = Kind.SUSPECT
    for attempt in range(ATTEMPTS):
        nights.append(night(MEASUREMENTS + attempt, loss, machine, generator, controls=controls, sd=sd))
        kind = replay(nights)[-1].kind
        if kind not in {Kind.SUSPECT, Kind.HARDWARE}:
            break
    return kind


def alarms(generator: np.random.Generator, *, controls: bool, watched: int) -> tuple[int, int]:
    """Rows of FAILs, and undecided nights, among so many of equal code on a machine that takes another speed now and then."""
    machines = [1.0]
    for _ in range(WINDOW + watched - 1):
        changes = generator.random() < MACHINE_CHANGES
        machines.append(1 + generator.uniform(-MACHINE_RANGE, MACHINE_RANGE) if changes else machines[-1])
    nights = [night(n, 0.0, speed, generator, controls=controls, sd=MEASUREMENT_SD) for n, speed in enumerate(machines)]
    kinds = [verdict.kind for verdict in replay(nights)[WINDOW:]]
    return rows(kinds), sum(kind.exit_code == Kind.HARDWARE.exit_code for kind in kinds)


def rows(kinds: Sequence[Kind]) -> int:
    """How many rows of FAILs there are."""
    return sum(kind is Kind.FAIL and (place == 0 or kinds[place - 1] is not Kind.FAIL) for place, kind in enumerate(kinds))
