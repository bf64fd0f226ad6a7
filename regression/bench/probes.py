"""What fxprobe costs: training under it beside training without, in turns, off on on off.

    python -m regression.bench probes

Each run is a fresh process, measured when it is steady. The spread between
the two runs without probes is what the machine makes of two equal things: a loss below it says nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from regression.bench import settings as bench
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.bench.training import train

TURNS = ("off", "on", "on", "off")


def measure(settings: Settings) -> Result:
    """Run four times."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="probes-") as scratch:
        place = Path(scratch)
        for number, turn in enumerate(TURNS):
            report = str(place / f"{number}.json")
            before = ("-m", "diagnostics.fxprobe", "--json", report, "--progress", "0", "--") if turn == "on" else ()
            run = train(settings, place / str(number), seconds=settings.run_seconds, segments=2, before=before)
            rates[turn].append(run.tokens_per_second)
    off, on = (sum(rates[turn]) / 2 for turn in ("off", "on"))
    figures = (
        Figure(name="without probes", value=off, unit="tok/s", better="higher"),
        Figure(name="under fxprobe", value=on, unit="tok/s", better="higher"),
        Figure(name="on over off", value=on / off, unit="share", better="higher", goal=settings.goal(0.995)),
        Figure(name="spread of the two runs without", value=abs(rates["off"][1] / rates["off"][0] - 1), unit="share"),
    )
    return Result(
        bench="probes", shape=settings.shape, device=str(settings.device), figures=figures, details={"tokens_per_second": rates}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("probes", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
