"""Environments and their differences as tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from diagnostics.environments.differences import Comparison
from diagnostics.environments.ranking import WORDS, rule_of
from diagnostics.tables import Table

_MAX_FILES = 5
_PARTS = (
    ("torch_build", "torch"), ("torch_runtime", "torch, imported"), ("gpu_settings", "GPU"), ("system_details", "system"),
    ("config", "setting"), ("variables", "variable"), ("startup_files", "runs at Python's start"), ("pip", "pip"),
)  # fmt: skip
_BROUGHT_BY = {
    "triton": re.compile(r"(pytorch-)?triton(-\w+)?"),
    "NCCL": re.compile(r"nvidia-nccl(-cu\d+)?"),
    "cuDNN": re.compile(r"nvidia-cudnn(-cu\d+)?"),
}
_MAX_CHARACTERS = 200
_TOP = ("python", "driver", "cpu", "cores", "logical_cores", "memory_gib", "machine", "system", "gpus", "host")


def tables_of(document: Mapping[str, Any]) -> list[Table]:
    """What one environment is, and its packages."""
    values = {**document["fingerprint"], **{name: document[name] for name in ("torch_runtime", "pip") if name in document}}
    rows = [("", name, _text(values.get(name))) for name in _TOP if values.get(name) not in (None, [])]
    for part, label in _PARTS:
        rows += [(label, name, _text(value)) for name, value in (values.get(part) or {}).items() if value is not None]
        rows += _libraries(document.get("distributions", ())) if part == "torch_build" else []
    git = values.get("git")
    rows += [("project", name, _text(value)) for name, value in (git or {"commit": "no repository, or no git"}).items()]
    rows += [("project", f"remote {name}", url) for name, url in document.get("remotes", {}).items()]
    packages = tuple(
        (one["name"], one["version"], one["record"] or "none", one["installed"] or "unknown", _notes(one))
        for one in sorted(document.get("distributions", ()), key=_importance)
    )
    return [
        Table("Environment", ("part", "what", "value"), tuple(rows)),
        Table("Packages", ("package", "version", "files", "installed", "notes"), packages),
    ]


def difference_table(comparison: Comparison) -> Table:
    """One row a difference."""
    rows = tuple(
        (WORDS[one.speed], WORDS[one.tracing], one.name, one.before, one.after, one.why) for one in comparison.differences
    )
    return Table("Differences, most likely cause first", ("speed", "tracing", "what", "before", "after", "why"), rows)


def file_sentences(files: Mapping[str, Any]) -> list[str]:
    """What the check of installed files found, the worst first, and how it was made."""
    told = []
    for key, words in (("edited", "edited after it was installed"), ("gone", "gone"), ("unreadable", "not readable")):
        for name, paths in files[key].items():
            more = f" and {len(paths) - _MAX_FILES} more" if len(paths) > _MAX_FILES else ""
            told.append(f"{name}: {len(paths)} files {words}: {', '.join(paths[:_MAX_FILES])}{more}")
    if files["without_record"]:
        told.append(f"no RECORD to compare with: {', '.join(files['without_record'])}")
    if files["num_not_hashed"]:
        told.append(f"{files['num_not_hashed']} files younger than their RECORD were not hashed: --verify hashes all")
    return told


def _importance(one: Mapping[str, Any]) -> tuple[int, str]:
    rule = rule_of(f"distributions.{one['name']}")
    return (-max(rule.speed, rule.tracing), one["name"])


def _notes(one: Mapping[str, Any]) -> str:
    notes = ["editable"] if one["editable"] else []
    notes += [f"from {one['source']}"] if one["source"] else []
    notes += [f"also {text}" for text in one["shadowed"]]
    return "; ".join(notes)


def _libraries(distributions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The libraries that are asked for first, from the packages that bring them."""
    found = []
    for library, pattern in _BROUGHT_BY.items():
        told = [f"{one['version']} ({one['name']})" for one in distributions if pattern.fullmatch(one["name"])]
        found.append(("torch", library, ", ".join(told) or "not observed: no package brings it; --import asks torch itself"))
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        texts = [_text(each) for each in value]
        return f"{len(texts)} x {texts[0]}" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    text = str(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}... ({len(text)} characters)"
