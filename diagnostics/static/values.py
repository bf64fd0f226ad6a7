"""What an expression may stand for, as far as the source tells: modules, functions, classes, instances, things outside."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from diagnostics.static.sources import Scope


@dataclass(frozen=True)
class Module:
    """A module or package, with or without Python source."""

    name: str


@dataclass(frozen=True)
class Class:
    """A class of which there is source."""

    scope: Scope


@dataclass(frozen=True)
class Instance:
    """An instance of a class; `home` is the module variable that holds it, which is what dispatch rules are registered for."""

    cls: Class
    home: tuple[Scope, str] | None = None


@dataclass(frozen=True)
class Function:
    """A function; `receiver` is the class that a method, or the method around a function, was looked up on."""

    scope: Scope
    receiver: Class | None = None

    @property
    def qualname(self) -> str:
        """The dotted name, module first."""
        return self.scope.qualname

    def decorators(self) -> tuple[str, ...]:
        """The decorators as written."""
        node = self.scope.node
        return () if isinstance(node, ast.Module) else tuple(ast.unparse(decorator) for decorator in node.decorator_list)

    @property
    def is_property(self) -> bool:
        """Whether reading the attribute calls the function."""
        last = {text.rpartition(".")[2] for text in self.decorators()}
        return bool(last & {"property", "cached_property", "cache_readonly"})


@dataclass(frozen=True)
class Super:
    """`super()` in a method of `after`, called on `receiver`."""

    after: Class
    receiver: Class


@dataclass(frozen=True)
class External:
    """Something whose Python source is not followed: the standard library, compiled modules, modules that are not installed."""

    name: str


@dataclass(frozen=True)
class Elements:
    """A container; `values` is what may be in it."""

    values: tuple[Value, ...]


Value = Module | Class | Instance | Function | Super | External | Elements
