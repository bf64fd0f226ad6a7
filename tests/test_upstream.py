"""Laws of fixtures.upstream, on a small stand-in for a checkout: outcomes are compared test by test, and chance is told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fixtures import upstream
from fixtures.upstream import Outcomes

TESTS = """
import os, pathlib, pytest
from dflash.fx import isolation
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail
def test_fails_as_expected(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_has_a_broken_fixture(broken): pass
def test_left_out(): pass
def test_fails_elsewhere():
    if isolation.is_isolated(): raise ValueError
    raise ValueError
def test_finds_nothing_that_the_other_run_compiled():
    place = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "compiled")
    assert not place.exists()
    place.mkdir(parents=True)
def test_ends_an_isolated_process():
    if isolation.is_isolated(): os._exit(3)
"""
NAME = "fx/test_some.py"


def checkout(path: Path, text: str) -> Path:
    (path / "test" / "fx").mkdir(parents=True)
    (path / "test" / "test_fx.py").write_text("")
    (path / "test" / NAME).write_text(text)
    return path


def test_every_outcome_is_compared_and_a_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "out.json"
    code = upstream.main([str(checkout(tmp_path, TESTS)), "--only", "fx/", "--json", str(file), "-k", "not left_out"])
    (found,) = json.loads(file.read_text())["files"]
    assert {test.removeprefix(f"{NAME}::test_"): outcome for test, outcome in found["isolated"].items()} == {
        "passes": "passed",
        "fails": "failed: AssertionError at test_some.py:5",
        "is_skipped": "skipped",
        "fails_as_expected": "skipped as expected: AssertionError at test_some.py:9",
        "fails_elsewhere": "failed: ValueError at test_some.py:15",
        "has_a_broken_fixture": "error: ValueError at test_some.py:11",
        "finds_nothing_that_the_other_run_compiled": "passed",
        "ends_an_isolated_process": "crash",
    }
    test = f"{NAME}::test_ends_an_isolated_process"
    elsewhere = f"{NAME}::test_fails_elsewhere"
    places = [f"failed: ValueError at test_some.py:{line}" for line in (16, 15)]
    assert found["without"] == {**found["isolated"], test: "passed", elsewhere: places[0]}
    assert found["differences"] == {test: ["passed", "crash"], elsewhere: places}
    said = capsys.readouterr().out
    assert "1 error, 2 failed, 3 passed, 1 skipped," in said
    assert f"{test}: passed without, crash isolated" in said
    assert code == 1


def test_a_file_that_cannot_be_imported_is_an_error_of_its_collection(tmp_path: Path) -> None:
    tests = checkout(tmp_path, "import no_such_module") / "test"
    assert upstream.run(tests, [NAME], [], isolate=False) == {f"{NAME}::collection": "error"}


def play(monkeypatch: pytest.MonkeyPatch, *results: Outcomes) -> None:
    """Runs end like this, one after the other: without, isolated, and again for what differs."""
    coming = iter(results)

    def run(_tests: Path, _targets: Sequence[str], _arguments: Sequence[str], *, isolate: bool) -> Outcomes:
        del isolate
        return next(coming)

    monkeypatch.setattr(upstream, "run", run)


@pytest.mark.parametrize(
    ("results", "differences", "flaky"),
    [
        ([{"t": "failed"}, {"t": "failed"}], {}, []),
        ([{"t": "passed"}, {"t": "failed"}, {"t": "passed"}, {"t": "failed"}], {"t": ("passed", "failed")}, []),
        ([{"t": "failed"}, {"t": "passed"}, {"t": "passed"}, {"t": "passed"}], {}, ["t"]),
        ([{"t": "failed"}, {"t": "passed"}, {"t": "passed"}, {"t": "failed"}], {}, ["t"]),
        ([{"t": "passed"}, {}, {"t": "passed"}, {}], {"t": ("passed", "missing")}, []),
    ],
)
def test_chance_is_told_from_a_difference(
    monkeypatch: pytest.MonkeyPatch, results: list[Outcomes], differences: dict[str, tuple[str, str]], flaky: list[str]
) -> None:
    play(monkeypatch, *results)
    found = upstream.compare(Path(), NAME, [])
    assert (found.differences, found.flaky) == (differences, flaky)


def test_nothing_compared_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = {f"{NAME}::collection": "error"}
    play(monkeypatch, failed, failed)
    assert upstream.main([str(checkout(tmp_path, "")), "--only", "fx/"]) == 3


@pytest.mark.parametrize("arguments", [[], ["--only", "no_such_file"]])
def test_what_is_no_checkout_is_refused(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments:
        checkout(tmp_path, "")
    assert upstream.main([str(tmp_path), *arguments]) == 2
    assert str(tmp_path) in capsys.readouterr().err
