"""The command line of `python -m diagnostics.compile_cache`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from diagnostics.caches import here
from diagnostics.output import number, output_file, printable

MAX_ROWS = 40


def parser(about: str) -> argparse.ArgumentParser:
    """The command line of `python -m diagnostics.compile_cache`."""
    made = argparse.ArgumentParser(
        prog="python -m diagnostics.compile_cache", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(required=True, dest="command", metavar="COMMAND")
    one = _command(commands, "inventory", "what lies in the caches")
    one.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="(default: where the environment puts them)")
    one.add_argument(
        "--runs", type=_folder, action="append", default=[], metavar="DIR",
        help="where runs of the trainer wrote (--output, or a folder above): how often they hit the cache; may come again",
    )  # fmt: skip
    _add_common(one, "json", "all")
    one = _command(commands, "diff", "what came, went and was rewritten")
    one.add_argument("before", type=Path, metavar="A", help="folder, snapshot or inventory --json")
    one.add_argument("after", type=Path, metavar="B", help="likewise")
    _add_common(one, "json", "all")
    one = _command(commands, "snapshot", "a copy of a cache")
    one.add_argument("file", type=output_file, metavar="FILE", help="to write, a tar file; must not be there")
    _add_common(one, "directory")
    one = _command(commands, "restore", "put a snapshot in the cache's place")
    one.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a snapshot")
    one.add_argument("--directory", type=Path, metavar="FOLDER", help="(default: where the snapshot was taken)")
    _add_common(one, "yes", "undo")
    one = _command(commands, "prune", "move entries into the trash")
    one.add_argument(
        "--older-than-days", type=_positive, metavar="DAYS", help="not written, nor read as far as known, for so long"
    )
    one.add_argument("--max-bytes", type=_bytes, metavar="BYTES", help="the longest unused ones, until the cache is so small")
    one.add_argument("--foreign", action="store_true", help="entries of another torch, Triton, CUDA, Python or device")
    one.add_argument("--torn", action="store_true", help="damaged entries, and what dead writers left")
    one.add_argument("--empty-trash", action="store_true", help="delete for good what restore and prune moved")
    _add_common(one, "directory", "yes", "undo", "all")
    return made


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    return made


def _add_common(parser: argparse.ArgumentParser, *names: str) -> None:
    if "directory" in names:
        parser.add_argument(
            "--directory", type=Path, default=here.inductor_directory(), metavar="FOLDER", help="the cache (default: %(default)s)"
        )
    if "json" in names:
        parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything that was found")
    if "yes" in names:
        parser.add_argument("--yes", action="store_true", help="do not ask")
    if "undo" in names:
        parser.add_argument("--undo", action="store_true", help="take the last restore or prune of the cache back")
    if "all" in names:
        parser.add_argument("--all", action="store_true", help=f"print all rows, not the first {MAX_ROWS}")


def _folder(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(printable(f"{text}: there is no such folder: name the --output of runs"))
    return Path(text)


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: use a whole number of bytes, at least 0")
    return int(text)


def _positive(text: str) -> float:
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: use a number of at least 0")
    return value
