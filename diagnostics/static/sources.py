"""Python source files as scopes and the names that they bind, found and parsed without running them.

Only the finder of a top-level package is asked (`importlib.util.find_spec` of a name without dots imports nothing); below it
modules are found by their files. A file is parsed when it is first needed and kept.

Known limits: names bound by `exec`, by assignment to another module's attributes or in a loop over `globals()` do not exist
here; where a name is bound several times, all of its bindings count, except `@overload` declarations.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ScopeNode = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# What cannot call torch by itself, whatever it is asked to do; functions handed to it are seen where they are handed over.
_LEAVES = {
    *("filelock", "fsspec", "jinja2", "mpmath", "networkx", "numpy", "packaging", "pandas", "psutil", "rich", "scipy"),
    *("sympy", "tqdm", "typing_extensions", "yaml"),
}


class SourceError(Exception):
    """A source file that cannot be read or parsed; the message says which and why."""


@dataclass(frozen=True)
class Binding:
    """One way in which a name gets its value; `node` is an expression, or the statement of an import or a definition."""

    kind: Literal["import", "from", "function", "class", "value", "annotation", "parameter", "element", "enter", "unknown"]
    node: ast.AST | None = None
    name: str = ""  # import: the module; from: the name in the module


@dataclass(eq=False)
class Scope:
    """A module, class or function with its own names; `qualname` starts with the module's name."""

    node: ScopeNode
    qualname: str
    file: str  # relative to the directory that the import starts from
    module: str
    is_package: bool
    parent: Scope | None = None
    children: dict[int, Scope] = field(default_factory=dict)

    def child(self, node: FunctionNode | ast.ClassDef) -> Scope:
        """The scope of a function or class that is defined in this one."""
        if id(node) not in self.children:
            name = f"{self.qualname}.{node.name}"
            self.children[id(node)] = Scope(node, name, self.file, self.module, self.is_package, self)
        return self.children[id(node)]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the body, without the bodies of functions and classes in it; lambdas belong to it."""
        return tuple(_own_nodes(self.node))

    @cached_property
    def bindings(self) -> dict[str, list[Binding]]:
        """Names bound directly in this scope."""
        names: dict[str, list[Binding]] = {}
        for name, binding in _bindings(self):
            names.setdefault(name, []).append(binding)
        return names

    @cached_property
    def stars(self) -> tuple[str, ...]:
        """Modules from which this one imports everything."""
        return tuple(
            absolute(self, node)
            for node in self.nodes
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        )

    @cached_property
    def global_names(self) -> frozenset[str]:
        """Names that a function declares `global`."""
        return frozenset(name for node in self.nodes if isinstance(node, ast.Global) for name in node.names)


def _own_nodes(node: ScopeNode) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(reversed(node.body))
    while waiting:
        here = waiting.pop()
        yield here
        if not isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(here))))


def absolute(scope: Scope, node: ast.ImportFrom) -> str:
    """The absolute name of the module of `from ... import`."""
    if not node.level:
        return node.module or ""
    parts = scope.module.split(".")
    base = parts[: len(parts) - node.level + scope.is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_overload(node: FunctionNode) -> bool:
    """Whether this is a declaration for type checkers only."""
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list)


def _bindings(scope: Scope) -> Iterator[tuple[str, Binding]]:
    if isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _parameters(scope.node.args)
    for node in scope.nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], _imported(alias)
            case ast.ImportFrom():
                yield from ((alias.asname or alias.name, Binding("from", node, alias.name)) for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not is_overload(node):
                    yield node.name, Binding("function", node)
            case ast.ClassDef():
                yield node.name, Binding("class", node)
            case ast.Lambda():
                yield from _parameters(node.args)
            case _:
                yield from _assigned(node)


def _imported(alias: ast.alias) -> Binding:
    # `import a.b` binds a, `import a.b as c` binds a.b
    return Binding("import", name=alias.name if alias.asname else alias.name.partition(".")[0])


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, Binding]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*([None] * (len(positional) - len(arguments.defaults))), *arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, default in pairs:
        yield argument.arg, Binding("parameter", argument)
        if default is not None:
            yield argument.arg, Binding("value", default)
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            yield variadic.arg, Binding("unknown")


def _assigned(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from _targets(target, Binding("value", node.value))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name, Binding("annotation", node.annotation)
            if node.value is not None:
                yield name, Binding("value", node.value)
        case ast.NamedExpr(target=ast.Name(id=name)):
            yield name, Binding("value", node.value)
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield from _targets(node.target, Binding("element", node.iter))
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from _targets(target, Binding("enter", node.context_expr))
        case ast.ExceptHandler(name=str(name)):
            yield name, Binding("unknown")


def _targets(target: ast.expr, binding: Binding) -> Iterator[tuple[str, Binding]]:
    match target, binding.node:
        case ast.Name(id=name), _:
            yield name, binding
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))) if (
            binding.kind == "value" and len(targets) == len(values)
        ):
            for one, value in zip(targets, values, strict=True):
                yield from _targets(one, Binding("value", value))
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
            for one in targets:
                yield from _targets(one, Binding("unknown"))
        case ast.Starred(value=one), _:
            yield from _targets(one, Binding("unknown"))


@dataclass(frozen=True)
class Place:
    """Where a module and its submodules are; `source` is None for a compiled one and for a directory without `__init__.py`."""

    source: Path | None
    directories: tuple[Path, ...]

    @property
    def is_package(self) -> bool:
        """Whether there can be submodules."""
        return bool(self.directories)


class Sources:
    """Modules by name. `paths` are searched before the interpreter's own, for targets that are not installed."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._paths = tuple(paths)
        self._modules: dict[str, Scope | None] = {}
        self._places: dict[str, Place | None] = {}
        self.unreadable: dict[str, str] = {}

    def module(self, name: str) -> Scope | None:
        """The parsed module; None when there is no Python source, or none that can be parsed (see `unreadable`)."""
        if name not in self._modules:
            self._modules[name] = None
            try:
                self._modules[name] = self._load(name)
            except SourceError as error:
                self.unreadable[name] = str(error)
        return self._modules[name]

    def _load(self, name: str) -> Scope | None:
        place = self.place(name)
        if place is None or place.source is None:
            return None
        depth = len(name.split(".")) + place.is_package
        file = "/".join(place.source.parts[-depth:])
        return Scope(parse(place.source), name, file, name, place.is_package)

    def place(self, name: str) -> Place | None:
        """Where a module is, None where there is none; runs no code of it or of its packages."""
        if name not in self._places:
            self._places[name] = self._find(name)
        return self._places[name]

    def is_leaf(self, name: str) -> bool:
        """Whether a top-level package is not followed because it cannot call torch by itself."""
        return name in sys.stdlib_module_names or name in _LEAVES

    def _find(self, name: str) -> Place | None:
        package, _, leaf = name.rpartition(".")
        if not leaf or self.is_leaf(name.partition(".")[0]):
            return None
        if package:
            parent = self.place(package)
            return None if parent is None else _in_directories(parent.directories, leaf)
        own = _in_directories(self._paths, name)
        return own if own is not None and own.source is not None else _installed(name) or own


def _in_directories(directories: Iterable[Path], name: str) -> Place | None:
    """What an import finds there: a package, a file, a compiled module, or a directory without `__init__.py`."""
    for directory in directories:
        here = directory / name
        if (here / "__init__.py").is_file():
            return Place(here / "__init__.py", (here,))
        if here.with_suffix(".py").is_file():
            return Place(here.with_suffix(".py"), ())
        if any(here.with_name(name + suffix).is_file() for suffix in EXTENSION_SUFFIXES):
            return Place(None, ())
    found = tuple(directory / name for directory in directories if (directory / name).is_dir())
    return Place(None, found) if found else None


def _installed(name: str) -> Place | None:
    """A top-level module that the interpreter would import."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    source = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    return Place(source, tuple(Path(place) for place in spec.submodule_search_locations or ()))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises SourceError on a file that cannot be read or parsed."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise SourceError(
            f"{path}:{error.lineno}: not Python {sys.version_info[0]}.{sys.version_info[1]}: {error.msg}"
        ) from error
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
