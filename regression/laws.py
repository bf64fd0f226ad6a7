"""What must hold of every training run, and what a measurement says about each: PASS, FAIL, or INSUFFICIENT - it cannot tell.

Pure: from a measurement (and the report of a probed run) to verdicts. The throughput is `regression.decision`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from diagnostics.records import Finding
from regression.measurement import Measurement

REQUIRED_KEYS = (
    *("preset", "engine", "topology", "steps", "tokens", "tokens_per_second", "tokens_per_second_per_device", "loss"),
    *("recompiles_after_warmup", "fallbacks", "fx_errors", "checkpoint", "measure"),
)
MEMORY_SHARE = 0.05
MEMORY_BYTES = 64 * 2**20
_MIN_STEPS = 6
# Messages of torch when one thread's trace meets another's (diagnostics/README.md has the whole catalogue).
_FX_MESSAGES = ("Detected that you are using FX to symbolically trace", "is not installed as a submodule")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one law found."""

    kind: Literal["PASS", "FAIL", "INSUFFICIENT"]
    sentence: str
    hazards: tuple[str, ...] = ()


def reported(measured: Measurement) -> Outcome:
    """The run ended well and reported every number that consumers read."""
    if measured.failure:
        return _fail(_ended(measured))
    missing = [key for key in REQUIRED_KEYS if key not in measured.result]
    if missing:
        return _fail(f"the run reports no {', '.join(missing)}")
    if measured.returncode not in (0, 3) and not any(measured.result[key] for key in _COUNTS):
        return _fail(f"the run ended with exit code {measured.returncode}")
    return _pass("every number is reported")


def fx_errors(measured: Measurement) -> Outcome:
    """No thread met another's trace, and nothing stayed patched."""
    if measured.failure and any(text in measured.failure["message"] for text in _FX_MESSAGES):
        return _fail(f"an FX error ended the run: {measured.failure['message']}")
    return _count(measured, "fx_errors", "FX errors", details=measured.result.get("fx_error_messages") or ())


def recompiles(measured: Measurement) -> Outcome:
    """Nothing compiled after the warm-up."""
    if _ended_by(measured, "RecompileError", "compiled after warm-up"):
        return _fail(_ended(measured))
    return _count(measured, "recompiles_after_warmup", "recompiles after the warm-up")


def fallbacks(measured: Measurement) -> Outcome:
    """No compiled function ran uncompiled."""
    if _ended_by(measured, "RecompileError", "compiled code was bypassed"):
        return _fail(_ended(measured))
    return _count(measured, "fallbacks", "fallbacks to uncompiled code")


def memory(measured: Measurement) -> Outcome:
    """Memory in use stays flat: last third of the measured steps against the first, by their medians, limit 5 % and 64 MiB."""
    steps = measured.steps
    chosen = [place for place, segment in enumerate(steps.get("segment", ())) if segment >= 0]
    if len(chosen) < _MIN_STEPS:
        return _unknown(f"memory was seen at {len(chosen)} measured steps, {_MIN_STEPS} are needed{_because(measured)}")
    third = len(chosen) // 3
    rises: list[str] = []
    told: list[str] = []
    for name in sorted(key for key in steps if key.endswith("_bytes")):
        first = median(steps[name][place] for place in chosen[:third])
        last = median(steps[name][place] for place in chosen[-third:])
        sentence = f"{name.removesuffix('_bytes')} memory went from {first / 2**20:,.0f} to {last / 2**20:,.0f} MiB"
        (rises if last - first > max(MEMORY_SHARE * first, MEMORY_BYTES) else told).append(sentence)
    if rises:
        return _fail(f"{'; '.join(rises)} within {len(chosen)} steps (limit {MEMORY_SHARE:.0%} and {MEMORY_BYTES >> 20} MiB)")
    return _pass("; ".join(told))


def probed(report: Mapping[str, Any]) -> Outcome:
    """The report of `diagnostics.fxprobe` on the same training has no finding of severity error; hazards are told."""
    findings = [Finding.from_dict(values) for values in report["findings"]]
    hazards = tuple(f"{one.id}: {one.what}" for one in findings if one.severity == "hazard")
    errors = [f"{one.id}: {one.what} {one.what_to_do}" for one in findings if one.severity == "error"]
    if errors:
        return Outcome(kind="FAIL", sentence="\n".join(errors), hazards=hazards)
    if report["program_exit_code"] != 0:
        sentence = f"the probed run ended with exit code {report['program_exit_code']}, before it could tell"
        return Outcome(kind="INSUFFICIENT", sentence=sentence, hazards=hazards)
    if report["not_observed"]:
        return Outcome(kind="INSUFFICIENT", sentence=f"not observed: {'; '.join(report['not_observed'])}", hazards=hazards)
    return Outcome(kind="PASS", sentence=f"no error, {len(hazards)} hazards", hazards=hazards)


_COUNTS = ("fx_errors", "recompiles_after_warmup", "fallbacks")
LAWS: dict[str, Callable[[Measurement], Outcome]] = {
    "reported": reported,
    "fx_errors": fx_errors,
    "recompiles": recompiles,
    "fallbacks": fallbacks,
    "memory": memory,
}


def problems(measured: Measurement) -> list[str]:
    """What fails a build, one sentence each."""
    return [outcome.sentence for law in LAWS.values() if (outcome := law(measured)).kind == "FAIL"]


def _count(measured: Measurement, key: str, words: str, details: Any = ()) -> Outcome:
    found = measured.result.get(key)
    if not isinstance(found, int):
        return _unknown(f"the run reports no {key}{_because(measured)}")
    return _fail(f"{found} {words}{''.join(f': {one}' for one in details)}") if found else _pass(f"no {words}")


def _ended_by(measured: Measurement, kind: str, beginning: str) -> bool:
    failure = measured.failure
    return failure is not None and failure["type"] == kind and failure["message"].startswith(beginning)


def _ended(measured: Measurement) -> str:
    assert measured.failure is not None
    return f"the run failed, {measured.failure['type']}: {measured.failure['message']}"


def _because(measured: Measurement) -> str:
    return f": {_ended(measured)}" if measured.failure else ""


def _pass(sentence: str) -> Outcome:
    return Outcome(kind="PASS", sentence=sentence)


def _fail(sentence: str) -> Outcome:
    return Outcome(kind="FAIL", sentence=sentence)


def _unknown(sentence: str) -> Outcome:
    return Outcome(kind="INSUFFICIENT", sentence=sentence)
