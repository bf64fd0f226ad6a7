"""Many threads at once: `python -m diagnostics.stress [--policy none,lock,prewarm,isolate] [--threads 2,4,8] [--seconds S]`.

Each combination of a policy (see policies.py) and a number of threads runs in a process of its own, at a switch interval of
1e-5 s: every action alone (the reference), the threads, every action alone again ("wrong afterwards"). By default `prewarm`
runs with 4 threads, and `none` beside it for comparison. On a GPU, flex_attention is compiled cold, forward and backward.
Exit codes: 0 clean, 1 a policy that promises to be clean (prewarm, isolate; with --must-be-clean each one named) was not,
2 bad usage, 3 something of such a policy was not observed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dflash.standard_output import outlive_reader
from diagnostics.stress import policies, table
from diagnostics.stress.children import run_child
from diagnostics.stress.combination import Combination, Refused, unclean

BACKENDS = ("eager", "aot_eager", "inductor")
_COMPILERS = {"cpu": ("g++", "c++", "clang++"), "cuda": ("gcc", "cc", "clang")}  # Inductor's C++, Triton's launchers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every combination, print the table and what replays a failure."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    combinations, left_out = plan(options)
    for sentence in left_out:
        console.print(f"[yellow]left out[/]: {sentence}", highlight=False)
    try:
        results = [(combination, run_child(combination, hang_seconds=options.hang_seconds)) for combination in combinations]
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    problems = [(combination, problem) for combination, result in results for problem in _problems(options, combination, result)]
    table.print_results(console, results)
    table.print_problems(console, problems)
    if options.json is not None:
        _write_json(options.json, results, left_out)
    if problems:
        return 1
    return 3 if any(_must_be_clean(options, combination) and result["not_observed"] for combination, result in results) else 0


def plan(options: argparse.Namespace) -> tuple[list[Combination], list[str]]:
    """The combinations to run, and what this machine cannot do."""
    device, backends, left_out = options.device, list(options.backends), []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    compilers = _COMPILERS[device]
    if "inductor" in backends and not any(map(shutil.which, compilers)):
        backends.remove("inductor")
        left_out.append(f"backend inductor: it needs a compiler, and found none of {', '.join(compilers)}")
    if device == "cpu":
        left_out.append("flex_attention, which has no backward on a CPU: it needs a GPU")
    elif "inductor" not in backends:
        left_out.append("flex_attention: it needs the backend inductor")
    combinations = [
        Combination(
            policy=policy,
            threads=threads,
            seconds=options.seconds,
            seed=options.seed,
            backends=tuple(backends),
            device=device,
            actions=options.actions,
        )
        for policy in options.policy
        for threads in options.threads
    ]
    return combinations, left_out


def _problems(options: argparse.Namespace, combination: Combination, result: dict[str, Any]) -> list[str]:
    if not _must_be_clean(options, combination):
        return []
    policy = policies.POLICIES[combination.policy]
    return unclean(result, hazards_allowed=policy.hazards_allowed or not policy.promises_clean)


def _must_be_clean(options: argparse.Namespace, combination: Combination) -> bool:
    return options.must_be_clean or policies.POLICIES[combination.policy].promises_clean


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.stress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=_names, default=("none", "prewarm"), help="comma separated (default none,prewarm)")
    parser.add_argument("--threads", type=_numbers, default=(4,), help="comma separated (default 4)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the threads of each combination (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="decides what each thread does (default 0)")
    parser.add_argument("--backends", type=_names, default=BACKENDS, help=f"comma separated (default {','.join(BACKENDS)})")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--actions", type=_names, default=(), help="only these, comma separated, for example 'export,make_fx'")
    parser.add_argument("--must-be-clean", action="store_true", help="fail when any policy that --policy names is not clean")
    parser.add_argument("--hang-seconds", type=float, default=180.0, help="what a child may take beyond --seconds (default 180)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    options = parser.parse_args(arguments)
    problem = _bad_usage(options)
    if problem is not None:
        parser.error(problem)
    return options


def _bad_usage(options: argparse.Namespace) -> str | None:
    for name, known in (("policy", tuple(policies.POLICIES)), ("backends", BACKENDS)):
        unknown = [value for value in getattr(options, name) if value not in known]
        if unknown or not getattr(options, name):
            return f"--{name} {','.join(unknown)}: choose from {', '.join(known)}"
    if options.seconds <= 0 or options.hang_seconds <= 0 or min(options.threads, default=0) < 2:
        return "use --seconds and --hang-seconds above 0 and at least 2 --threads"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU here; use --device cpu or auto"
    if options.json is not None and not options.json.absolute().parent.is_dir():
        return f"--json {options.json}: there is no directory {options.json.absolute().parent}"
    return None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names(text)))


def _write_json(path: Path, results: list[tuple[Combination, dict[str, Any]]], left_out: list[str]) -> None:
    runs = [{**json.loads(combination.to_json()), **result} for combination, result in results]
    path.write_text(json.dumps({"version": 1, "torch": torch.__version__, "left_out": left_out, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
