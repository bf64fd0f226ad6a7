"""Give functions other code and take it back: whoever holds the function, and whatever wraps it, follows.

Rebinding a name of a module misses references taken earlier, such as the check of the tracing flag that `torch.compile` keeps;
exchanging `__code__` does not. New code comes from the module's own source, so that line numbers and behaviour stay.
A function that somebody else has given other code (an attached probe) is followed to where the original code is kept: in a copy
of the function, or in an attribute of an object; otherwise detaching the probe would bring the old code back.

Known limits: a frame that runs keeps the code it began with. Objects hidden by `gc.freeze()` are not found.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

Key = tuple[str, int]  # qualified name, first line


class UnknownInternals(RuntimeError):
    """This torch is not built as expected; nothing was changed."""


class Swapped:
    """A part of isolation that is one function of torch with other code; a subclass sets `_new_code`."""

    _new_code: CodeType

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._code: CodeType = function.__code__  # torch's

    def install(self) -> None:
        """References taken earlier follow."""
        self._function.__code__ = self._new_code

    def remove(self) -> None:
        """Undo `install`."""
        if self._function.__code__ is self._new_code:
            self._function.__code__ = self._code


def compiled_with(module: ModuleType, names: Iterable[str], values: object) -> dict[Key, CodeType]:
    """Code of the functions of `module` that use the globals `names`, turned into attributes of `values`.

    Raises UnknownInternals when the source is missing.
    """
    mark = f"values of {module.__name__}"
    return {key: with_constants(code, {mark: values}) for key, code in _compiled(module, tuple(names), mark).items()}


@functools.cache
def _compiled(module: ModuleType, names: tuple[str, ...], mark: str) -> dict[Key, CodeType]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError) as error:
        raise UnknownInternals(f"no readable source of {module.__name__}: thread isolation compiles it anew") from error
    tree = ast.fix_missing_locations(_Attributes(frozenset(names), mark).visit(tree))
    code = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    return {
        (part.co_qualname, part.co_firstlineno): part
        for part in _parts(code)
        if part.co_flags & inspect.CO_OPTIMIZED and _uses(part, mark)  # functions; not bodies of classes
    }


def with_constants(code: CodeType, constants: Mapping[str, object]) -> CodeType:
    """The code, and the code inside it, with string constants replaced by objects: no name has to be looked up."""

    def replaced(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return with_constants(constant, constants)
        return constants.get(constant, constant) if isinstance(constant, str) else constant

    return code.replace(co_consts=tuple(replaced(constant) for constant in code.co_consts))


def functions_of(modules: Sequence[ModuleType]) -> list[FunctionType]:
    """Every function that lives, was not hidden by `gc.freeze()`, and has the globals of one of `modules`."""
    scopes = {id(vars(module)) for module in modules}
    return [thing for thing in gc.get_objects() if type(thing) is FunctionType and id(thing.__globals__) in scopes]


def swap(functions: Iterable[FunctionType], pairs: Sequence[tuple[CodeType, CodeType]]) -> int:
    """Give each function whose code is the first of a pair the second; returns how many."""
    new = {id(old): code for old, code in pairs}
    count = 0
    for function in functions:
        code = new.get(id(function.__code__))
        if code is not None:
            function.__code__ = code
            count += 1
    return count


def swap_kept(pairs: Sequence[tuple[CodeType, CodeType]]) -> int:
    """The same for code that objects keep in attributes, to restore it later; returns how many."""
    new = {id(old): code for old, code in pairs}
    count = 0
    for holder in gc.get_referrers(*(old for old, _ in pairs)):
        attributes = _attributes(holder)
        for name, value in list(attributes.items()):
            if isinstance(value, CodeType) and id(value) in new:
                attributes[name] = new[id(value)]
                count += 1
    return count


def _attributes(holder: object) -> dict[str, Any]:
    """The attributes that an object keeps something in; nothing for a function, a module, or a dictionary of its own."""
    if type(holder) is dict:
        owners = [owner for owner in gc.get_referrers(holder) if _dictionary(owner) is holder]
        return holder if owners and not isinstance(owners[0], ModuleType | FunctionType) else {}
    return {} if isinstance(holder, ModuleType | FunctionType) else _dictionary(holder)


def _dictionary(thing: object) -> dict[str, Any]:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def global_names(code: CodeType) -> set[str]:
    """The names that the code, and the code inside it, looks up."""
    return {name for part in _parts(code) for name in part.co_names}


class _Attributes(ast.NodeTransformer):
    """`name` becomes `"mark".name`; the string is exchanged for an object once it is compiled."""

    def __init__(self, names: frozenset[str], mark: str) -> None:
        self._names, self._mark, self._depth = names, mark, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Only functions: what a module's body assigns stays in the module."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        """What is an attribute now is no global."""
        kept = [name for name in node.names if name not in self._names]
        return ast.copy_location(ast.Global(names=kept) if kept else ast.Pass(), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A use."""
        if not self._depth or node.id not in self._names:
            return node
        return ast.copy_location(ast.Attribute(value=ast.Constant(self._mark), attr=node.id, ctx=node.ctx), node)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _uses(code: CodeType, mark: str) -> bool:
    return any(mark in (constant for constant in part.co_consts if isinstance(constant, str)) for part in _parts(code))
