"""A night in wandb: a mirror of the store, never the truth. Without a key the run is kept offline, for `wandb sync`.

The run's id is the hash of the measurement: mirrored again, it is the same run. A mirror that fails is told and fails nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from regression.laws import Outcome
from regression.measurement import Measurement
from regression.records import canonical, identity_of

MODES = ("auto", "online", "offline", "off")
PROJECT = "dflash-regression"


def mirror(measured: Measurement, outcomes: Mapping[str, Outcome], directory: Path, *, mode: str = "auto") -> str:
    """Write the run, its files to `directory/wandb`; returns what was done or why not, in one sentence."""
    if mode == "off":
        return "not mirrored, --wandb off"
    online = mode == "online" or (mode == "auto" and bool(os.environ.get("WANDB_API_KEY")))
    try:
        return _write(measured, outcomes, directory, "online" if online else "offline")
    except Exception as error:  # noqa: BLE001 - whatever fails in a mirror is told, and the night goes on
        return f"not mirrored: {type(error).__name__}: {error}"


def run_id(measured: Measurement) -> str:
    """The same for equal measurements."""
    return identity_of(canonical(measured.to_record()))[:32]


def numbers(measured: Measurement) -> dict[str, float]:
    """What is worth a line in wandb."""
    counted = ("recompiles_after_warmup", "fallbacks", "fx_errors")
    found: dict[str, Any] = {
        "tokens_per_second": measured.tokens_per_second,
        "tokens_per_second_per_device": measured.per_device,
        **{name: measured.result.get(name) for name in counted},
        **{f"controls/{name}": value for name, value in measured.controls.items()},
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _write(measured: Measurement, outcomes: Mapping[str, Outcome], directory: Path, mode: Literal["online", "offline"]) -> str:
    import wandb  # noqa: PLC0415 - takes a second to import, and only where it is wanted

    identity = run_id(measured)
    run = wandb.init(
        project=PROJECT,
        id=identity,
        name=f"{measured.name}, {measured.time[:16]}",
        group=measured.series,
        dir=str(directory),
        mode=mode,
        resume="allow" if mode == "online" else None,
        config={"series": measured.series, "time": measured.time, "fingerprint": measured.fingerprint},
        settings=wandb.Settings(silent=True, console="off"),
    )
    try:
        run.log(numbers(measured))
        run.summary.update({f"verdict/{name}": outcome.kind for name, outcome in outcomes.items()})
        where = run.url if mode == "online" else run.dir
    finally:
        run.finish()
    return f"mirrored {mode}, run {identity}: {where}"
