"""Laws of a bisection: what is left is needed, and the whole search finds it, also with parts that cannot be built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics.bisection import search
from diagnostics.bisection.commits import first_bad
from diagnostics.bisection.decisions import ByExitCode
from diagnostics.bisection.delta import minimise
from diagnostics.bisection.logbook import Logbook
from diagnostics.bisection.outcomes import BadInput, CannotBuild, Outcome, State, Trial

GOOD, BAD = (State(commit=None, pins=(name,), label=name) for name in ("good", "bad"))
DONE = Trial(returncode=0, figure=None, seconds=0.1)


def between(bad: str, goods: Sequence[str]) -> list[str]:
    """Commits in a row that are named by their numbers, the middle one first."""
    inside = list(range(max(map(int, goods)) + 1, int(bad) + 1))
    return [str(one) for one in sorted(inside, key=lambda one: abs(one - (inside[0] + inside[-1]) / 2))]


@settings(deadline=None)
@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=4))))
def test_exactly_the_changes_that_are_needed_are_left(case: tuple[int, set[int]]) -> None:
    count, needed = case
    least = minimise(range(count), lambda part: Outcome.BAD if needed <= set(part) else Outcome.GOOD)
    assert (set(least.changes), least.doubts) == (needed, ())


@settings(deadline=None)
@given(st.integers(2, 10), st.data())
def test_what_cannot_be_built_is_stepped_around_and_doubted(count: int, data: Any) -> None:
    culprit = data.draw(st.integers(0, count - 1))
    partner = data.draw(st.integers(0, count - 1).filter(lambda one: one != culprit))

    def outcome_of(part: Sequence[int]) -> Outcome:
        if (culprit in part) != (partner in part):
            return Outcome.UNBUILDABLE
        return Outcome.BAD if culprit in part else Outcome.GOOD

    least = minimise(range(count), outcome_of)
    assert set(least.changes) == {culprit, partner}
    assert least.doubts == (Outcome.UNBUILDABLE, Outcome.UNBUILDABLE)


def test_no_part_is_asked_for_twice() -> None:
    asked: list[tuple[int, ...]] = []

    def outcome_of(part: tuple[int, ...]) -> Outcome:
        asked.append(part)
        return Outcome.BAD if {3, 11} <= set(part) else Outcome.GOOD

    minimise(range(16), outcome_of)
    assert len(asked) == len(set(asked))


@settings(deadline=None)
@given(st.integers(2, 30), st.data())
def test_the_first_bad_commit_is_found_or_is_among_those_told(count: int, data: Any) -> None:
    culprit = data.draw(st.integers(1, count))
    skipped = data.draw(st.sets(st.integers(1, count - 1)))
    judged: list[int] = []

    def outcome_of(commit: str) -> Outcome:
        judged.append(int(commit))
        return Outcome.SKIPPED if int(commit) in skipped else Outcome.BAD if int(commit) >= culprit else Outcome.GOOD

    found = first_bad("0", str(count), between=between, outcome_of=outcome_of)
    assert len(judged) == len(set(judged))
    if found.culprit is not None:
        assert int(found.culprit) == culprit
    else:
        assert str(culprit) in found.among
        assert {int(one) for one in found.among} - {max(map(int, found.among))} <= skipped
    assert (found.culprit is None) == bool({culprit, culprit - 1} - {0, count} & skipped)


class Played(search.Search):
    """Trials come from `verdict(commit, new packages)`; `refused` are sets of packages that cannot be built."""

    def __init__(
        self, tmp_path: Path, logbook: Logbook, verdict: Callable[[int, set[str]], bool], refused: Any = lambda _: False
    ) -> None:
        repository = SimpleNamespace(between=between, described=lambda commit: f"number {commit}")
        super().__init__(
            question=search.Question(good_commit="0", bad_commit="8", good_pins=dict.fromkeys("abc", "1"),
                                     bad_pins=dict.fromkeys("abc", "2")),
            command=SimpleNamespace(), judge=ByExitCode(), logbook=logbook, directory=tmp_path, cache=tmp_path,
            environments=SimpleNamespace(python_of=lambda _: tmp_path / "bin" / "python"),
            worktrees=SimpleNamespace(repository=repository),
            tell=lambda _: None,
        )  # fmt: skip
        self._verdict, self._refused = verdict, refused

    def _place(self, state: State) -> tuple[None, None]:
        if self._refused(self._new(state)):
            raise CannotBuild("refused")
        return None, None

    def _run(self, state: State) -> Trial:
        return dataclasses.replace(DONE, returncode=int(self._verdict(int(state.commit or 0), self._new(state))))

    @staticmethod
    def _new(state: State) -> set[str]:
        return {pin[0] for pin in state.pins or () if pin.endswith("==2")}


@pytest.mark.parametrize(
    ("verdict", "packages", "commits", "note"),
    [(lambda _, new: "b" in new, ["b"], [], "packages alone"), (lambda commit, _: commit >= 5, [], ["number 5"], ""),
     (lambda commit, new: commit >= 5 and "c" in new, ["c"], ["number 5"], "takes both"),
     (lambda _, new: {"a", "c"} <= new, ["a", "c"], [], "together only")],
    ids=["packages", "commits", "both together", "two packages"],
)  # fmt: skip
def test_packages_and_commits_are_told_apart(
    tmp_path: Path, verdict: Any, packages: list[str], commits: list[str], note: str
) -> None:
    with Logbook(tmp_path, {}) as book:
        found = Played(tmp_path, book, verdict).run()
    assert ([change.name for change in found.packages], found.commits) == (packages, commits)
    assert found.is_decided
    assert note in " ".join(found.notes)


def test_packages_that_cannot_be_installed_apart_are_named_together_and_counted(tmp_path: Path) -> None:
    with Logbook(tmp_path, {}) as book:
        asked = Played(tmp_path, book, lambda _, new: "b" in new, refused=lambda new: ("b" in new) != ("c" in new))
        found = asked.run()
    assert [change.name for change in found.packages] == ["b", "c"]
    assert "these 2 packages cannot be installed apart" in found.notes
    assert asked.num_unbuildable > 0


def test_an_end_that_cannot_be_built_is_bad_input(tmp_path: Path) -> None:
    with Logbook(tmp_path, {}) as book, pytest.raises(BadInput, match="the bad end cannot be built: refused"):
        Played(tmp_path, book, lambda *_: True, refused=lambda new: len(new) == 3).run()


def test_a_search_that_is_repeated_runs_nothing_and_finds_the_same(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with Logbook(tmp_path, {}) as book:
            asked = Played(tmp_path, book, lambda commit, new: commit >= 5 and "c" in new)
            found.append((asked.run(), [one.is_new for one in asked.evidence]))
    assert found[0][0] == found[1][0]
    assert all(found[0][1])
    assert not any(found[1][1])
