"""From observations to findings: the same failure of the same threads is one finding with a count. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from diagnostics.catalogue import CATALOGUE, match
from diagnostics.journal import ProcessRecord
from diagnostics.records import Finding, Observation, Severity

_OF_THREADS = frozenset({"trace", "compile", "graph", "overlap", "foreign_call", "foreign_flag", "lock"})
_ALSO_ALONE = frozenset({"F3", "unclassified"})
_Merged = dict[tuple[str, tuple[str, ...], str], Finding]  # by failure, threads, and what tells them apart
_ORDER: dict[Severity, int] = {"error": 0, "hazard": 1, "info": 2}


def conclude(observations: Iterable[Observation]) -> tuple[Finding, ...]:
    """What `observations` mean, errors first. What was not observed is no finding; the caller reports it."""
    observations = tuple(observations)
    threaded = len({thread for seen in observations if seen.kind in _OF_THREADS for thread in seen.threads}) > 1
    met = any(seen.kind in ("overlap", "foreign_call", "leak") for seen in observations)
    merged: _Merged = {}
    for observation in observations:
        rule = _RULES.get(observation.kind)
        found = rule(observation) if rule is not None else None
        if found is not None:
            if found.id == "stance" and found.severity == "hazard" and not threaded:  # on purpose, and nobody else to hit
                found = dataclasses.replace(found, severity="info")
            _merge(merged, found)
    for observation in observations:
        if observation.kind == "exception":
            found = _exception(observation, tuple(merged.values()))
            # FX raises the same for a module that one thread alone cannot trace.
            if found is not None and (met or found.id not in _ALSO_ALONE):
                _merge(merged, found)
    for found in (*_shared_compiles(observations), *_deadlocks(observations)):
        _merge(merged, found)
    errors = [finding for finding in merged.values() if finding.severity == "error"]
    kept = [finding for finding in merged.values() if not _explained(finding, errors)]
    return tuple(sorted(kept, key=_rank))


def conclude_all(processes: Sequence[ProcessRecord]) -> tuple[Finding, ...]:
    """The findings of all processes, errors first; the same one of several processes is one, with all their labels."""
    merged: dict[tuple[str, str, tuple[str, ...], tuple[str, ...], str], Finding] = {}
    for record in processes:
        for found in conclude(record.observations):
            label = record.label if len(processes) > 1 else ""
            key = (found.id, found.severity, found.who, found.where + found.others, _detail(found))
            known = merged.get(key)
            if known is None:
                merged[key] = dataclasses.replace(found, process=label)
            else:
                merged[key] = dataclasses.replace(known, count=known.count + found.count, process=f"{known.process}, {label}")
    return tuple(sorted(merged.values(), key=_rank))


def _rank(finding: Finding) -> tuple[int, int, str]:
    """Errors first, then in the order of the catalogue."""
    number = re.search(r"\d+", finding.id)
    return _ORDER[finding.severity], int(number[0]) if number else 99, finding.id


def _merge(merged: _Merged, found: Finding) -> None:
    key = (found.id, found.who, _detail(found))
    known = merged.get(key)
    merged[key] = found if known is None else dataclasses.replace(known, count=known.count + found.count)


def _detail(found: Finding) -> str:
    """What tells findings of the same failure and threads apart: uncompiled calls are counted for each function."""
    return found.what if found.id in {"F7", "skipped", "mode", "stance"} and found.severity != "info" else ""


def _explained(finding: Finding, errors: list[Finding]) -> bool:
    """An overlap that did harm is told by its harm."""
    return finding.id == "F5-overlap" and any(error.id in {"F5", "F6"} and set(finding.who) <= set(error.who) for error in errors)


def _finding(failure: str, severity: Severity, detail: str, observation: Observation) -> Finding:
    known = CATALOGUE[failure]
    return Finding(
        id=failure,
        severity=severity,
        what=f"{known.title}: {detail}" if detail else known.title,
        who=observation.threads,
        where=observation.where,
        why=known.why,
        what_to_do=known.what_to_do,
        count=observation.count,
    )


def _other(thread: str, lines: Sequence[str]) -> tuple[str, ...]:
    return (f"{thread}: {' <- '.join(reversed(lines)) or 'a place outside the program'}",)


def _overlap(seen: Observation) -> Finding:
    first, second = seen.threads
    found = _finding("F5-overlap", "hazard", f"{second} began while {first} traced", seen)
    return dataclasses.replace(found, others=_other(first, seen.fields.get("where_first", ())))


def _foreign_call(seen: Observation) -> Finding | None:
    owner, victim = seen.threads
    outcome = seen.fields["outcome"]
    detail = f"{victim} called {seen.name} while {owner} traced with {seen.fields['tracer']}"
    if outcome == "proxy":
        return _finding("F3", "error", f"{detail} and got a Proxy", seen)
    if outcome == "passed":
        return _finding("F4", "hazard", detail, seen)
    failure = match(outcome)
    if failure == "F1":  # the probe of the flag has seen it, too
        return None
    return _finding(failure or "F4", "error" if failure else "hazard", f"{detail}; it raised {outcome}", seen)


def _foreign_flag(seen: Observation) -> Finding:
    owner, victim = seen.threads
    effect = seen.fields["effect"]
    severity: Severity = "info" if effect == "compiled" else "error"
    if owner == victim:
        return _finding("F1-own", severity, f"in {victim}; the call {effect}", dataclasses.replace(seen, threads=(victim,)))
    if owner == "none in progress":
        return _finding("F6", "error", f"a compiled call in {victim} {effect}", dataclasses.replace(seen, threads=(victim,)))
    detail = f"{victim} called while {owner} traced with {seen.fields['tracer']}"
    found = _finding("F2" if effect == "runs uncompiled" else "F1", severity, detail, seen)
    return dataclasses.replace(found, others=_other(owner, seen.fields["where_first"]))


def _leak(seen: Observation) -> Finding:
    failure = re.search(r"\((F\d+)\)", seen.name)  # dflash.fx.seams names it
    found = _finding(failure[1] if failure else "F5", "error", seen.name.partition(". ")[0], seen)
    others = [f"{thread}: {line}" for thread, line in zip(seen.threads, seen.where, strict=False)]
    return dataclasses.replace(found, where=(), others=tuple(others))


def _fallback(seen: Observation) -> Finding:
    why, thread = seen.fields.get("why"), ", ".join(seen.threads)
    if why == "stance":
        own = seen.fields["setter"] in seen.threads
        return _finding("stance", "hazard" if own else "error", f"in {thread}, {seen.name}", seen)
    if why in {"limit", "skipped"}:
        failure = "F7" if why == "limit" else "skipped"
        return _finding(failure, "error", f"calls in {thread} ran uncompiled, because {seen.name}", seen)
    if why == "mode":
        return _finding("mode", "hazard", f"in {thread}, {seen.name}", seen)
    if why == "graph break":
        return _finding("skipped", "info", f"{seen.name}; what it calls may be compiled", seen)
    return _finding("F7", "error" if seen.where else "hazard", seen.name, seen)


def _exception(seen: Observation, findings: tuple[Finding, ...]) -> Finding | None:
    """An exception of the catalogue that no probe has explained already."""
    message = str(seen.fields.get("message", ""))
    failure = match(message)
    if failure is None:
        return None
    explanations = {"F1", "F1-own", "F6"} if failure == "F1" else {failure}
    if any(known.id in explanations and known.severity == "error" and set(seen.threads) <= set(known.who) for known in findings):
        return None
    return _finding(failure, "error", f"{seen.name} {seen.fields.get('seen')}: {message.splitlines()[0]}", seen)


def _setting(seen: Observation) -> Finding:
    values = f"{seen.name} is {seen.fields['seen']!r}"
    if seen.fields["what"] == "left":
        return _finding(
            "F10", "error", f"{values} after the patches of {', '.join(seen.threads)}, it was {seen.fields['set_to']!r}", seen
        )
    setter, compiler = seen.threads
    detail = f"{values} in {compiler}, which compiles; {setter} set it to {seen.fields['set_to']!r}"
    return dataclasses.replace(_finding("F9", "hazard", detail, seen), others=_other(setter, seen.fields["where_first"]))


def _foreign_compiling(seen: Observation) -> Finding:
    owner, asked = seen.threads
    return _finding("F11", "hazard", f"{asked} asked while {owner} compiled", seen)


def _stance(seen: Observation) -> Finding:
    return _finding("stance", "hazard", f"{seen.name}, by {seen.threads[0]}", seen)


def _deadlocks(observations: tuple[Observation, ...]) -> list[Finding]:
    """Waits that did not end: what went on was no deadlock."""
    waits: dict[str, list[Observation]] = {"waits": [], "went on": []}
    for seen in observations:
        if seen.kind == "deadlock":
            waits[seen.fields["role"]].append(seen)
    ended = {(seen.threads, seen.where, *seen.fields["where_first"]): seen.count for seen in waits["went on"]}
    found = []
    for seen in waits["waits"]:
        count = seen.count - ended.get((seen.threads, seen.where, *seen.fields["where_first"]), 0)
        if count > 0:
            holder, waiter = seen.threads
            detail = f"{waiter} waits for the compile lock, {holder} holds it and waits inside autograd"
            finding = _finding("F8", "error", detail, dataclasses.replace(seen, count=count))
            found.append(dataclasses.replace(finding, others=_other(holder, seen.fields["where_first"])))
    return found


def _undone(seen: Observation) -> Finding:
    other, compiler = seen.threads
    if seen.name == "default dtype":
        detail = f"{compiler} compiled and put back the default dtype that {other} had set meanwhile"
        found = _finding("F16", "error", detail, seen)
        return dataclasses.replace(found, others=_other(other, seen.fields["where_first"]))
    detail = f"{compiler} compiled and put back the {seen.name}: what other threads drew meanwhile will be drawn again"
    return _finding("F16", "hazard", detail, dataclasses.replace(seen, threads=(compiler,)))


def _needless(seen: Observation) -> Finding | None:
    if match(seen.fields.get("reason", "")) != "F18":
        return None
    return _finding("F18", "hazard", f"{seen.threads[0]} compiled {seen.name} again although its guards passed", seen)


def _shared_compiles(observations: tuple[Observation, ...]) -> list[Finding]:
    functions: dict[tuple[str, tuple[str, ...]], list[Observation]] = {}
    for seen in observations:
        if seen.kind == "compile" and seen.fields.get("outcome") == "compiled":
            functions.setdefault((seen.name, seen.where), []).append(seen)
    found = []
    for (name, _), compiles in functions.items():
        threads = tuple(sorted({thread for seen in compiles for thread in seen.threads}))
        total = sum(seen.count for seen in compiles)
        if len(threads) > 1:
            merged = dataclasses.replace(compiles[0], threads=threads, count=total)
            found.append(_finding("F12", "info", f"{name}, {total} times", merged))
    return found


_RULES: dict[str, Callable[[Observation], Finding | None]] = {
    "overlap": _overlap,
    "foreign_call": _foreign_call,
    "foreign_flag": _foreign_flag,
    "leak": _leak,
    "fallback": _fallback,
    "setting": _setting,
    "foreign_compiling": _foreign_compiling,
    "stance": _stance,
    "compile": _needless,
    "undone": _undone,
}
