"""How long from the start of the process to the first step at full speed: cold, with restored artefacts, and with a warm cache.

    python -m regression.bench warm_start

Three runs of the trainer, each in a fresh process: with an empty compile cache; with the artefacts file that the first one saved
and nothing else, as on another machine of the same kind; and with the first one's whole directory. Starting is not only
compiling: the details say when each phase began. Known limit: the file system's cache is whatever earlier processes left.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from regression.bench import settings as bench
from regression.bench.figures import Figure, Result
from regression.bench.settings import Settings
from regression.bench.training import Run, train


def measure(settings: Settings) -> Result:
    """Start three times."""
    with tempfile.TemporaryDirectory(prefix="warm-start-") as scratch:
        place = Path(scratch)
        seconds = 1.0 if settings.is_real else 0.5
        runs = {"cold": train(settings, place / "cold", cache=place / "cache", seconds=seconds)}
        _copy_artifacts(place / "cache", place / "moved")
        runs["restored"] = train(settings, place / "restored", cache=place / "moved", seconds=seconds)
        runs["warm"] = train(settings, place / "warm", cache=place / "cache", seconds=seconds)
    cold, warm = (runs[name].seconds_to_full_speed for name in ("cold", "warm"))
    figures = [_of(name, run, settings) for name, run in runs.items()]
    figures.append(Figure(name="warm over cold", value=warm / cold, unit="share", goal=settings.goal(0.25)))
    figures += [
        Figure(name=f"{name}: compiling and running everything once", value=run.result["seconds"]["warmup"], unit="s")
        for name, run in runs.items()
    ]
    details = {name: {"phases": run.phases(), "compile_cache": run.result["compile_cache"]} for name, run in runs.items()}
    return Result(bench="warm_start", shape=settings.shape, device=str(settings.device), figures=tuple(figures), details=details)


def _of(name: str, run: Run, settings: Settings) -> Figure:
    goal = settings.goal(15) if name == "warm" else None
    return Figure(name=f"{name}: process start to full speed", value=run.seconds_to_full_speed, unit="s", goal=goal)


def _copy_artifacts(cache: Path, moved: Path) -> None:
    for path in cache.glob("*/artifacts-*.bin"):
        (moved / path.parent.name).mkdir(parents=True)
        shutil.copy(path, moved / path.parent.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this bench alone."""
    return bench.main("warm_start", measure, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
