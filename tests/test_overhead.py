"""Laws of diagnostics.overhead: it runs, measures both sides and reports every row. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diagnostics import overhead
from diagnostics.patch import FLAG_CHECK

TINY = ["--repetitions", "2", "--calls", "3", "--steps", "1", "--step-milliseconds", "1"]


def test_the_command_reports_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert overhead.main([*TINY, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"].partition(",")[0], row["goal"], row["goal_unit"]) for row in rows] == [
        ("compiled call", 1.0, "us"),
        ("nn.Module call", 0.1, "us"),
        ("training step", 0.5, "%"),
    ]
    assert all(row["without"] > 0 and row["with_probes"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in rows)
    assert "under 0.1 us" in printed


def test_half_of_the_stretches_run_under_probes() -> None:
    seen: list[bool] = []
    work = overhead.Work("counted", lambda: seen.append(bool(FLAG_CHECK._subscribers)), 1, "us", 1e-6, goal=1.0)
    row = overhead.measure(work, 2, {})
    stretch = overhead._WARM_UP_CALLS + 1
    assert seen == [probes for probes in (False, True, True, False) for _ in range(stretch)]
    assert row.repetitions == 2


def test_a_compile_under_the_clock_is_said() -> None:
    sentences: dict[str, None] = {}

    def compile_anew() -> None:
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

    overhead.measure(overhead.Work("compiling", compile_anew, 1, "us", 1e-6, goal=1.0), 2, sentences)
    assert any("was compiled under the clock" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "wrong", [["--repetitions", "1"], ["--calls", "0"], ["--step-milliseconds", "0"], ["--json", "no/such/x"]]
)
def test_bad_usage_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        overhead.main(wrong)
    assert stopped.value.code == 2
