"""Runs the probes over one checkpoint, shows a line for each check on stderr, and returns the JSON-ready result.

Exit codes (`dflash.__main__`): 1 when a check failed; else 3 when what was required was not observed: with --probes anything
of these probes, without it `settings.ALWAYS_REQUIRED`; else 0. Checks that were not observed are listed either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from dflash.checking import alignment_probe, contract_probe, leak_probe, parity_probe, template_probe
from dflash.checking.settings import ALWAYS_REQUIRED, FAIL, NOT_OBSERVED, Check, CheckConfig, unobserved
from dflash.checking.subject import Subject, read
from dflash.checking.texts import Texts, collect
from dflash.data.meta import DataError


def check(config: CheckConfig) -> dict[str, Any]:
    """Check one checkpoint.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is another target's.
        ConfigError, DataError: target, device or --data cannot be used.
    """
    subject = Subject(config, read(config))
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    checks = []
    source: list[str] = []
    for found in _checks(subject, source):
        checks.append(found)
        _show(console, found)
    failed = [found.name for found in checks if found.status == FAIL]
    missing = [found.name for found in checks if found.status == NOT_OBSERVED]
    return {
        "checkpoint": str(subject.stored.directory),
        "kind": subject.stored.kind,
        "target": subject.target.path if subject.target else None,
        "dtype": subject.target.dtype if subject.target else None,
        "texts": source[0] if source else None,
        "failed": failed,
        "not_observed": missing,
        "required_missing": _required_missing(config, checks),
        "checks": [vars(found) for found in checks],
    }


def _checks(subject: Subject, source: list[str]) -> Iterator[Check]:
    chosen = subject.config.chosen
    if "contract" in chosen:
        yield from contract_probe.probe(subject)
    if "leak" in chosen:
        yield from leak_probe.probe(subject)
    if "alignment" in chosen or "parity" in chosen:
        yield from _on_texts(subject, source)
    if "template" in chosen:
        yield from template_probe.probe(subject)


def _on_texts(subject: Subject, source: list[str]) -> Iterator[Check]:
    probes = {"alignment": alignment_probe.probe, "parity": parity_probe.probe}
    wanted = [name for name in probes if name in subject.config.chosen]
    texts: Texts | None = None
    why = subject.missing
    if not why:
        try:
            texts = collect(subject)
            source.append(texts.source)
        except DataError as error:
            if subject.config.data is not None:
                raise
            why = str(error)
    for name in wanted:
        if texts is None:
            yield unobserved(f"{name}.all", why)
            continue
        with torch.no_grad():
            yield from probes[name](subject, texts)


def _required_missing(config: CheckConfig, checks: list[Check]) -> list[str]:
    if config.probes:
        return [found.name for found in checks if found.status == NOT_OBSERVED]
    observed = {found.name for found in checks if found.status != NOT_OBSERVED}
    return [name for name in ALWAYS_REQUIRED if name not in observed]


def _show(console: Console, found: Check) -> None:
    style = {FAIL: "bold red", NOT_OBSERVED: "yellow"}.get(found.status, "green")
    line = f"{found.name}: {found.found}" + (f". Fix: {found.fix}" if found.fix else "")
    console.print(f"{found.status:<13}", style=style, end="", markup=False)
    console.print(line, markup=False)
