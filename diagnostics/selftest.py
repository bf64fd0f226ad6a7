"""Every failure of the catalogue, made to happen on this torch, and its cures, tried: `python -m diagnostics.selftest`.

Each recipe (diagnostics/stress/scenarios.py) runs in a process of its own, unprotected and then under each policy that may
help. The matrix says what happened, what cannot happen here and why, what was not tried and why, and which policies cured.
Isolation (`dflash.fx.isolated`) is one of them, with a column of its own.

Exit codes: 0 everything as the catalogue says about a torch with these features, 1 something deviates (it is listed),
2 bad usage, 3 something could not be tried. This module imports no torch; the processes do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash.standard_output import outlive_reader
from diagnostics.output import output_file, write_text
from diagnostics.stress.replay import LIMIT_SECONDS, PARALLEL, Job, Outcome, Server, ServerError

_NONE, _ISOLATION = "none", "isolation"  # names of policies
_BAD = ("happened", "hung", "died")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One failure on this torch. `deviations` and `untried` are sentences; both empty: as the catalogue says."""

    id: str
    recipe: str  # what is made to happen
    here: str  # "happens", "cannot happen here", "not tried", "did not happen", "could not be tried"
    what: str  # the evidence, or why not
    isolation: str  # "cured", "not cured", or why it was not tried
    cures: dict[str, str]  # by policy: the same
    deviations: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All failures on one torch."""

    torch: str
    rows: tuple[Row, ...]
    policies: dict[str, str]  # in words

    @property
    def exit_code(self) -> int:
        """1 a deviation, 3 something could not be tried, else 0."""
        if any(row.deviations for row in self.rows):
            return 1
        return 3 if any(row.untried for row in self.rows) else 0


class UnknownFailure(ValueError):
    """`--only` names what has no recipe; the message lists those that have."""


def run(*, only: Sequence[str] = (), repeat: int = 1, parallel: int = PARALLEL, limit_seconds: float = LIMIT_SECONDS) -> Matrix:
    """Try every recipe, or those named, each `repeat` times. Raises UnknownFailure, ServerError."""
    with Server() as server:
        names = _chosen(only, server.plan["recipes"])
        jobs = [job for name in names for job in _jobs(name, server.plan)] * repeat
        outcomes: dict[Job, list[Outcome]] = {}
        for outcome in server.run(jobs, parallel=parallel, limit_seconds=limit_seconds):
            outcomes.setdefault(Job(name=outcome.name, policy=outcome.policy), []).append(outcome)
        rows = tuple(conclude(name, server.plan, outcomes) for name in names)
        policies = {name: policy["what"] for name, policy in server.plan["policies"].items()}
        return Matrix(torch=server.plan["torch"], rows=rows, policies=policies)


def conclude(name: str, plan: dict[str, Any], outcomes: dict[Job, list[Outcome]]) -> Row:
    """The row of one recipe from what became of its jobs."""
    recipe = plan["recipes"][name]
    policies = plan["policies"]
    if recipe["not_tried"]:
        cures = dict.fromkeys(recipe["cures"], "not tried")
        return Row(id=name, recipe=recipe["what"], here="not tried", what=recipe["not_tried"], isolation="not tried", cures=cures)
    bare = outcomes[Job(name=name)]
    here, what, problems, untried = _bare(bare, recipe["why_not"])
    cures = {}
    for policy, expected in recipe["cures"].items():
        tried = outcomes.get(Job(name=name, policy=policy))
        cures[policy] = _cure(tried, recipe["why_not"], policies[policy]["missing"])
        if tried and cures[policy] != ("cured" if expected else "not cured"):
            sentence = f"{name} under policy {policy}: {cures[policy]}: {_summary(tried)}"
            (untried if any(outcome.state == "failed" for outcome in tried) else problems).append(sentence)
    return Row(
        id=name,
        recipe=recipe["what"],
        here=here,
        what=what,
        isolation=_cure(outcomes.get(Job(name=name, policy=_ISOLATION)), recipe["why_not"], policies[_ISOLATION]["missing"]),
        cures=cures,
        deviations=tuple(f"{name}: {problem}" if not problem.startswith(name) else problem for problem in problems),
        untried=tuple(untried),
    )


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Print the matrix and what is unexpected in it."""
    table = Table(title=f"Failures of threads on torch {matrix.torch}", title_justify="left", show_lines=True)
    for header in ("id", "made to happen", "here", "isolation", "other policies"):
        table.add_column(header, overflow="fold")
    for row in matrix.rows:
        cells = (row.id, row.recipe, f"{row.here}: {row.what}", row.isolation, cures_in_words(row))
        table.add_row(*(escape(cell) for cell in cells))
    console.print(table)
    used = {policy for row in matrix.rows for policy in row.cures}
    for policy, words in matrix.policies.items():
        if policy in used:
            console.print(f"policy {policy}: {escape(words)}", highlight=False)
    for sentence in (sentence for row in matrix.rows for sentence in row.deviations):
        console.print(f"[bold red]not as the catalogue says:[/] {escape(sentence)}", highlight=False)
    for sentence in (sentence for row in matrix.rows for sentence in row.untried):
        console.print(f"[yellow]could not be tried:[/] {escape(sentence)}", highlight=False)
    console.print("replay one: python -m diagnostics.stress.scenarios ID --repeat 20", highlight=False)


