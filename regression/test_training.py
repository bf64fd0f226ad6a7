"""What fails a build, measured by one real training run: `pytest regression/ [--gpus N]`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from regression.measurement import REQUIRED_KEYS, Measurement

# The first test waits for data and training in fresh processes, which have their own time-outs.
pytestmark = pytest.mark.timeout(4800)


def test_training_reports_every_number(measure: Measurement, record_property: Callable[[str, object], None]) -> None:
    """The last line of standard output is the contract of every consumer."""
    for key in REQUIRED_KEYS:
        assert key in measure.result, f"the training run reports no {key}"
        record_property(key, measure.result[key])
    assert measure.tokens_per_second is not None, f"tokens_per_second is {measure.result['tokens_per_second']!r}"


def test_training_meets_no_fx_error(measure: Measurement) -> None:
    """No thread met another's trace, and nothing is left patched."""
    assert measure.result["fx_errors"] == 0, measure.result.get("fx_error_messages")


def test_training_compiles_nothing_after_the_warm_up(measure: Measurement) -> None:
    """A recompile in the middle of a run is what makes threads collide."""
    assert measure.result["recompiles_after_warmup"] == 0


def test_training_never_falls_back_to_uncompiled_code(measure: Measurement) -> None:
    """Uncompiled attention is slower by several times, silently."""
    assert measure.result["fallbacks"] == 0


def test_training_has_no_other_problem(measure: Measurement) -> None:
    """Exit code and finite numbers."""
    assert measure.problems() == []
