"""Where does a function trace? `python -m diagnostics.scan TARGET [--json FILE] [--max-paths N] [--max-functions N]`.

TARGET is a dotted name (module, function, class or method), a .py file or a package directory. Its source, and the source
of everything it can reach, is read but not run, torch included, and every path to an FX entry point is printed, shortest first:
`Tracer.trace`, `symbolic_trace`, `make_fx`, `torch.export`, `torch.compile`, AOTAutograd, and the tracing flag. A text search of
one file does not find them: uncompiled `flex_attention` reaches `make_fx` through the functions registered for its operator.

Exit codes: 0 nothing found, 1 entry points found, 2 TARGET not found or not readable, 3 nothing found but something could not be
followed, or a bound was reached.

Known limits: a path says what can run, not what does; its conditions are printed as written, unevaluated. What an imported
module does when it is imported, torch.jit, and what compiled code calls back are not scanned. Beyond an entry point the scan
does not go. See diagnostics/static/ for how names are resolved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.static.entry_points import WHEN
from diagnostics.static.search import MAX_FUNCTIONS, Found, ScanResult, scan
from diagnostics.static.targets import TargetError

__all__ = ["ScanResult", "TargetError", "main", "print_result", "scan"]
_MAX_UNFOLLOWED = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Scan, print, and return the exit code."""
    options = _options(arguments)
    try:
        result = scan(options.target, max_functions=options.max_functions)
    except TargetError as error:
        print(f"scan: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
        return 2
    print_result(Console(width=None if sys.stdout.isatty() else 160), result, max_paths=options.max_paths)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        except OSError as error:
            print(f"scan: cannot write {options.json}: {error}", file=sys.stderr)  # noqa: T201 - a message of the command
            return 2
    return result.exit_code


def print_result(console: Console, result: ScanResult, *, max_paths: int) -> None:
    """Print the paths, then what could not be followed."""
    console.print(f"{escape(result.target)}: {result.functions} functions of {result.modules} modules read", highlight=False)
    for found in result.found[:max_paths]:
        _print_path(console, found)
    if len(result.found) > max_paths:
        console.print(f"... and {len(result.found) - max_paths} more: --max-paths N shows more of them, --json FILE has all")
    counts = Counter(found.kind for found in result.found)
    console.print("entry points: " + (", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"), style="bold")
    for bound in result.bounds:
        console.print(f"[yellow]bound reached[/]: {escape(bound)}", highlight=False)
    for one in result.unfollowed[:_MAX_UNFOLLOWED]:
        times = f" ({one.count} times)" if one.count > 1 else ""
        console.print(f"could not be followed: {one.kind}: {escape(one.text)} at {escape(one.where)}{times}", highlight=False)
    if len(result.unfollowed) > _MAX_UNFOLLOWED:
        console.print(f"... and {len(result.unfollowed) - _MAX_UNFOLLOWED} more, farther away: --json FILE has all of them")
    if result.presumed:
        console.print(f"{result.presumed} method calls were taken for those of tensors or of Python's own types", highlight=False)


def _print_path(console: Console, found: Found) -> None:
    colour = "yellow" if found.conditions else "red"
    sure = "on a condition" if found.conditions else "unconditionally"
    console.print(f"[bold {colour}]{found.kind}[/] {escape(found.name)}, {sure}: {WHEN[found.kind]}", highlight=False)
    for step in found.path:
        console.print(f"    {escape(step.function)} {escape(step.how)} ({escape(step.where)})", highlight=False)
        for condition in step.conditions:
            console.print(f"        if {escape(condition)}", style="dim", highlight=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.scan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help="a dotted name, a .py file or a package directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--max-paths", type=int, default=10, metavar="N", help="how many paths to print (default 10)")
    parser.add_argument(
        "--max-functions",
        type=int,
        default=MAX_FUNCTIONS,
        metavar="N",
        help=f"how many functions to read besides those of TARGET (default {MAX_FUNCTIONS}; all of torch takes minutes)",
    )
    options = parser.parse_args(arguments)
    if min(options.max_paths, options.max_functions) < 1:
        parser.error("use at least 1 for --max-paths and --max-functions")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
