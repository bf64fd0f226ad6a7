"""Laws of the parts of a bisection: what is left is needed, noise is not guessed at, nothing that was tried is lost."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from diagnostics.bisection import pins, search, trials
from diagnostics.bisection.commits import first_bad
from diagnostics.bisection.decisions import ByExitCode, ByFigure, p_value_of_lower
from diagnostics.bisection.delta import minimise
from diagnostics.bisection.logbook import Logbook
from diagnostics.bisection.outcomes import BadInput, CannotBuild, Outcome, State, Trial
from diagnostics.bisection.pins import Change
from diagnostics.bisection.trials import Command, variables_of

ROOT = Path(__file__).parent.parent
GOOD, BAD, CANDIDATE = (State(commit=None, pins=(name,), label=name) for name in ("good", "bad", "candidate"))
DONE = Trial(returncode=0, figure=None, seconds=0.1)


def between(bad: str, goods: Sequence[str]) -> list[str]:
    """Commits in a row that are named by their numbers, the middle one first."""
    inside = list(range(max(map(int, goods)) + 1, int(bad) + 1))
    return [str(one) for one in sorted(inside, key=lambda one: abs(one - (inside[0] + inside[-1]) / 2))]


# Delta debugging and commits, against what is known


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


# Deciding


def played(figures: Callable[[State, int], float]) -> Callable[[str, State, int], Trial]:
    return lambda _stage, state, number: dataclasses.replace(DONE, figure=figures(state, number))


def noisy(means: dict[str, float], spread: float, seed: int) -> Callable[[str, State, int], Trial]:
    drawn = random.Random(seed)
    return played(lambda state, _: drawn.gauss(means[state.label], spread))


def test_the_p_value_is_welchs() -> None:
    low, high = [19.8, 20.4, 19.6, 17.8], [28.2, 26.6, 20.1, 23.3, 25.2, 22.1]
    means, variances = zip(*((sum(x) / len(x), stats.tvar(x) / len(x)) for x in (low, high)), strict=True)
    t = (means[0] - means[1]) / sum(variances) ** 0.5
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (low, high), strict=True))
    assert p_value_of_lower(low, high) == pytest.approx(stats.t.cdf(t, freedom))
    assert not p_value_of_lower([1.0, 1.0 + 1e-15], [1.0, 1.0]) < 0.3
    assert p_value_of_lower([1, 1], [2, 2]) == 0 < p_value_of_lower([2, 2], [1, 1]) == p_value_of_lower([1, 1], [1, 1])


@pytest.mark.parametrize(("mean", "expected"), [(100, Outcome.GOOD), (50, Outcome.BAD), (97, Outcome.GOOD), (53, Outcome.BAD)])
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_noisy_candidate_is_put_to_the_end_it_belongs_to(mean: float, expected: Outcome, *, higher_is_better: bool) -> None:
    means = {"good": 100, "bad": 50, "candidate": mean}
    if not higher_is_better:
        means = {name: 150 - value for name, value in means.items()}
    judge = ByFigure(higher_is_better=higher_is_better)
    run = noisy(means, 3.0, seed=1)
    judge.check_ends(run, GOOD, BAD)
    assert judge.outcome(run, CANDIDATE) is expected


def test_noise_that_hides_the_difference_is_undecided_never_guessed() -> None:
    judge, means = ByFigure(), {"good": 100.0, "bad": 50.0, "candidate": 75.0}
    judge.check_ends(noisy(means, 1.0, seed=0), GOOD, BAD)
    outcomes = [judge.outcome(noisy(means, 200.0, seed), CANDIDATE) for seed in range(20)]
    assert outcomes.count(Outcome.UNDECIDED) >= 19


def test_a_wrong_decision_is_as_rare_as_the_error_rate_says() -> None:
    judge, means = ByFigure(error_rate=0.05), {"good": 100.0, "bad": 90.0, "candidate": 100.0}
    judge.check_ends(noisy(means, 0.1, seed=0), GOOD, BAD)
    outcomes = [judge.outcome(noisy(means, 8.0, seed), CANDIDATE) for seed in range(60)]
    assert outcomes.count(Outcome.BAD) <= 0.05 * 60
    assert outcomes.count(Outcome.GOOD) > 6


def test_trials_of_ends_and_candidate_take_turns() -> None:
    order: list[str] = []

    def run(_stage: str, state: State, _number: int) -> Trial:
        order.append(state.label)
        return dataclasses.replace(DONE, figure=100.0 if state is not BAD else 50.0)

    judge = ByFigure()
    judge.check_ends(run, GOOD, BAD)
    judge.outcome(run, CANDIDATE)
    assert order == ["good", "bad"] * 3 + ["good", "candidate", "bad"] * 3


@pytest.mark.parametrize("means", [{"good": 50.0, "bad": 100.0}, {"good": 100.0, "bad": 100.0}], ids=["exchanged", "equal"])
def test_ends_that_are_not_as_claimed_are_bad_input(means: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="not seen to be worse"):
        ByFigure().check_ends(noisy(means, 5.0, seed=3), GOOD, BAD)


def test_an_end_without_a_number_is_bad_input_and_a_candidate_without_is_skipped() -> None:
    with pytest.raises(BadInput, match="the good end gave no number"):
        ByFigure().check_ends(lambda *_: DONE, GOOD, BAD)
    judge, run = ByFigure(), played(lambda state, _: 100.0 if state is GOOD else 50.0)
    judge.check_ends(run, GOOD, BAD)
    assert judge.outcome(lambda *asked: DONE if asked[1] is CANDIDATE else run(*asked), CANDIDATE) is Outcome.SKIPPED


def test_an_end_that_fails_for_once_spoils_its_round_only() -> None:
    judge, run = ByFigure(), played(lambda state, _: 50.0 if state is BAD else 100.0)
    judge.check_ends(run, GOOD, BAD)
    asked: list[int] = []

    def failing(stage: str, state: State, number: int) -> Trial:
        asked.append(number)
        return DONE if state is GOOD and number == 1 else run(stage, state, number)

    assert judge.outcome(failing, CANDIDATE) is Outcome.GOOD
    assert max(asked) == 3
    assert judge.outcome(lambda *given: DONE if given[1] is GOOD else run(*given), CANDIDATE) is Outcome.UNDECIDED


def exits(codes: dict[str, list[int]]) -> Callable[[str, State, int], Trial]:
    return lambda _stage, state, number: dataclasses.replace(
        DONE, returncode=codes[state.label][number % len(codes[state.label])]
    )


@pytest.mark.parametrize(
    ("codes", "told"),
    [({"good": [1], "bad": [1]}, "the good end fails"), ({"good": [0], "bad": [0]}, "the bad end passes, 2 of 2"),
     ({"good": [0, -11], "bad": [1]}, "the good end fails"), ({"good": [125], "bad": [1]}, "cannot be judged")],
)  # fmt: skip
def test_ends_that_do_not_fail_and_pass_as_claimed_are_bad_input(codes: dict[str, list[int]], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        ByExitCode(repeats=2).check_ends(exits(codes), GOOD, BAD)


def test_a_failure_that_does_not_always_happen_needs_more_passes() -> None:
    codes = {"good": [0], "bad": [0, 1], "candidate": [0, 0, 0, 0, 1]}
    judge = ByExitCode(repeats=4)
    judge.check_ends(exits(codes), GOOD, BAD)  # fails half of the time: 7 passes leave less than 1 %
    assert judge.outcome(exits(codes), CANDIDATE) is Outcome.BAD
    asked: list[int] = []
    run = exits({**codes, "candidate": [0]})
    assert judge.outcome(lambda *given: (asked.append(given[2]), run(*given))[1], CANDIDATE) is Outcome.GOOD
    assert len(asked) == 7
    few = ByExitCode(repeats=4, max_repeats=5)
    few.check_ends(exits(codes), GOOD, BAD)
    assert few.outcome(run, CANDIDATE) is Outcome.UNDECIDED
    assert few.outcome(exits({"candidate": [125]}), CANDIDATE) is Outcome.SKIPPED


# Versions


def test_pins_are_read_as_pip_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "good.txt"
    path.write_text(
        "# made by pip freeze\nTorch==2.11.0+cu128\nruamel.yaml==1.0 \\\n    --hash=sha256:abc\n"
        "old==1; python_version < '3'\nmine @ https://h/mine.whl # note\n\n"
    )
    assert pins.read(path) == {"torch": "2.11.0+cu128", "ruamel-yaml": "1.0", "mine": "https://h/mine.whl"}


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file"), (b"", "pins nothing"), (b"\xff\x00", "is no text"), (b"torch>=2", "no exact version"),
     (b"torch", "no exact"),
     (b"torch==2.*", "no exact version"), (b"-e .", "cannot stand there"), (b"!!", "is no requirement"),
     (b"a==1\nA==2", "pins a twice"), (b"a[x]==1", "asks for extras")],
)  # fmt: skip
def test_a_file_without_exact_versions_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadInput, match=told):
        pins.read(tmp_path / "x")


@pytest.mark.parametrize(
    "line", ["a[x] @ https://me:plant@h.io/a.whl", "a @ @ https://me:plant@h.io/a", "x" * 10**6, "]" * 10**6]
)
def test_what_is_refused_is_told_in_short_and_without_secrets(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_text(line)
    with pytest.raises(BadInput) as refused:
        pins.read(tmp_path / "x")
    assert "plant" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_changes_are_those_that_differ_and_some_can_be_applied() -> None:
    good, bad = {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "1", "d": "https://u:secretpw@h/d.whl"}
    added = Change(name="d", before=None, after=bad["d"])
    assert pins.changes(good, bad) == [Change(name="a", before="1", after="2"), Change(name="c", before="1", after=None), added]
    assert pins.applied(good, [added]) == ("a==1", "b==1", "c==1", f"d @ {bad['d']}")
    assert added.sentence == "d absent → https://***@h/d.whl"


# The journal


def test_what_was_tried_is_there_again_and_a_cut_off_line_is_not(tmp_path: Path) -> None:
    with Logbook(tmp_path, {"asked": 1}) as book:
        book.add_trial("ends", "x", 0, DONE)
        book.add_unbuildable("k", "why")
    with book.path.open("a") as file:
        file.write('{"kind": "trial", "sta')
    with Logbook(tmp_path, {"asked": 1}) as again:
        assert (again.trials, again.unbuildable) == ({("ends", "x", 0): DONE}, {"k": "why"})
        assert "cut off" in again.notes[0]
        again.add_trial("ends", "x", 1, DONE)
    with Logbook(tmp_path, {"asked": 1}) as last:
        assert len(last.trials) == 2


@pytest.mark.parametrize(
    "line", ["{", "[" * 100_000, "[]", '{"kind": "trial"}', '{"kind": "new"}', '{"kind": "question", "asked": 2}']
)
def test_a_damaged_journal_is_refused_and_left_as_it_is_until_told_otherwise(tmp_path: Path, line: str) -> None:
    with Logbook(tmp_path, {"asked": 1}) as book:
        pass
    with book.path.open("a") as file:
        file.write(line + "\n")
    before = book.path.read_bytes()
    with pytest.raises(BadInput, match=r"damaged.*--fresh"), Logbook(tmp_path, {"asked": 1}):
        pass
    assert book.path.read_bytes() == before
    with Logbook(tmp_path, {"asked": 1}, fresh=True) as anew:
        assert anew.trials == {}


def test_a_journal_of_another_question_or_in_use_is_refused(tmp_path: Path) -> None:
    with Logbook(tmp_path, {"asked": 1}), pytest.raises(BadInput, match="running already"), Logbook(tmp_path, {"asked": 1}):
        pass
    with pytest.raises(BadInput, match="another question"), Logbook(tmp_path, {"asked": 2}):
        pass


def test_a_command_that_outlived_its_bisection_is_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(("sleep", "300"), start_new_session=True)
    try:
        with Logbook(tmp_path, {}) as book:
            book.started(process.pid)
        with Logbook(tmp_path, {}) as again:
            assert f"ended process {process.pid}" in again.notes[0]
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


# Trials


def run_command(tmp_path: Path, script: str, *, metric: str | None = None, timeout_seconds: float | None = None) -> Trial:
    found = re.compile(metric) if metric else None
    command = Command(arguments=("sh", "-c", script), metric=found, timeout_seconds=timeout_seconds)
    return command.run(directory=tmp_path, variables=dict(os.environ), log=tmp_path / "log", started=lambda _: None)


def test_the_last_number_counts_and_only_of_a_run_that_ended_well(tmp_path: Path) -> None:
    script = "echo 'rate: 1,000.5'; echo 'rate: 2,000.5' >&2; echo end hf_AbCdEfGhIjKlMnOpQrStUvWx"
    trial = run_command(tmp_path, script, metric=r"rate: ([\d.,]+)")
    assert (trial.figure, trial.last_line) == (2000.5, "end ***")
    assert run_command(tmp_path, f"{script}; exit 1", metric=r"rate: ([\d.,]+)").figure is None
    assert run_command(tmp_path, "echo rate: x", metric=r"rate: (\w)").figure is None


def test_a_command_that_takes_too_long_ends_with_all_its_children(tmp_path: Path) -> None:
    trial = run_command(tmp_path, "sleep 300 & echo $! > child; wait", timeout_seconds=0.5)
    assert trial.timed_out
    assert trial.failed
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


def test_a_run_is_over_only_when_nothing_that_it_started_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(trials, "_is_alive", lambda group: asked.append(group) or len(asked) < 3)
    assert run_command(tmp_path, "sleep 300 & exit 0").returncode == 0
    assert len(asked) == 3


def test_a_command_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    command = Command(arguments=("no-such-command",), metric=None, timeout_seconds=None)
    with pytest.raises(BadInput, match="cannot run 'no-such-command'"):
        command.run(directory=tmp_path, variables=dict(os.environ), log=tmp_path / "log", started=lambda _: None)


def test_a_fixed_python_is_refused_where_environments_are_compared(tmp_path: Path) -> None:
    variables = variables_of(tmp_path / "bin" / "python", root=None, worktree=None, cache=tmp_path)
    command = Command(arguments=(sys.executable, "-V"), metric=None, timeout_seconds=None)
    with pytest.raises(BadInput, match="write `python`"):
        command.run(directory=tmp_path, variables=variables, log=tmp_path / "log", started=lambda _: None)


def test_imports_come_from_the_worktree_not_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, worktree = tmp_path / "root", tmp_path / "tree"
    (worktree / "src").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{root}/lib:/opt/other")
    variables = variables_of(None, root=root, worktree=worktree, cache=tmp_path)
    assert variables["PYTHONPATH"] == f"{worktree}/src:{worktree}:{worktree}/lib:/opt/other"


# The whole search, with played trials


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
