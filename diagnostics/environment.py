"""What runs here, and what differs from what ran before.

    python -m diagnostics.environment --json before.json      describe this Python, machine and project
    python -m diagnostics.environment --diff before.json      what differs now, most likely cause first (or: --diff A B)
    python -m diagnostics.environment --verify --import       hash every installed file; import torch in a process beside

Describes the build of torch (git commit, CUDA, hash of its files), GPUs and their limits, every installed package with date
and hash, installed files that were edited, settings and variables that matter, the project's commit. Secrets are masked.
What cannot be read is listed as "not observed", with the reason. Nothing is written but --json.

In code, `fingerprint` describes what has to be equal for two numbers to be comparable, and what is worth knowing when they
differ; `series_key` is a hash of the former. Both are JSON-ready and name no machine: the host is a hash.

Exit codes: 0 described, or no difference · 1 a difference (--diff), an edited or missing file (--verify) · 2 bad usage, a file
that is no description · 3 no difference or edit was seen, but something could not be compared or checked.

Not built on torch.utils.collect_env: it asks pip, nvidia-smi and compilers one after the other, which takes longer than all
of this, and tells neither hashes nor limits. Without --import no torch is imported, which takes longer than all the rest.
Limits: `edits` and `settings` state theirs; what a program sets in its own process is seen when it calls `fingerprint` itself.
"""

from __future__ import annotations

import diagnostics.interrupts  # noqa: F401 - for Ctrl-C while the rest is imported

# isort: split
import argparse
import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics import gpu
from diagnostics.environments import documents, edits, gpus, machine, project, settings, shown, variables
from diagnostics.environments.builds import torch_build
from diagnostics.environments.differences import Comparison, compare
from diagnostics.environments.distributions import Distribution, installed
from diagnostics.environments.masking import masked_command
from diagnostics.environments.torch_runtime import Look
from diagnostics.output import ended_plainly, output_file, say, write_text
from diagnostics.terminal import ReportConsole, print_table

PACKAGES = (
    "accelerate",
    "datasets",
    "liger-kernel",
    "numpy",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)
