"""The differences of two environments, most likely cause first. Imports no torch.

An environment is a dictionary of JSON values: what `environment.fingerprint` returns, or more. A part that only one side
recorded at all, or that could not be observed on a side, is not compared; it is listed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diagnostics.environments.ranking import WORDS, rule_of

NOT_OBSERVED = "not observed: "
# Parts that an older or other record may lack as a whole: their absence is no difference.
PARTS = (
    *("torch_build", "distributions", "edited", "startup_files", "variables", "config", "gpu_settings", "system_details"),
    *("torch_runtime", "pip", "files"),
)
_NOTED = ("import_seconds",)  # measured, not set
_HEAD_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that differs. `speed` and `tracing` are indices of `ranking.WORDS`."""

    name: str  # "distributions.torch"
    before: str
    after: str
    speed: int
    tracing: int
    why: str

    @property
    def sentence(self) -> str:
        """In one line."""
        return f"{self.name} {self.before} → {self.after}"

    @property
    def is_code(self) -> bool:
        """Whether it is the project's own code that differs."""
        return self.name == "git" or self.name.startswith("git.")

    @property
    def is_suspect(self) -> bool:
        """Whether it is at least possible that it changes speed or tracing."""
        return max(self.speed, self.tracing) >= WORDS.index("possible")

    @property
    def likelihood(self) -> str:
        """Of both, in words."""
        return f"{WORDS[self.speed]} / {WORDS[self.tracing]}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "speed": WORDS[self.speed], "tracing": WORDS[self.tracing]}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of it."""

    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...]  # sentences


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """What differs, the most likely first, and what could not be compared."""
    skipped = [_unrecorded(part, part in before) for part in PARTS if (part in before) != (part in after)]
    both = [
        {key: value for key, value in side.items() if key not in PARTS or (key in before and key in after)}
        for side in (before, after)
    ]
    found: list[Difference] = []
    for name, one, two in _leaves("", _without_repetitions(*both), _without_repetitions(*reversed(both))):
        if name.rpartition(".")[2] in _NOTED:
            continue
        missing = [side for side, value in (("before", one), ("after", two)) if _is_missing(value)]
        if missing:
            reason = _words(one if "before" in missing else two)
            skipped.append(f"{name}: {reason.removeprefix(NOT_OBSERVED)} ({' and '.join(missing)})")
            continue
        found.append(_difference(name, one, two, before, after))
    return Comparison(differences=tuple(sorted(found, key=_rank)), not_compared=tuple(skipped))


def _rank(one: Difference) -> tuple[int, int, str]:
    return (-max(one.speed, one.tracing), -(one.speed + one.tracing), one.name)


def _unrecorded(part: str, is_before: bool) -> str:
    return f"{part}: recorded {'before' if is_before else 'after'} only"


def _without_repetitions(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`mine` without what another part of both tells better."""
    kept = dict(mine)
    if "distributions" in mine and "distributions" in other:
        kept.pop("packages", None)
    if "torch_build" in mine and "torch_build" in other:
        for name in ("torch_git", "cuda"):
            kept.pop(name, None)
        for part in ("packages", "distributions"):
            if isinstance(kept.get(part), Mapping):
                kept[part] = {name: value for name, value in kept[part].items() if name != "torch"}
        kept["torch"] = kept.pop("torch_build")
    if "gpu_settings" in mine and "gpu_settings" in other:
        kept["gpu_settings"] = {name: value for name, value in kept["gpu_settings"].items() if name != "driver"}
    if "variables" in mine and "variables" in other:
        kept.pop("cuda_visible_devices", None)
        kept.pop("omp_num_threads", None)
    return kept


def _leaves(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """The paths at which two values differ; torch's build is one value, and so is a part of which nothing was observed."""
    before, after = _reason_or_itself(before), _reason_or_itself(after)
    if isinstance(before, Mapping) and isinstance(after, Mapping) and path != "torch":
        for key in sorted({*before, *after}):
            yield from _leaves(f"{path}.{key}" if path else str(key), before.get(key), after.get(key))
    elif before != after:
        yield path, before, after


def _difference(name: str, one: Any, two: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    rule = rule_of(name)
    is_torch = name == "torch" and isinstance(one, Mapping) and isinstance(two, Mapping)
    why = f"{_torch_words(one, two)}: {rule.why}" if is_torch else rule.why
    speed = rule.speed
    if name == "host" and before.get("cpu") == after.get("cpu") and before.get("gpus") == after.get("gpus"):
        why, speed = "another machine of the same kind, or another container", 1
    shown = [_build(side) if is_torch else _words(side) for side in (one, two)]
    return Difference(name=name, before=shown[0], after=shown[1], speed=speed, tracing=rule.tracing, why=why)


def _torch_words(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """Another commit, another build of one commit, or the same wheel in another way."""
    if one.get("git") != two.get("git"):
        return "another commit of torch"
    fields = [name for name in ("cuda", "hip", "xpu", "debug", "record", "version") if one.get(name) != two.get(name)]
    return f"another build of the same commit, by {', '.join(fields) or 'what could be read of it'}"


def _build(values: Mapping[str, Any]) -> str:
    if values.get("version") is None:
        return str(values.get("not_observed", "none"))
    parts = [
        f"git {str(values['git'])[:10]}" if values.get("git") else "",
        f"files {values['record']}" if values.get("record") else "",
    ]
    parts += [f"{name} {values[name]}" for name in ("cuda", "hip", "xpu") if values.get(name)]
    return f"{values['version']} ({', '.join(filter(None, parts))})"


def _is_missing(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith(NOT_OBSERVED)) or (
        isinstance(value, list) and any(_is_missing(each) for each in value)
    )


def _reason_or_itself(value: Any) -> Any:
    """The reason alone, of a part that has nothing else."""
    reasons = list(value.values()) if isinstance(value, Mapping) else []
    return reasons[0] if reasons and all(map(_is_missing, reasons)) else value


def _words(value: Any) -> str:
    text = "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _HEAD_CHARACTERS else f"{text[:_HEAD_CHARACTERS]}... ({len(text)} characters)"
