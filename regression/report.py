"""The nightly report: one HTML page that needs nothing else, the same as Markdown, and JUnit XML.

    python -m regression.report DIR        makes the three again from the store in DIR/store alone

The page has no script and refers to nothing outside. It stays under 300 KB: a long history is drawn with fewer nights and
series, and the page says so. Exit codes: 0 written, 2 no history. The verdict is in the report, not in the exit code.
"""

from __future__ import annotations

import argparse
import html
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dflash.standard_output import outlive_reader
from diagnostics.environments.differences import compare
from diagnostics.records import Finding
from regression import change_points, changes, junit, line, tables
from regression.decision import judge, outcomes, worst
from regression.history import History, by_workload, nights, read
from regression.laws import Outcome
from regression.measurement import Measurement
from regression.secondary import missing_nights
from regression.store import Store
from regression.tables import Table
from regression.verdict import Kind
from regression.watch import NightVerdict, replay

HTML_BYTES = 300_000
MARKDOWN_BYTES = 1024 * 1024
_BUDGETS = ((180, 24), (90, 24), (60, 16), (40, 8), (30, 4), (20, 1))  # nights a series, series
_LISTED_NIGHTS = 10
_TOLD_CHANGES = 40  # of the environment
_METRIC = r'"measure": .*?"tokens_per_second_per_device": ([0-9.e+]+)'  # in the last line of a measured run
_TOLD_FAILURES = 10  # of tonight's logs
_TOLD = 10  # records that could not be read
_LEGEND = (
    (Kind.PASS, "passed"), (Kind.SUSPECT, "suspect"), (Kind.FAIL, "failed"), (Kind.CLEARED, "the machine, says the gate"),
    (Kind.HARDWARE, "the machine changed, say the controls"), (Kind.INVALID, "invalid"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeriesView:
    """One series in the report."""

    name: str
    latest: NightVerdict
    picture: Markup
    described: str  # how many nights are shown, and what they are
    changes: Sequence[str]  # change points and environment changes among them, the newest first
    listed: Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the templates show."""

    tonight: Measurement
    verdict: str
    outcomes: Mapping[str, Outcome]
    series: Sequence[SeriesView]
    left_out: str
    tables: Sequence[Table]
    findings: Sequence[Finding]
    probed: str
    gate: str
    cache: Table
    failures: Table | None
    timeline: Table | None
    since: str
    changed: Table
    git_range: str
    commits: Sequence[str]
    commands: Sequence[tuple[str, str]]
    alerts: Sequence[str]
    unread: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report about the latest measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m regression.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the --output of the nightly command")
    directory: Path = parser.parse_args(arguments).directory
    history = read(Store(directory / "store"))
    if not history.measurements:
        sys.stderr.write(f"{directory / 'store'} holds no measurement: name the --output of python -m regression.nightly\n")
        return 2
    for path in write(directory, history, max(history.measurements, key=lambda one: one.time)):
        sys.stdout.write(f"{path}\n")
    return 0


def write(directory: Path, history: History, tonight: Measurement, *, now: datetime | None = None) -> list[Path]:
    """Write the three files; returns their paths. `history` holds `tonight`."""
    page, markdown, xml = texts(directory, history, tonight, now=now or datetime.now(UTC))
    written = []
    for name, text in (("report.html", page), ("summary.md", markdown), ("junit.xml", xml)):
        (directory / name).write_text(text, encoding="utf-8")
        written.append(directory / name)
    return written


def texts(directory: Path, history: History, tonight: Measurement, *, now: datetime) -> tuple[str, str, str]:
    """HTML, Markdown, JUnit XML."""
    page = ""
    for max_nights, max_series in _BUDGETS:
        report = build(directory, history, tonight, now=now, max_nights=max_nights, max_series=max_series)
        page = _template("nightly.html").render(report=report, legend=_LEGEND, num_series=len(report.series))
        if len(page.encode()) <= HTML_BYTES:
            break
    markdown = _template("summary.md").render(report=report)
    if len(markdown.encode()) > MARKDOWN_BYTES:
        told = "\n\nCut here: a build summary may have 1024 KiB. The page has everything.\n"
        markdown = markdown.encode()[: MARKDOWN_BYTES - len(told)].decode(errors="ignore") + told
    return page, markdown, junit.document(tonight, report.outcomes)


def build(directory: Path, history: History, tonight: Measurement, *, now: datetime, max_nights: int, max_series: int) -> Report:
    """What the templates show, with at most so many nights in a picture and so many pictures."""
    found = outcomes(tonight, history)
    note = history.notes_of(tonight)
    last = _last_good(history, tonight)
    names = _series_by_age(history, tonight)
    probed = note.get("probed") or {}
    git_range, commits = changes.commits(last.fingerprint if last else {}, tonight.fingerprint)
    return Report(
        tonight=tonight,
        verdict=worst(found),
        outcomes=found,
        series=[_view(history, name, max_nights, tonight) for name in names[:max_series]],
        left_out=f"{len(names) - max_series} older series are in the store only." if len(names) > max_series else "",
        tables=tables.of_tonight(tonight, tables.valid(history.of(tonight.series), tonight.time)),
        findings=[Finding.from_dict(finding) for finding in probed.get("findings", ())],
        probed=_probed(probed),
        gate=_gate(note, judge(tonight, history)),
        cache=_cache(note, history.notes_of(last) if last else {}),
        failures=_failures(note.get("triage")),
        timeline=_timeline(note.get("timeline")),
        since=f"the last valid night of this workload that had not fallen, {last.time[:16].replace('T', ' ')} UTC"
        if last
        else "",
        changed=_changed(last, tonight),
        git_range=git_range,
        commits=commits,
        commands=_commands(directory, last, tonight, note),
        alerts=[alert.sentence for alert in missing_nights(by_workload(history), now=now)],
        unread=[*history.unread[:_TOLD], *([f"... and {len(history.unread) - _TOLD} more"] if history.unread[_TOLD:] else [])],
    )


def _last_good(history: History, tonight: Measurement) -> Measurement | None:
    """The last valid night of the workload before this one, of any fingerprint, that was not below its limit."""
    below = {one.night.time for one in replay(nights(history, tonight.series, tonight)) if one.is_below}
    good = [
        one
        for one in tables.valid([one for one in history.measurements if one.name == tonight.name], tonight.time)
        if one.series != tonight.series or datetime.fromisoformat(one.time) not in below
    ]
    return good[-1] if good else None


def _series_by_age(history: History, tonight: Measurement) -> list[str]:
    """Tonight's first, then those that were measured last."""
    latest: dict[str, str] = {}
    for one in history.measurements:
        latest[one.series] = max(latest.get(one.series, ""), one.time)
    return sorted(latest, key=lambda name: (name == tonight.series, latest[name], name), reverse=True)


def _view(history: History, name: str, max_nights: int, tonight: Measurement) -> SeriesView:
    every = replay(nights(history, name, tonight if tonight.series == name else None))
    shown = every[-max_nights:]
    begin = shown[0].night.time
    points = [point for point in change_points.find(one.night for one in every) if point.night.time >= begin]
    workload = next(one.name for one in history.measurements if one.series == name)
    of_workload = sorted((one for one in history.measurements if one.name == workload), key=lambda one: one.time)
    mine = {datetime.fromisoformat(one.time) for one in history.of(name)}
    environment = {
        time: text for time, text in changes.environment_changes(of_workload).items() if time in mine and time >= begin
    }
    told = [(point.night.time, f"change point, {point.change:+.1%}") for point in points]
    told += [(time, f"environment, {text}") for time, text in environment.items()]
    told += [(one.night.time, f"accepted, {one.night.accepted}") for one in shown if one.night.accepted]
    invalid = sum(one.kind is Kind.INVALID for one in shown)
    older = f"; {len(every) - len(shown)} older ones are in the store" if len(every) > len(shown) else ""
    return SeriesView(
        name=name,
        latest=shown[-1],
        # Safe: every text in it is escaped where it is made.
        picture=Markup(line.svg(name, shown, changes=points, environment=environment)),  # noqa: S704
        described=f"{len(shown)} nights, {invalid} of them invalid{older}",
        changes=[f"{time:%Y-%m-%d %H:%M}: {text}" for time, text in sorted(told, reverse=True)],
        listed=tables.last_nights(shown, _LISTED_NIGHTS),
    )


def _probed(probed: dict[str, Any]) -> str:
    if not probed:
        return "Not observed: no probed run was made beside this measurement."
    if "failure" in probed:
        return f"Not observed: {probed['failure']}"
    missing = "".join(f" Not observed: {sentence}." for sentence in probed["not_observed"])
    count = probed["num_findings"]
    cut = f", {len(probed['findings'])} of them shown" if count > len(probed["findings"]) else ""
    words = "1 finding" if count == 1 else f"{count} findings"
    return f"{words}{cut}; the probed run ended with exit code {probed['program_exit_code']}.{missing}"


def _gate(note: dict[str, Any], verdict: NightVerdict) -> str:
    if gate := note.get("gate"):
        return f"Compared with {gate['baseline']} in the same night: {gate['sentence']} ({gate['pairs']} pairs)"
    if "gate_not_run" in note:
        return f"The gate did not run: {note['gate_not_run']}"
    return "The gate did not run." if verdict.is_below else ""


def _cache(note: dict[str, Any], before: dict[str, Any]) -> Table:
    cache, earlier = note.get("cache") or {}, before.get("cache") or {}
    headers = ("part", "files", "MiB", "files before", "MiB before")
    if not cache.get("directory"):
        why = cache.get("reason", "nothing was counted beside this measurement")
        return Table(title="Compile cache", headers=headers, rows=[], empty=f"No directory is known: {why}.")
    old = {row["part"]: row for row in earlier.get("parts", ())}
    rows = [
        (row["part"], f"{row['files']:,}", _mib(row), f"{old[row['part']]['files']:,}", _mib(old[row["part"]]))
        if row["part"] in old
        else (row["part"], f"{row['files']:,}", _mib(row), tables.NONE, tables.NONE)
        for row in cache["parts"]
    ]
    states = f" ({', '.join(cache['states'])})" if "states" in cache else ""  # older nights have none
    total = f"{cache['files']:,} files, {cache['bytes'] / 2**20:,.1f} MiB in {cache['directory']}"
    return Table(title=f"Compile cache{states}: {total}", headers=headers, rows=rows, empty="The directory is empty.")


def _failures(found: dict[str, Any] | None) -> Table | None:
    """Known failures in tonight's logs; None where nobody looked."""
    if found is None:
        return None
    headers = ("failure", "how sure", "times", "evidence", "what to do")
    rows = [
        (
            f"{one['kind']}: {one['title']}",
            one["sure"],
            f"{one['count']:,}",
            one["evidence"][0]["text"] if one["evidence"] else tables.NONE,
            one["to_do"],
        )
        for one in found["failures"][:_TOLD_FAILURES]
    ]
    return Table(title="Failures in tonight's logs (diagnostics.triage)", headers=headers, rows=rows, empty="None is known.")


def _timeline(changes: list[dict[str, Any]] | None) -> Table | None:
    """What is dated before the last change of the nights; None where nobody looked."""
    if changes is None:
        return None
    title = "Dated before the change (diagnostics.timeline)"
    if not changes:
        return Table(title=title, headers=(), rows=[], empty="The logs of the nights show no change of throughput or error.")
    last = changes[-1]
    rows = [(str(number), suspect) for number, suspect in enumerate(last["suspects"], start=1)]
    title = f"{title}: {last['change']}, after {last['before']}"
    return Table(title=title, headers=("most suspicious first", "what"), rows=rows, empty="Nothing dated lies between.")


def _mib(row: Mapping[str, Any]) -> str:
    return f"{row['bytes'] / 2**20:,.1f}"


def _changed(last: Measurement | None, tonight: Measurement) -> Table:
    headers = ("what", "before", "tonight", "changes speed / tracing", "why")
    if last is None:
        return Table(title="Environment", headers=headers, rows=[], empty="There is no earlier valid night to compare with.")
    found = compare(last.fingerprint, tonight.fingerprint)
    told = [one for one in found.differences if not one.is_code]
    rows = [(one.name, one.before, one.after, one.likelihood, one.why) for one in told[:_TOLD_CHANGES]]
    if len(told) > _TOLD_CHANGES:
        rows.append((f"and {len(told) - _TOLD_CHANGES} less likely ones", "", "", tables.NONE, "the store has both fingerprints"))
    rows += [("not compared", "", "", tables.NONE, sentence) for sentence in found.not_compared]
    title = "Environment, the most likely cause first"
    return Table(title=title, headers=headers, rows=rows, empty="Nothing in the fingerprint changed but the code.")


def _commands(directory: Path, last: Measurement | None, tonight: Measurement, note: dict[str, Any]) -> list[tuple[str, str]]:
    commit = (tonight.fingerprint.get("git") or {}).get("commit")
    checkout = [("the code", f"git checkout {commit}")] if commit else []
    store = shlex.quote(str(directory / "store"))
    accept = f"python -m regression.watch accept {shlex.quote(tonight.series)} --reason WHY --store {store}"
    return [
        *checkout,
        *(note.get("commands") or {}).items(),
        ("this report again", f"python -m regression.report {shlex.quote(str(directory))}"),
        ("accept the present level", accept),
        ("compare with another commit", "python -m regression.ab --baseline COMMIT"),
        *_bisect(last, tonight, note),
    ]


def _bisect(last: Measurement | None, tonight: Measurement, note: dict[str, Any]) -> list[tuple[str, str]]:
    """The command that finds the commit which made the difference, where there are two commits and a run to repeat."""
    good, bad = (((one.fingerprint.get("git") or {}).get("commit") if one else None) for one in (last, tonight))
    run = (note.get("commands") or {}).get("the measured run")
    if good is None or bad is None or good == bad or run is None:
        return []
    fresh = run.replace("runs/measured", '"$(mktemp -d)/run"')
    bisect = ["python", "-m", "diagnostics.bisect", "--good", good, "--bad", bad, "--metric", _METRIC, "--", "sh", "-c", fresh]
    return [("which commit it was", shlex.join(bisect))]


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=name.endswith(".html"),  # Markdown cells are escaped by the filter `md`
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = _md
    return environment.get_template(name)


def _md(text: object) -> str:
    """A text for one cell of a Markdown table."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(str(text), quote=False)).replace("\n", "<br>")


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