_COMPARED = ("machine", "cpu", "cores", "gpus", "cuda", "torch_git", "system", "omp_num_threads")
_COMPARED_PACKAGES = tuple(name for name in PACKAGES if name.startswith(("nvidia-", "torch", "transformers", "triton", "liger")))
_TRACED = ("torch", "triton", "transformers", "accelerate", "liger-kernel")  # whose code a fingerprint looks for edits in
_MAX_ROWS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Describe or compare, print, and return the exit code."""
    options = _options(arguments)
    console = ReportConsole()
    try:
        before = documents.read(options.diff[0]) if options.diff else None
        importing = options.importing or (before is not None and "torch_runtime" in before)
        after = (
            documents.read(options.diff[1]) if len(options.diff) > 1 else describe(everything=options.verify, importing=importing)
        )
        if before is None:
            code = _print_description(console, after, is_verified=options.verify, max_rows=None if options.all else _MAX_ROWS)
            written = after
        else:
            comparison = compare(documents.comparable(before), documents.comparable(after))
            code = _print_comparison(console, comparison, max_rows=None if options.all else _MAX_ROWS)
            written = _to_dict(comparison, code)
    except documents.DocumentError as error:
        say(f"environment: {error}")
        return 2
    if options.json is not None:
        try:
            write_text(options.json, json.dumps(written, indent=1) + "\n")
        except OSError as error:
            say(f"environment: cannot write {options.json}: {error}")
            return 2
    return code


def describe(*, everything: bool = False, importing: bool = False) -> dict[str, Any]:
    """The whole description as JSON values.

    `everything` hashes every installed file, which reads all of them; `importing` adds what an imported torch tells.
    """
    began = time.perf_counter()
    look = Look() if importing else None
    try:
        distributions = installed()
        values = fingerprint(distributions)
        files = edits.check(distributions, everything=everything).to_dict()
        runtime = {"torch_runtime": look.result()} if look is not None else {}
    finally:
        if look is not None:
            look.stop()
    return {
        "kind": documents.KIND,
        "version": documents.VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprint": values,
        **runtime,
        "files": files,
        "distributions": [one.to_dict() for one in distributions],
        "pip": variables.pip_settings(),
        "remotes": project.remotes(),
        "command": masked_command(sys.orig_argv),
        "seconds": round(time.perf_counter() - began, 2),
    }


def fingerprint(distributions: Sequence[Distribution] | None = None) -> dict[str, Any]:
    """Describe this machine, its software, and the code in the current directory."""
    found = installed() if distributions is None else distributions
    state = gpu.snapshot()
    build = torch_build(found)
    versions = {one.name: one.version for one in found}
    return {
        "machine": platform.machine(),
        "cpu": machine.cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": [{"name": one.name, "memory_gib": round(one.memory_total_bytes / 2**30)} for one in state.gpus],
        "gpus_unavailable": state.unavailable,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": state.driver,
        "cuda": build["cuda"],
        "torch_git": build["git"],
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: versions[name] for name in PACKAGES if name in versions},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "git": project.state(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "torch_build": build,
        "distributions": {one.name: one.identity for one in found},
        "edited": edits.check([one for one in found if one.name in _TRACED], suffixes=(".py",)).edited,
        "startup_files": edits.startup_files(found),
        "variables": variables.relevant(),
        "config": settings.differing(),
        "gpu_settings": gpus.settings(),
        "system_details": machine.details(),
    }


def series_key(values: dict[str, Any]) -> str:
    """A short hash of what must be equal: two fingerprints with one key may be compared."""
    compared = {key: values.get(key) for key in _COMPARED}
    compared["driver_major"] = str(values.get("driver")).partition(".")[0]
    compared["python_minor"] = str(values.get("python")).rpartition(".")[0]
    compared["packages"] = {name: values.get("packages", {}).get(name) for name in _COMPARED_PACKAGES}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:12]


def not_observed(document: dict[str, Any]) -> list[str]:
    """What could not be read, as `part.name: reason`."""
    parts = {**document["fingerprint"], "torch_runtime": document.get("torch_runtime"), "pip": document["pip"]}
    told: list[str] = []
    for part, values in parts.items():
        if not isinstance(values, dict):
            continue
        if "not_observed" in values:
            told.append(f"{part}: {values['not_observed']}")
        for name, value in values.items():
            every = value if isinstance(value, list) else [value]
            reasons = {each for each in every if isinstance(each, str) and each.startswith(gpus.NOT_OBSERVED)}
            told += [f"{part}.{name}: {reason.removeprefix(gpus.NOT_OBSERVED)}" for reason in sorted(reasons)]
    return told


def _print_description(console: Console, document: dict[str, Any], *, is_verified: bool, max_rows: int | None) -> int:
    described, packages = shown.tables_of(document)
    print_table(console, described)
    print_table(console, packages, max_rows=max_rows)
    files = document["files"]
    for sentence in shown.file_sentences(files):
        console.print(f"[yellow]{escape(sentence)}[/]", highlight=False)
    for sentence in not_observed(document):
        console.print(f"[yellow]not observed[/]: {escape(sentence)}", highlight=False)
    how = (
        "every file hashed"
        if is_verified
        else "size and date of every file; Python files of torch and triton, and suspects, hashed"
    )
    is_clean = not files["edited"] and not files["gone"]
    verdict = "as installed" if is_clean else "not as installed"
    console.print(
        f"{len(document['distributions'])} packages {verdict} ({files['num_files']:,} files: {how}: {files['num_hashed']:,}); "
        f"{json.dumps(document).count('***')} secrets masked; {document['seconds']} s",
        style="bold",
        highlight=False,
    )
    if not is_verified or not (is_clean and (files["unreadable"] or files["without_record"])):
        return 1 if is_verified and not is_clean else 0
    return 3


def _print_comparison(console: Console, comparison: Comparison, *, max_rows: int | None) -> int:
    print_table(console, shown.difference_table(comparison), max_rows=max_rows, lines_between_rows=True)
    for sentence in comparison.not_compared:
        console.print(f"[yellow]not compared[/]: {escape(sentence)}", highlight=False)
    console.print(f"{len(comparison.differences)} differences", style="bold", highlight=False)
    if comparison.differences:
        return 1
    return 3 if comparison.not_compared else 0


def _to_dict(comparison: Comparison, code: int) -> dict[str, Any]:
    return {
        "kind": "differences",
        "version": documents.VERSION,
        "exit_code": code,
        "differences": [one.to_dict() for one in comparison.differences],
        "not_compared": list(comparison.not_compared),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.environment", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the description, or the differences")
    parser.add_argument(
        "--diff", nargs="+", default=[], type=Path, metavar="FILE", help="compare two descriptions, or one with now"
    )
    parser.add_argument("--verify", action="store_true", help="hash every installed file; 1 if one was edited or is gone")
    parser.add_argument(
        "--import", dest="importing", action="store_true", help="import torch beside, and tell what only that tells"
    )
    parser.add_argument("--all", action="store_true", help=f"print all rows, not the first {_MAX_ROWS} of a table")
    options = parser.parse_args(arguments)
    if len(options.diff) > 2:
        parser.error(f"--diff takes one or two files, found {len(options.diff)}")
    if len(options.diff) == 2 and (options.verify or options.importing):
        parser.error("--verify and --import look at what is installed now: two files say nothing about it")
    written = options.json
    if written is not None and written.is_file() and any(one.is_file() and written.samefile(one) for one in options.diff):
        parser.error(f"--json {written} is one of the descriptions: name another file")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(ended_plainly("environment", main))
