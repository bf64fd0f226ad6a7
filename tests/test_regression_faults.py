"""Laws of planted faults: each ends a real training run in the way that the law of its name tells apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from regression import faults, laws
from regression.measurement import measure
from regression.spec import RunSpec, workload

NAMES = {"recompile": "recompiles", "fallback": "fallbacks", "race": "fx_errors"}


def spec_with(fault: str) -> RunSpec:
    return workload(0, segments=1, segment_seconds=1.0, fault=fault)


def test_a_fault_changes_the_program_and_not_the_name_of_the_workload(tmp_path: Path) -> None:
    faulty, clean = spec_with("race"), workload(0, segments=1, segment_seconds=1.0)
    assert faulty.name == clean.name
    program, probed = faulty.command(tmp_path)[1:5], faulty.probed_command(tmp_path, tmp_path / "report")
    assert program == ["-m", "regression.faults", "race", "train"]
    assert " ".join(probed).count("-- -m regression.faults race train") == 1


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_planted_fault_fails_the_law_of_its_name_and_no_other_of_the_three(fault: str, tmp_path: Path) -> None:
    measured = measure(spec_with(fault), tmp_path / "run", timeout_seconds=800.0, with_controls=False)
    assert measured.failure is not None
    told = {name: laws.LAWS[name](measured).kind for name in NAMES.values()}
    assert told == {name: "FAIL" if name == NAMES[fault] else "INSUFFICIENT" for name in told}


def test_an_unknown_fault_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(["nothing", "train"]) == 2
    assert "recompile|fallback|race" in capsys.readouterr().err
