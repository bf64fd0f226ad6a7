"""Run another program in this process as Python would: its own `sys.argv`, `sys.path`, `__main__`, traceback and exit code.

`runpy` takes `__main__` away when the main code ends, while the program's threads may still need it to pickle or import;
here it stays until the process ends.
"""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path


class UsageError(ValueError):
    """The program cannot be found; the message says what was looked for."""


def run_program(command: list[str], *, on_exception: Callable[[BaseException], None]) -> int:
    """Run `script.py args...` or `-m module args...`; returns its exit code. Raises UsageError before anything ran.

    `on_exception` hears of an exception that the program did not handle, before its hook prints it.
    """
    module, code = _module(command[1:]) if command[0] == "-m" else _script(command)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))  # noqa: S102 - running the user's program is the purpose
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - reported exactly as Python would, by the program's own hook
        on_exception(error)
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace.tb_next if trace else None), error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _script(command: list[str]) -> tuple[types.ModuleType, types.CodeType]:
    path = Path(command[0])
    try:
        with io.open_code(str(path.absolute())) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the program {path}: {error.strerror}; for a module write -- -m NAME") from error
    sys.argv = list(command)
    sys.path[0] = str(path.resolve().parent)
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    return module, compile(source, str(path), "exec")


def _module(command: list[str]) -> tuple[types.ModuleType, types.CodeType]:
    if not command:
        raise UsageError("-m needs the name of a module")
    spec = _find(command[0])
    loader = spec.loader
    code = loader.get_code(spec.name) if loader is not None and hasattr(loader, "get_code") else None
    if code is None:
        raise UsageError(f"module {spec.name} has no Python code to run")
    sys.argv = [spec.origin or command[0], *command[1:]]
    module = types.ModuleType("__main__")
    module.__spec__, module.__loader__, module.__package__ = spec, loader, spec.parent
    module.__file__ = spec.origin
    return module, code


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise UsageError(f"no module named {name}: {error}") from error
    if spec is None:
        raise UsageError(f"no module named {name}, or it is a package without __main__.py")
    return spec


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1
