"""From what a user names - a dotted name, a file, a directory - to the functions that a scan starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diagnostics.static.dispatch import implementations, is_operator
from diagnostics.static.references import all_functions
from diagnostics.static.resolver import Resolver, methods
from diagnostics.static.sources import Sources
from diagnostics.static.values import Class, Function, Instance, Module, Value


class TargetError(Exception):
    """The target cannot be found, read or scanned; the message says what to do."""


def find(target: str) -> tuple[Resolver, list[Function]]:
    """A resolver of the target's sources, and where to start. Raises TargetError on a target that is not there or not Python."""
    path = Path(target)
    if path.is_dir():
        return _directory(path)
    if path.is_file() and path.suffix == ".py":
        return _file(path)
    if target.endswith(".py") or "/" in target:
        raise TargetError(f"{target}: there is no such file or directory")
    return _dotted(target)


def _directory(path: Path) -> tuple[Resolver, list[Function]]:
    files = sorted(path.rglob("*.py"))
    if not files:
        raise TargetError(f"{path}: a directory without .py files; give a package, a .py file or a dotted name")
    sources = Sources(sorted({_import_root(file.parent) for file in files}))
    return Resolver(sources), [root for file in files for root in _module_roots(sources, _module_name(file))]


def _file(path: Path) -> tuple[Resolver, list[Function]]:
    sources = Sources([_import_root(path.parent)])
    return Resolver(sources), _module_roots(sources, _module_name(path))


def _import_root(directory: Path) -> Path:
    """The directory that the package around `directory` is imported from."""
    directory = directory.resolve()
    while (directory / "__init__.py").exists():
        directory = directory.parent
    return directory


def _module_name(file: Path) -> str:
    file = file.resolve()
    parts = file.relative_to(_import_root(file.parent)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _module_roots(sources: Sources, name: str) -> list[Function]:
    scope = sources.module(name)
    if scope is None:
        raise TargetError(sources.unreadable.get(name, f"{name}: has no Python source"))
    return [Function(scope), *all_functions(scope)]


def _dotted(target: str) -> tuple[Resolver, list[Function]]:
    if not all(part.isidentifier() for part in target.split(".")):
        raise TargetError(
            f"{target}: neither a file, nor a directory, nor a dotted name such as torch.nn.attention.flex_attention"
        )
    sources = Sources([Path.cwd()])
    parts = target.split(".")
    if sources.is_leaf(parts[0]):
        raise TargetError(f"{target}: {parts[0]} is not scanned, since it calls nothing of torch")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if sources.place(module) is not None:
            break
    else:
        raise TargetError(f"{target}: there is no module {parts[0]} in {Path.cwd()} or among the installed packages")
    if length == len(parts):
        return Resolver(sources), _module_roots(sources, module)
    _module_roots(sources, module)  # says why, if it cannot be read
    resolver = Resolver(sources)
    values: tuple[Value, ...] = (Module(module),)
    for number, part in enumerate(parts[length:]):
        values = tuple(one for value in values for one in resolver.attribute(value, part))
        if not values:
            raise TargetError(f"{target}: {'.'.join(parts[: length + number])} has no {part} that its source tells of")
    roots = [root for value in values for root in _roots_of(value, resolver)]
    if not roots:
        raise TargetError(f"{target}: is no module, function, class or method with Python source")
    return resolver, roots


def _roots_of(value: Value, resolver: Resolver) -> Iterator[Function]:
    match value:
        case Function():
            yield value
        case Class():
            yield from methods(value)
        case Instance():
            if is_operator(resolver, value):
                resolver.dispatched.add(value.cls)
                yield from (function for one in implementations(resolver, value) for function in one.functions)
            yield from (one for one in resolver.attribute(value, "__call__") if isinstance(one, Function))
        case Module():
            pass
