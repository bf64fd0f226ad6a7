"""Files that a command was asked to write, and words on a standard error that may be closed. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from diagnostics import interrupts

_WIDTH_OF_A_FILE = 140
# What a terminal obeys instead of printing it: controls (of 7 and 8 bits), and marks that turn the direction of writing.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def output_file(text: str) -> Path:
    """The type of an option that names a file to write; refuses at the start what cannot be one."""
    path = Path(text)
    try:
        path.absolute().stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a loop of links, a name that is too long
        raise argparse.ArgumentTypeError(printable(f"{path}: {error.strerror}")) from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(printable(f"{path} is a directory: name a file"))
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(printable(f"there is no directory {path.absolute().parent}"))
    return path


def number(text: str) -> float:
    """The number that an option was given, NaN where it is none: which ones are good the option says itself."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no regular file (/dev/stdout, a pipe) is written to as it is."""
    if path.exists() and not path.is_file():  # before it is resolved: /dev/stdout has no other name that can be opened
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def width(stream: TextIO | None) -> int | None:
    """Characters in a line of a report: None, which is the terminal's or COLUMNS, or enough for a file."""
    return None if "COLUMNS" in os.environ or (stream is not None and stream.isatty()) else _WIDTH_OF_A_FILE


def ended_plainly(name: str, command: Callable[[], int]) -> int:
    """The exit code of `command`. Ctrl-C (130) and a full disk (2) are told in one line, not in a traceback."""
    try:
        interrupts.as_usual()
        return command()
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return interrupts.INTERRUPTED
    except OSError as error:
        say(f"{name}: {error}")
        return 2


def printable(text: str) -> str:
    """`text` with its control characters spelled out, save line feeds and tabs: a log or a file name commands no terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(sentence: str) -> None:
    """One line on standard error, or nothing once nobody reads it: a closed pipe must not end a command."""
    with ignoring_closed_stderr():
        print(printable(sentence), file=sys.stderr, flush=True)  # noqa: T201 - what this function is for


@contextlib.contextmanager
def ignoring_closed_stderr() -> Iterator[None]:
    """Go on after the block when standard error was closed in it; later words go nowhere."""
    if sys.stderr is None:
        _discard_stderr()
    try:
        yield
    except OSError:
        _discard_stderr()


def _discard_stderr() -> None:
    sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
