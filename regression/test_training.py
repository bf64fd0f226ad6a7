"""What fails a build, one item a law: `pytest regression/ --gpus N`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regression import laws
from regression.baseline import BaselineError
from regression.decision import decide
from regression.gate import Verdict
from regression.laws import Outcome
from regression.measurement import Measurement
from regression.verdict import Kind

# The first item waits for whole processes, which have their own time-outs.
pytestmark = pytest.mark.timeout(3 * 3600)
Hold = Callable[[Outcome], None]


class HazardWarning(UserWarning):
    """Traces overlapped and nobody was hurt."""


def test_training_reports_every_number(measured: Measurement, hold: Hold, record_property: Callable[[str, object], None]) -> None:
    """The last line of standard output is the contract of every consumer."""
    for key in laws.REQUIRED_KEYS:
        if isinstance(measured.result.get(key), int | float | str):
            record_property(key, measured.result[key])
    hold(laws.reported(measured))


def test_throughput_has_not_fallen(
    measured: Measurement,
    hold: Hold,
    record_command: str,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
) -> None:
    """Against the measurements of the same workload on the same kind of machine."""
    record_property("measured_tokens_per_second_per_device", measured.per_device)
    record_property("series", measured.series)
    if request.config.getoption("--record-baseline"):
        hold(recorded(request.getfixturevalue("record_new_baseline")))
        return
    if request.config.getoption("--baseline-commit"):
        verdict = request.getfixturevalue("compared")
        for name in ("loss", "interval", "p", "pairs"):
            record_property(name, getattr(verdict, name))
        hold(
            in_pairs(
                verdict, None if request.config.getoption("--burn-share") else request.getfixturevalue("record_new_baseline")
            )
        )
        return
    last, history = request.getfixturevalue("confirmed")  # may measure a second time
    record_property("judged_tokens_per_second_per_device", last.per_device)
    hold(decide(last, history, record=record_command))


def recorded(record: Callable[[], Path]) -> Outcome:
    """Write the baseline, where enough measurements count."""
    try:
        return Outcome(kind="PASS", sentence=f"baseline written, commit it: {record()}")
    except BaselineError as error:
        return Outcome(kind="INSUFFICIENT", sentence=str(error))


def in_pairs(verdict: Verdict, record: Callable[[], Path] | None) -> Outcome:
    """The gate's verdict. A WIN writes the new baseline; without `record` (a planted slowdown) nothing is written."""
    kind: Any = {0: "PASS", 1: "FAIL", 3: "INSUFFICIENT"}[verdict.kind.exit_code]
    sentence = verdict.sentence.removeprefix(f"{kind}: ")
    if verdict.kind is Kind.WIN:
        sentence += f". {recorded(record).sentence}" if record else ". Nothing is written: a slowdown was planted"
    return Outcome(kind=kind, sentence=sentence)


def test_training_meets_no_fx_error(measured: Measurement, hold: Hold) -> None:
    """No thread met another's trace, and nothing is left patched."""
    hold(laws.fx_errors(measured))


@pytest.mark.filterwarnings("default::regression.test_training.HazardWarning")
def test_fxprobe_finds_no_error(probed: dict[str, Any], hold: Hold, record_property: Callable[[str, object], None]) -> None:
    """The same training, watched."""
    outcome = laws.probed(probed)
    record_property("hazards", len(outcome.hazards))
    for hazard in outcome.hazards:
        warnings.warn(hazard, HazardWarning, stacklevel=1)
    hold(outcome)


def test_training_compiles_nothing_after_the_warm_up(measured: Measurement, hold: Hold) -> None:
    """A recompile in the middle of a run is what makes threads collide."""
    hold(laws.recompiles(measured))


def test_training_never_falls_back_to_uncompiled_code(measured: Measurement, hold: Hold) -> None:
    """Uncompiled attention is slower by several times, silently."""
    hold(laws.fallbacks(measured))


def test_memory_does_not_rise(measured: Measurement, hold: Hold) -> None:
    """A leak ends a long run, not a short one."""
    hold(laws.memory(measured))
