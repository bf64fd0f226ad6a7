"""What is in torch's compile caches, and who wrote it? `python -m diagnostics.compile_cache COMMAND ...`.

    inventory [FOLDER...]         parts, graphs, kernels, writers, damage, users and the state of each cache; with --runs DIR
                                  how often the trainer's last runs hit it
    diff A B                      what came, went and was rewritten; A and B: folder, snapshot or inventory --json
    snapshot FILE                 a copy of the cache that can be restored where torch, Triton, Python, CPU and GPU are the same
    restore FILE [--yes]          put it in the cache's place; the old one goes into the trash beside it
    prune --foreign [--yes] ...   move entries into the trash
    restore | prune --undo        take the last of them back; prune --empty-trash deletes what is in the trash

For any PyTorch program: the caches of Inductor, AOTAutograd, FX graphs and Triton, wherever the environment puts them
(TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, TRITON_HOME, or the user's default), or --directory FOLDER. Pickles are never loaded.
Only restore and prune change anything, and only what was said; diff, inventory and snapshot leave access times as they were
where the system allows that.

Exit codes: 0 fine · 1 found: a cache that is foreign, torn or contended, a difference, a snapshot of another environment, a
cache in use · 2 bad usage or input, --yes is missing · 3 something could not be looked at: nothing was changed.

Limits: a cache keeps no count of hits, only run logs of the trainer do. What a C++ kernel was built for is known only through
its graph. From torch 2.14 on entries name no version but a hash of torch's sources; it is computed from the installed files.
"""

from __future__ import annotations

import diagnostics.interrupts  # noqa: F401 - for Ctrl-C while the rest is imported

# isort: split
import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.caches import archive, difference, here, inventory, past_runs, prune, restore, trash, views
from diagnostics.caches.errors import CacheError
from diagnostics.caches.options import MAX_ROWS, parser
from diagnostics.output import ended_plainly, say, write_text
from diagnostics.terminal import ReportConsole

