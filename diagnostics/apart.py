"""Our packages inside the observed program: found by path, and out of its sight where it has modules of the same names.

A program with a `diagnostics` or `dflash` of its own must import its own. Then ours are in `sys.modules` only while they import
each other; what they have imported they keep. Limit: an import of such a name by another thread of the program, in the moment
in which ours are imported (right after torch is), gets ours. Standard library only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

NAMES = ("diagnostics", "dflash")
ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "FXPROBE_APART"  # set in the environment of a program with such a module

_hidden: dict[str, ModuleType] | None = None  # our modules, when they are out of sight


def collision(directory: Path) -> Path | None:
    """The program's own module of one of our names in `directory`."""
    paths = (path for name in NAMES for path in (directory / f"{name}.py", directory / name / "__init__.py"))
    return next((path for path in paths if path.exists() and path.resolve().parent.parent != ROOT), None)


def hide() -> None:
    """From now on what is imported by our names is the program's own."""
    global _hidden
    _hidden = _taken_out()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside the block our packages are found before any others."""
    global _hidden
    theirs = {} if _hidden is None else _taken_out()
    sys.modules.update(_hidden or {})
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))
        if _hidden is not None:
            _hidden = _taken_out()
            sys.modules.update(theirs)


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in NAMES]
    return {name: sys.modules.pop(name) for name in names}
