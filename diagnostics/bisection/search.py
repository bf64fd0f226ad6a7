"""The question as a whole: packages, commits, or both, and which of them makes the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnostics.bisection.commits import Worktrees, first_bad
from diagnostics.bisection.coupled import groups
from diagnostics.bisection.decisions import Judge
from diagnostics.bisection.delta import minimise
from diagnostics.bisection.logbook import Logbook
from diagnostics.bisection.outcomes import BadInput, CannotBuild, Outcome, State, Trial
from diagnostics.bisection.pins import Change, applied, changes
from diagnostics.bisection.trials import Command, variables_of
from diagnostics.bisection.venvs import Environments


@dataclass(frozen=True, kw_only=True)
class Question:
    """The two ends; None where nothing of that kind differs."""

    good_commit: str | None
    bad_commit: str | None
    good_pins: dict[str, str] | None
    bad_pins: dict[str, str] | None


@dataclass(kw_only=True)
class Conclusion:
    """What was found. `among` is what could not be narrowed further."""

    commits: list[str] = field(default_factory=list)
    packages: list[Change] = field(default_factory=list)
    among: list[str] = field(default_factory=list)  # sentences
    notes: list[str] = field(default_factory=list)
    ends: str = ""

    @property
    def is_decided(self) -> bool:
        """Whether the culprit is known."""
        return bool(self.commits or self.packages) and not self.among


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One trial, for the report."""

    stage: str
    label: str
    number: int
    trial: Trial
    is_new: bool  # run now, not read from the journal


