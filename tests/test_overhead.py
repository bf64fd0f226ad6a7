"""Laws of diagnostics.overhead: it runs, measures both sides and reports every row. No timing is asserted."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diagnostics import overhead
from diagnostics.patch import FLAG_CHECK

TINY = ["--rounds", "2", "--calls", "3", "--steps", "1", "--step-milliseconds", "1"]


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


def test_probes_are_on_in_one_stretch_of_three_whatever_the_order() -> None:
    seen: list[bool] = []
    work = overhead.Work("counted", lambda: seen.append(bool(FLAG_CHECK._subscribers)), 2, "us", 1e-6, goal=1.0)
    row = overhead.measure(work, 2, {})
    stretch = 2 * work.calls  # the warm-up is as long
    assert seen == [probes for probes in (False, True, False) * 2 for _ in range(stretch)]
    assert row.rounds == 2


def clocked(seconds: Iterator[float], *, goal: float) -> overhead.Row:
    """What is made of stretches that take so long, in the order in which they are timed."""
    times = itertools.chain.from_iterable((0.0, each) for each in seconds)
    work = overhead.Work("clocked", lambda: None, 1, "s", 1.0, goal=goal, clock=lambda: next(times))
    return overhead.measure(work, 20, {})


def test_what_the_probes_add_is_told_from_what_the_machine_does() -> None:
    calm = (10.0, 12.0, 10.0)  # 12: with probes
    disturbed = itertools.cycle((*calm * 3, 50.0, 12.0, 70.0, *calm * 3, 10.0, 90.0, 10.0))
    row = clocked(disturbed, goal=1.0)
    assert (row.without, row.with_probes, row.added[1]) == (10.0, 12.0, 2.0)
    assert row.verdict == "not met"
    assert clocked(itertools.cycle((10.0, 10.5, 10.0)), goal=1.0).verdict == "met"


def test_nothing_is_said_of_a_goal_below_the_noise_floor() -> None:
    favours_one = itertools.cycle((10.0, 10.5, 11.0, 11.0, 10.5, 10.0))  # the side that comes first and last in turns
    assert clocked(favours_one, goal=0.01).verdict == "noise above the goal"
    noisy = itertools.cycle((10.0, 10.0, 13.0, 10.0, 12.0, 13.0, 10.0, 9.0, 10.0, 10.0, 13.0, 10.0))
    assert clocked(noisy, goal=0.01).verdict == "undecided"


def test_a_machine_that_drifts_adds_nothing() -> None:
    row = clocked((10.0 + 0.25 * n for n in itertools.count()), goal=0.125)
    assert row.added == (0.0, 0.0, 0.0)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    work, held = overhead.Work("drawn", lambda: None, 1, "s", 1.0, goal=1.0), 0
    for _ in range(400):
        low, _, high = overhead._added(work, [0.0] * 60, [generator.expovariate(1.0) for _ in range(60)])
        held += low <= math.log(2.0) <= high
    assert 0.93 < held / 400 < 0.985


def test_a_compile_under_the_clock_is_said() -> None:
    sentences: dict[str, None] = {}

    def compile_anew() -> None:
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

    overhead.measure(overhead.Work("compiling", compile_anew, 1, "us", 1e-6, goal=1.0), 2, sentences)
    assert any("was compiled under the clock" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "wrong", [["--rounds", "1"], ["--rounds", "3"], ["--calls", "0"], ["--step-milliseconds", "0"], ["--json", "no/such/x"]]
)
def test_bad_usage_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        overhead.main(wrong)
    assert stopped.value.code == 2
