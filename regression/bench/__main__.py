"""`python -m regression.bench [NAME...]`: how fast the parts of training are, beside the ceilings of the machine.

    python -m regression.bench                                    # all, each in a fresh process
    python -m regression.bench drafter_step --json FILE           # one, with its figures as JSON
    python -m regression.bench drafter_step --device cpu --shape tiny

| name | what |
|---|---|
| `drafter_step` | forward, loss, backward and optimizer of one row, by parts; memory, recompiles, fallbacks, host syncs |
| `target_forward` | the target with its features, beside plain transformers |
| `specforge` | SpecForge's drafter and loss on the same shapes (`--specforge DIR`) |
| `warm_start` | process start to the first step at full speed: cold, and with the compile cache |
| `pipeline` | target and drafter together through the trainer, beside each alone |
| `probes` | training under fxprobe beside training without |
| `scaling` | the drafter's step against context, anchors and vocabulary, beside its useful work |
| `engines` | the same training by threads and by processes: tok/s, processor time, memory, start-up |
| `transport` | target states from process to process, beside the bare link; two GPUs, or the CPU |
| `simulation` | runs of both engines with planted stages, beside what `dflash plan --simulate` foretells; only by name, CPU |

Each bench runs in a fresh process and measures its ceilings there. Results are written as they come: a bench that fails, or
takes over `--timeout-seconds`, loses only its own figures. Files have the form of `regression/baselines/h200-*.json`.
Shape `tiny` on a CPU shows that everything runs, not how fast.
Exit codes: 0 measured; 1 a bench saw a recompile, a fallback or an FX error; 2 bad usage; 3 a bench left no figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash.config import ConfigError
from dflash.files import write_whole
from dflash.standard_output import outlive_reader
from diagnostics.environment import fingerprint
from regression import baseline
from regression.bench import settings as bench
from regression.bench.figures import Result, table
from regression.child import ChildFailed, run_json

BENCHES = (
    "drafter_step", "target_forward", "specforge", "warm_start", "pipeline", "probes", "scaling", "engines", "transport",
    "simulation",
)  # fmt: skip
MUST_BE_ZERO = ("recompiles", "recompiles after warmup", "fallbacks", "fx errors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benches one after the other, each in a fresh process; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    found = False
    for name in options.names:
        try:
            result = _run(name, options)
        except ChildFailed as error:
            failures[name] = str(error)
            console.print(f"{name} left no figures: {error}", markup=False, highlight=False)
        else:
            console.print(table(result))
            results[name] = result.to_dict()
            found |= any(figure.name.rpartition(": ")[2] in MUST_BE_ZERO and figure.value for figure in result.figures)
        if options.json:
            _write(options.json, {"results": results, "failures": failures})
    print(json.dumps({"results": results, "failures": failures}))
    return 3 if failures else 1 if found else 0


def _run(name: str, options: argparse.Namespace) -> Result:
    flags = ["--device", options.device, "--rounds", str(options.rounds)]
    flags += ["--shape", options.shape] if options.shape else []
    flags += ["--levers", options.levers] if options.levers else []
    flags += ["--specforge", str(options.specforge)] if options.specforge else []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        log = options.json.with_suffix(f".{name}.log") if options.json else Path(scratch) / "stderr.log"
        command = [sys.executable, "-m", f"regression.bench.{name}", *flags]
        child = run_json(command, log=log, timeout_seconds=options.timeout_seconds)
        if child.returncode != 0:
            raise ChildFailed(f"exit code {child.returncode}: {child.stderr_tail}")
    return Result.from_dict(child.result)


def _write(path: Path, values: dict[str, Any]) -> None:
    command = f"python -m regression.bench {' '.join(sys.argv[1:])}".strip()
    content = {"kind": baseline.RESULT, "command": command, "fingerprint": fingerprint(), **values}
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all that can run: {', '.join(BENCHES)}")
    bench.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after every bench")
    parser.add_argument("--timeout-seconds", type=float, default=600.0, help="of one bench (default 600)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {*BENCHES})
    if unknown:
        parser.error(f"unknown bench {unknown[0]!r}: known are {', '.join(BENCHES)}")
    left_out = {"simulation", *(() if options.specforge else ("specforge",))}
    options.names = options.names or [name for name in BENCHES if name not in left_out]
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    try:
        bench.from_options(options)
    except ConfigError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