def cures_in_words(row: Row) -> str:
    """Policies by what became of them, one line each."""
    groups: dict[str, list[str]] = {}
    for policy, cure in row.cures.items():
        groups.setdefault(cure, []).append(policy)
    return "\n".join(f"{cure}: {', '.join(policies)}" for cure, policies in groups.items())


def to_dict(matrix: Matrix) -> dict[str, Any]:
    """The matrix as JSON values."""
    return {**dataclasses.asdict(matrix), "exit_code": matrix.exit_code}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try everything, print the matrix on standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the matrix there as well")
    parser.add_argument("--only", default="", metavar="F1,F5", help="these recipes")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each N times (default 1)")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: use 1 or more")
    try:
        matrix = run(only=[name for name in options.only.split(",") if name], repeat=options.repeat)
    except UnknownFailure as error:
        parser.error(str(error))
    except ServerError as error:
        print(error, file=sys.stderr)  # noqa: T201 - there is no matrix to print
        return 3
    if options.json is not None:
        write_text(options.json, json.dumps(to_dict(matrix), indent=1) + "\n")
    print_matrix(Console(width=None if sys.stdout.isatty() else 160), matrix)
    return matrix.exit_code


def _chosen(only: Sequence[str], recipes: Iterable[str]) -> list[str]:
    known = [name for name in recipes if name != "clean"]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UnknownFailure(f"no recipe for {', '.join(unknown)}: known are {', '.join(known)}")
    return [name for name in known if not only or name in only]


def _jobs(name: str, plan: dict[str, Any]) -> list[Job]:
    """The recipe unprotected; where it can happen, also under each policy that this torch has."""
    recipe = plan["recipes"][name]
    if recipe["not_tried"]:
        return []
    policies = () if recipe["why_not"] else (_ISOLATION, *recipe["cures"])
    return [Job(name=name), *(Job(name=name, policy=policy) for policy in policies if not plan["policies"][policy]["missing"])]


def _bare(outcomes: list[Outcome], why_not: str | None) -> tuple[str, str, list[str], list[str]]:
    """Column "here", its evidence, deviations, and what could not be tried."""
    bad = sum(outcome.state in _BAD for outcome in outcomes)
    what = _summary(outcomes)
    if any(outcome.state == "failed" for outcome in outcomes):
        return "could not be tried", what, [], [f"{outcomes[0].name}: {what}"]
    if bad == 0 and why_not:
        return "cannot happen here", why_not, [], []
    odd = [f"{outcome.state}: {outcome.what}" for outcome in outcomes if outcome.state in {"hung", "died"}]
    if why_not:
        return "happens", what, [f"happened although {why_not}: {what}"], []
    if bad < len(outcomes):
        return "did not happen", what, [f"happened {bad} of {len(outcomes)} times: {what}", *odd], []
    return "happens", what, odd, []


def _cure(outcomes: list[Outcome] | None, why_not: str | None, missing: str | None) -> str:
    if why_not:
        return "not needed"
    if outcomes is None:
        return missing or "not tried"
    if any(outcome.state == "failed" for outcome in outcomes):
        return "could not be tried"
    return "not cured" if any(outcome.state in _BAD for outcome in outcomes) else "cured"


def _summary(outcomes: list[Outcome]) -> str:
    """What was seen, the worst first; with its count when it was not always the same."""
    order = ("failed", "died", "hung", "happened", "did not happen")
    texts = list(dict.fromkeys(outcome.what for outcome in sorted(outcomes, key=lambda outcome: order.index(outcome.state))))
    bad = sum(outcome.state in _BAD for outcome in outcomes)
    count = f"{bad} of {len(outcomes)}: " if len(outcomes) > 1 else ""
    return count + " | ".join(texts[:2])


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