_MAX_TOLD = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one command; returns the exit code."""
    options = parser(__doc__ or "").parse_args(arguments)
    console = ReportConsole()
    try:
        code = _COMMANDS[options.command](options, console)
    except CacheError as error:
        say(f"compile_cache: {error}")
        return error.exit_code
    except OSError as error:
        say(f"compile_cache: {error}")
        return 2
    return code


def summary(directory: Path | None = None) -> dict[str, Any]:
    """The cache as a few JSON values for a report; `directory` is None, with a reason, where there is none.

    Of long lists the beginning; no command lines of processes.
    """
    place = directory or here.inductor_directory()
    try:
        found = inventory.to_dict(inventory.take(place), listing=False)
    except CacheError as error:
        return {"directory": None, "reason": f"{error}; TORCHINDUCTOR_CACHE_DIR would name another"}
    kept = {name: value for name, value in found.items() if name not in {"graphs", "kernels", "users"}}
    cut = {name: kept[name][:_MAX_TOLD] for name in ("torn", "problems", "not_observed", "writers")}
    return {**kept, **cut, "num_torn": len(found["torn"]), "num_users": len(found["users"])}


def _inventory(options: argparse.Namespace, console: Console) -> int:
    named: list[Path] = options.folders
    found = []
    for place in named or here.places():
        if not named and not place.exists():
            console.print(f"[bold]{escape(str(place))}[/]: [yellow]absent[/]", highlight=False)
            continue
        found.append(inventory.to_dict(inventory.take(place)))
    runs, untold = past_runs.read(options.runs)
    views.print_runs(console, runs, untold, max_rows=_rows(options))  # first: the caches may fill pages
    for values in found:
        values["hits"] = [
            asdict(run) for run in runs if Path(run.directory).resolve() == Path(values["directory"]).resolve()
        ] or None
        views.print_inventory(console, values, max_rows=_rows(options))
    told = {"runs": [asdict(run) for run in runs], "not_observed": untold}
    _write(options, {"version": 1, "kind": "inventories", "environment": here.fingerprint(), "caches": found, **told})
    if not found or any(values["problems"] for values in found) or (options.runs and not runs):
        return 3
    return int(any(state in inventory.PROBLEMS for values in found for state in values["states"]))


def _diff(options: argparse.Namespace, console: Console) -> int:
    before, after = difference.load(options.before), difference.load(options.after)
    changes = difference.difference(before, after)
    views.print_difference(console, before, after, changes, max_rows=_rows(options))
    _write(options, difference.to_dict(before, after, changes))
    if before.notes or after.notes:
        return 3
    return int(any(change.kind != "date" or not change.same_content for change in changes))


def _snapshot(options: argparse.Namespace, console: Console) -> int:
    found = inventory.take(options.directory)
    written, left_out = archive.write(found, options.file)
    console.print(
        f"wrote {escape(str(written.path))}: {len(written.files):,} files, {views.megabytes(written.size_bytes)}, for the "
        f"environment {here.key(written.fingerprint)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    views.print_notes(console, "left out", left_out)
    for user in found.users:
        views.print_notes(console, "note", [f"process {user.pid} {user.how}: what it compiles from now on is not in it"])
    elsewhere = [str(place) for place in here.places()[1:] if options.directory == here.inductor_directory() and place.is_dir()]
    views.print_notes(
        console, "not in it", [f"{place}: name it with --directory for a snapshot of its own" for place in elsewhere]
    )
    return 0


def _restore(options: argparse.Namespace, console: Console) -> int:
    if options.undo:
        return _undo(options, console)
    if options.file is None:
        raise CacheError("name the snapshot to restore, or --undo")
    snapshot = archive.read(options.file)
    directory = options.directory or Path(snapshot.directory)
    views.print_notes(console, "note", restore.check(snapshot, directory))
    _confirm(options, f"put {len(snapshot.files):,} files of {options.file} in the place of {directory}?")
    thrown = restore.restore(snapshot, directory)
    old = f"what was there is in {thrown.content}" if thrown.content.exists() else "nothing was there"
    console.print(f"restored {escape(str(directory))}; {escape(old)}", highlight=False, soft_wrap=True)
    console.print("restore --undo takes it back; prune --empty-trash deletes the trash", highlight=False)
    return 0


def _prune(options: argparse.Namespace, console: Console) -> int:
    if options.undo:
        return _undo(options, console)
    if options.empty_trash:
        return _empty(options, console)
    rules = prune.Rules(
        older_than_days=options.older_than_days, max_bytes=options.max_bytes, foreign=options.foreign, torn=options.torn
    )
    if rules == prune.Rules():
        raise CacheError("say what to prune: --older-than-days, --max-bytes, --foreign, --torn (or --undo, --empty-trash)")
    found = inventory.take(options.directory)
    chosen = prune.choose(found, rules, time.time())
    young = [entry.path for entry in found.torn if rules.torn and prune.is_young(entry, time.time())]
    views.print_notes(
        console, "not moved", [f"{path}: torn, but may be being written: it is younger than 10 minutes" for path in young]
    )
    if not chosen:
        console.print(f"nothing to prune in {escape(str(found.directory))}", highlight=False)
        return 0
    views.print_chosen(console, chosen, max_rows=_rows(options))
    size = views.megabytes(sum(entry.size_bytes for entry, _ in chosen))
    _confirm(options, f"move {len(chosen):,} entries, {size}, out of {found.directory}?")
    thrown = prune.prune(found, chosen)
    console.print(f"moved {len(chosen):,} entries, {size}, into {escape(str(thrown.content))}", highlight=False, soft_wrap=True)
    console.print("prune --undo puts them back; prune --empty-trash deletes the trash", highlight=False)
    return 0


def _undo(options: argparse.Namespace, console: Console) -> int:
    _confirm(options, f"take back the last restore or prune of {_directory(options)}?")
    console.print(escape(restore.undo(_directory(options))), highlight=False, soft_wrap=True)
    return 0


def _empty(options: argparse.Namespace, console: Console) -> int:
    place = restore.target(options.directory)
    found = trash.thrown(place)
    if not found:
        console.print(f"the trash of {escape(str(place))} is empty", highlight=False)
        return 0
    _confirm(options, f"delete {', '.join(str(one.folder) for one in found)} for good?")
    with trash.held(place):
        deleted = trash.empty(place)
    console.print(f"deleted {escape(', '.join(str(folder) for folder in deleted))}", highlight=False, soft_wrap=True)
    return 0


def _directory(options: argparse.Namespace) -> Path:
    return options.directory or here.inductor_directory()


def _confirm(options: argparse.Namespace, question: str) -> None:
    """Ask, unless --yes was given. Raises CacheError on anything but yes."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise CacheError(f"{question} Nothing was changed: nobody can be asked here, so say it with --yes")
    say(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CacheError("nothing was changed")


def _rows(options: argparse.Namespace) -> int | None:
    return None if options.all else MAX_ROWS


def _write(options: argparse.Namespace, values: dict[str, Any]) -> None:
    if options.json is not None:
        write_text(options.json, json.dumps(values, indent=1) + "\n")


_COMMANDS = {"inventory": _inventory, "diff": _diff, "snapshot": _snapshot, "restore": _restore, "prune": _prune}

if __name__ == "__main__":
    outlive_reader()
    sys.exit(ended_plainly("compile_cache", main))
