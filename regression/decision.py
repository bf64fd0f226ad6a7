"""Has the throughput fallen? The watch's verdict (`regression.watch`) about a measurement, by the history of its series.

`outcomes` has the verdict of every law beside it, as the nightly run and its report see a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from regression.history import History, night_of, nights
from regression.laws import LAWS, Outcome, probed
from regression.measurement import Measurement
from regression.verdict import Kind
from regression.watch import NightVerdict, replay


def decide(measured: Measurement, history: History, *, record: str | None = None) -> Outcome:
    """The verdict on the throughput. `history`: of any series; only its own counts.

    SUSPECT and INVALID are INSUFFICIENT. So is a series without history; it is FAIL where `record`, the command that records a
    baseline, is given: a build must have one.
    """
    if record and not nights(history, measured.series) and not night_of(measured, despite_problems=True).invalid:
        return Outcome(kind="FAIL", sentence=f"no baseline of the series {measured.series!r}. Record one with:\n    {record}")
    verdict = judge(measured, history)
    if record and verdict.kind is Kind.INSUFFICIENT and not verdict.night.accepted:
        sentence = f"no measurement of the series {measured.series!r} counts. Record a baseline with:\n    {record}"
        return Outcome(kind="FAIL", sentence=sentence)
    return outcome_of(verdict, measured, history)


def judge(measured: Measurement, history: History) -> NightVerdict:
    """What the watch says about a measurement, in `history` or not, by the earlier nights of its series."""
    ordered = nights(history, measured.series, tonight=measured)
    tonight = night_of(measured, despite_problems=True)
    place = next(
        place for place, night in enumerate(ordered) if replace(night, accepted="", gate=None, recorded=False) == tonight
    )
    return replay(ordered[: place + 1])[-1]


def outcome_of(verdict: NightVerdict, measured: Measurement, history: History) -> Outcome:
    """The verdict as the outcome of a law."""
    kind = {0: "PASS", 1: "FAIL", 3: "INSUFFICIENT"}[verdict.kind.exit_code]
    sentence = verdict.sentence.removeprefix(f"{kind}: ")
    if verdict.night.value is not None and verdict.kind is not Kind.INVALID:
        sentence = f"{verdict.night.value:,.1f} tok/s per device, {sentence}"
    if verdict.kind in {Kind.SUSPECT, Kind.FAIL}:
        sentence += _method_changed(measured, history)
    return Outcome(kind=kind, sentence=sentence)  # type: ignore[arg-type]  # one of the three above


def outcomes(measured: Measurement, history: History) -> dict[str, Outcome]:
    """The throughput, every law, and the probed run beside the measurement, as far as `history` knows one."""
    report = history.notes_of(measured).get("probed")
    if report is None or "failure" in report:
        why = report["failure"] if report else "no probed run was made beside this measurement"
        watched = Outcome(kind="INSUFFICIENT", sentence=f"not observed: {why}")
    else:
        watched = probed(report)
    return {"throughput": decide(measured, history), **{name: law(measured) for name, law in LAWS.items()}, "fxprobe": watched}


def exit_code(found: Mapping[str, Outcome]) -> int:
    """Of a command that found these."""
    return {"PASS": 0, "FAIL": 1, "INSUFFICIENT": 3}[worst(found)]


def worst(found: Mapping[str, Outcome]) -> str:
    """The verdict over all of them."""
    kinds = {outcome.kind for outcome in found.values()}
    return "FAIL" if "FAIL" in kinds else "INSUFFICIENT" if "INSUFFICIENT" in kinds else "PASS"


def _method_changed(measured: Measurement, history: History) -> str:
    methods = {one.result.get("measure", {}).get("method") for one in (measured, *history.of(measured.series))}
    return "; what is timed has changed since: record a new baseline" if len(methods) > 1 else ""