class Search:
    """Runs trials, each once, and narrows. Results and refusals go to the logbook before they count."""

    def __init__(
        self, *, question: Question, command: Command, judge: Judge, logbook: Logbook, directory: Path, cache: Path,
        environments: Environments | None, worktrees: Worktrees | None, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._question, self._command, self._judge, self._logbook = question, command, judge, logbook
        self._directory, self._cache = directory, cache
        self._environments, self._worktrees, self._tell = environments, worktrees, tell
        self.evidence: list[Evidence] = []
        self.outcomes: dict[str, Outcome] = {}  # by label
        self.num_unbuildable = 0
        self._conclusion = Conclusion()

    def run(self) -> Conclusion:
        """Find the culprit. Raises BadInput before any bisection if the ends are not as claimed, NotObserved."""
        asked = self._question
        good = self._state(asked.good_commit, (), "the good end")
        bad = self._state(asked.bad_commit, self._changes, "the bad end")
        for state in (good, bad):
            try:
                self._place(state)
            except CannotBuild as error:
                raise BadInput(f"{state.label} cannot be built: {error}") from error
        self._conclusion.ends = self._judge.check_ends(self._trial, good, bad)
        self._tell(f"the ends are as claimed: {self._conclusion.ends}")
        if not self._changes:
            self._commits(())
        elif asked.good_commit is None:
            self._packages(None)
        else:
            self._both(asked.good_commit, str(asked.bad_commit))
        return self._conclusion

    @property
    def _changes(self) -> tuple[Change, ...]:
        asked = self._question
        return () if asked.good_pins is None or asked.bad_pins is None else tuple(changes(asked.good_pins, asked.bad_pins))

    def _both(self, good_commit: str, bad_commit: str) -> None:
        """Which of the two kinds it is; or both together."""
        new_packages = self._outcome(self._state(good_commit, self._changes, "the good commit with the bad packages"))
        if new_packages is Outcome.BAD:
            self._packages(good_commit)
            self._note("the packages alone make it bad; a commit that does so too would not be seen")
            return
        new_code = self._outcome(self._state(bad_commit, (), "the bad commit with the good packages"))
        if new_code is Outcome.BAD:
            self._commits(())
            return
        if new_packages is Outcome.GOOD and new_code is Outcome.GOOD:
            self._note("neither the packages nor the commits alone make it bad: it takes both")
            self._commits(self._changes)
            self._packages(bad_commit)
            return
        self._conclusion.among += [
            f"the packages ({len(self._changes)} changes; alone: {new_packages})", f"the commits (alone: {new_code})"
        ]  # fmt: skip

    def _commits(self, with_changes: Sequence[Change]) -> None:
        asked = self._question
        assert self._worktrees is not None
        repository = self._worktrees.repository
        assert asked.good_commit is not None
        assert asked.bad_commit is not None
        found = first_bad(
            asked.good_commit,
            asked.bad_commit,
            between=repository.between,
            outcome_of=lambda commit: self._outcome(self._state(commit, with_changes, f"commit {commit[:12]}")),
        )
        if found.culprit is not None:
            self._conclusion.commits.append(repository.described(found.culprit))
        self._conclusion.among += [f"commit {repository.described(commit)}" for commit in found.among]

    def _packages(self, commit: str | None) -> None:
        environments, asked = self._environments, self._question
        assert environments is not None
        assert asked.good_pins is not None
        every = self._changes
        ends = [environments.python_of(applied(asked.good_pins, some)) for some in ((), every)]
        coupled = groups(every, *ends)

        def outcome_of(part: tuple[tuple[Change, ...], ...]) -> Outcome:
            some = sorted((change for group in part for change in group), key=lambda change: change.name)
            return self._outcome(self._state(commit, some, f"good + {_names(some)}"))

        least = minimise(coupled, outcome_of)
        members = sorted((change for group in least.changes for change in group), key=lambda change: change.name)
        if len(members) > len(least.changes):
            least = minimise([(change,) for change in members], outcome_of)
            members = [change for group in least.changes for change in group]
        if any(doubt is not Outcome.UNBUILDABLE for doubt in least.doubts):
            self._conclusion.among += [change.sentence for change in members]
            return
        self._conclusion.packages += members
        if len(members) > 1:
            words = "cannot be installed apart" if least.doubts else "make it bad together only"
            self._note(f"these {len(members)} packages {words}")

    def _note(self, sentence: str) -> None:
        self._conclusion.notes.append(sentence)

    def _state(self, commit: str | None, some: Sequence[Change], label: str) -> State:
        good = self._question.good_pins
        return State(commit=commit, pins=None if good is None else applied(good, some), label=label)

    def _outcome(self, state: State) -> Outcome:
        """Of a state; refusals of the installer are counted."""
        try:
            self._place(state)
            outcome = self._judge.outcome(self._trial, state)
        except CannotBuild as error:
            self.num_unbuildable += 1
            outcome = Outcome.UNBUILDABLE
            self._tell(f"{state.label}: cannot be built: {error}")
        self.outcomes[state.label] = outcome
        self._tell(f"{state.label}: {outcome}")
        return outcome

    def _place(self, state: State) -> tuple[Path | None, Path | None]:
        """The Python and the worktree of a state. Raises CannotBuild, also from the journal."""
        python = None
        if state.pins is not None:
            assert self._environments is not None
            key = self._environments.key(state.pins)
            if key in self._logbook.unbuildable:
                raise CannotBuild(self._logbook.unbuildable[key])
            try:
                python = self._environments.python_of(state.pins)
            except CannotBuild as error:
                self._logbook.add_unbuildable(key, str(error))
                raise
        worktree = self._worktrees.of(state.commit) if state.commit is not None and self._worktrees is not None else None
        return python, worktree

    def _trial(self, stage: str, state: State, number: int) -> Trial:
        """A trial, from the journal where it is there."""
        key = key_of(state)
        known = self._logbook.trials.get((stage, key, number))
        trial = self._run(state) if known is None else known
        if known is None:
            self._logbook.add_trial(stage, key, number, trial)
            self._tell(f"{state.label}, run {number + 1}: {trial.sentence}")
        self.evidence.append(Evidence(stage=stage, label=state.label, number=number, trial=trial, is_new=known is None))
        return trial

    def _run(self, state: State) -> Trial:
        python, worktree = self._place(state)
        repository = self._worktrees.repository if self._worktrees is not None else None
        directory = worktree / repository.inner if worktree is not None and repository is not None else self._directory
        root = repository.root if repository is not None else None
        return self._command.run(
            directory=directory,
            variables=variables_of(python, root=root, worktree=worktree, cache=self._cache),
            log=self._logbook.folder / "last_output.log",
            started=self._logbook.started,
        )


def key_of(state: State) -> str:
    """A short hash of a state."""
    return hashlib.sha256(json.dumps([state.commit, state.pins]).encode()).hexdigest()[:16]


def to_dict(conclusion: Conclusion, search: Search, code: int) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "kind": "bisection",
        "version": 1,
        "exit_code": code,
        "commits": conclusion.commits,
        "packages": [change.to_dict() for change in conclusion.packages],
        "among": conclusion.among,
        "notes": conclusion.notes,
        "ends": conclusion.ends,
        "cannot_be_built": search.num_unbuildable,
        "outcomes": {label: str(outcome) for label, outcome in search.outcomes.items()},
        "trials": [
            {"stage": one.stage, "state": one.label, "number": one.number, "from_journal": not one.is_new, **one.trial.to_dict()}
            for one in search.evidence
        ],
    }


def _names(some: Sequence[Change]) -> str:
    names = [change.name for change in some]
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more ({key_of_names(names)})"


def key_of_names(names: Sequence[str]) -> str:
    """So that two long sets with one beginning are two labels."""
    return hashlib.sha256(",".join(names).encode()).hexdigest()[:6]
