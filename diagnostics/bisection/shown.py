"""A bisection's evidence and conclusion as text."""

from __future__ import annotations

from diagnostics.bisection.decisions import summary
from diagnostics.bisection.outcomes import Trial
from diagnostics.bisection.search import Conclusion, Search
from diagnostics.tables import Table

_MAX_FIGURES = 12


def trials_table(search: Search, *, higher_is_better: bool) -> Table:
    """One row a state and stage, in the order in which they were tried."""
    grouped: dict[tuple[str, str], list[tuple[Trial, bool]]] = {}
    for one in search.evidence:
        grouped.setdefault((one.stage, one.label), []).append((one.trial, one.is_new))
    rows = [
        (
            label if stage in {"ends", "candidate"} else f"{label}, {stage}",
            str(search.outcomes.get(label, "")) if stage == "candidate" else "an end" if stage == "ends" else "comparison",
            _result([trial for trial, _ in group]),
            str(sum(not is_new for _, is_new in group) or ""),
            f"{sum(trial.seconds for trial, _ in group):.1f}",
        )
        for (stage, label), group in grouped.items()
    ]
    better = "higher is better" if higher_is_better else "lower is better"
    untried = [label for label in search.outcomes if ("candidate", label) not in grouped]
    rows += [(label, str(search.outcomes[label]), "", "", "") for label in untried]
    has_figures = any(one.trial.figure is not None for one in search.evidence)
    headers = ("state", "is", "runs", "from the journal", "seconds")
    return Table(f"Trials ({better})" if has_figures else "Trials", headers, tuple(rows))


def sentences(conclusion: Conclusion) -> list[str]:
    """The culprit, or what is left."""
    told = [f"culprit: {change.sentence}" for change in conclusion.packages]
    told += [f"culprit: commit {commit}" for commit in conclusion.commits]
    if conclusion.among:
        told += ["not decided, it is one of:", *(f"  {one}" for one in conclusion.among)]
    return [*told, *conclusion.notes]


def _result(trials: list[Trial]) -> str:
    figures = [trial.figure for trial in trials if trial.figure is not None]
    if figures:
        listed = ", ".join(f"{figure:g}" for figure in figures[:_MAX_FIGURES])
        return f"{summary(figures)}: {listed}" + (", ..." if len(figures) > _MAX_FIGURES else "")
    failed = [trial for trial in trials if trial.failed]
    if not failed:
        skipped = any(trial.returncode for trial in trials)
        return "skipped by the command" if skipped else f"{len(trials)} of {len(trials)} passed"
    how = "timed out" if failed[0].timed_out else f"exit code {failed[0].returncode}"
    return f"{len(failed)} of {len(trials)} failed: {how}" + (f": {failed[0].last_line}" if failed[0].last_line else "")
