"""Laws of observations and of the findings that are concluded from them."""

from __future__ import annotations

import functools
import json

import pytest

from diagnostics.findings import conclude
from diagnostics.records import Finding, Log, Observation


def test_equal_facts_are_one_observation_with_a_count() -> None:
    log = Log()
    for seconds in (1.0, 2.0):
        log.add(Observation(kind="trace", name="Tracer", threads=("a",), time_seconds=seconds, duration_seconds=seconds))
    log.add(Observation(kind="trace", name="Tracer", threads=("b",)))
    first, second = log.observations()
    assert (first.count, first.time_seconds, first.duration_seconds, second.count) == (2, 1.0, 3.0, 1)


def test_places_beyond_the_limit_are_counted_and_reported() -> None:
    log = Log(max_places=1)
    for name in "abb":
        log.add(Observation(kind="trace", name=name, threads=()))
    _, last = log.observations()
    assert (last.kind, last.name.split()[0]) == ("not_observed", "2")


def test_records_survive_json() -> None:
    observation = Observation(
        kind="overlap", name="x", threads=("a", "b"), where=("f:1",), count=3, fields={"where_first": ["g:2"]}
    )
    finding = Finding(id="F5", severity="hazard", what="w", who=("a", "b"), where=("f:1",), why="y", what_to_do="d", count=2)
    assert Observation.from_dict(json.loads(json.dumps(observation.to_dict()))) == observation
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


def test_a_foreign_record_is_refused() -> None:
    with pytest.raises(ValueError, match="observation of kind 'guess'"):
        Observation.from_dict({"kind": "guess", "name": "", "threads": []})


@functools.cache
def _exception(message: str, thread: str) -> Observation:
    fields = {"message": message, "seen": "unhandled"}
    return Observation(kind="exception", name="RuntimeError", threads=(thread,), fields=fields)


def test_a_known_exception_without_a_probes_explanation_is_a_finding() -> None:
    (finding,) = conclude([_exception("CURRENT_PATCHER is None in finally block", "a")])
    assert (finding.id, finding.severity, finding.who) == ("F5", "error", ("a",))


def test_what_fx_says_also_to_one_thread_alone_needs_another_one_to_be_a_finding() -> None:
    raised = _exception("Found multiple different tracers in one call", "a")
    overlap = Observation(kind="overlap", name="x", threads=("b", "a"), fields={"where_first": []})
    assert conclude([raised]) == ()
    assert ("F3", ("a",)) in [(finding.id, finding.who) for finding in conclude([raised, overlap])]


def test_an_exception_that_a_probe_explains_is_not_counted_twice() -> None:
    fields = {"outcome": "NameError: module is not installed as a submodule", "tracer": "Tracer"}
    call = Observation(kind="foreign_call", name="Linear", threads=("a", "b"), fields=fields)
    (finding,) = conclude([call, _exception("module is not installed as a submodule", "b")])
    assert (finding.who, finding.count) == (("a", "b"), 1)


def test_other_exceptions_are_not_the_probes_business() -> None:
    assert conclude([_exception("out of memory", "a")]) == ()
