"""What one function refers to: functions that it calls or hands on, entry points of FX, and what the source does not tell.

A function that is mentioned counts as called: callbacks, returned wrappers and decorators are how torch calls most of its
own code. Comparisons, annotations and `if TYPE_CHECKING` do not count. Each reference has the conditions that guard it within
its function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from diagnostics.static.dispatch import IMPLEMENTED_BY_DISPATCH, implementations, is_operator
from diagnostics.static.entry_points import FLAGS, FUNCTIONS, TRACER, Kind
from diagnostics.static.presumed import PresumedMethods
from diagnostics.static.resolver import Resolver, class_around, constant_getattr, methods
from diagnostics.static.sources import Scope
from diagnostics.static.values import Class, Elements, External, Function, Instance, Module, Super, Value

AUTOGRAD_FUNCTION = "torch.autograd.function.Function"
MODULE = "torch.nn.modules.module.Module"
_SUSPICIOUS_METHODS = {"trace", "compile", "export"}  # of Tracer, of nn.Module
_NOT_SCANNED = ("torch.jit.",)
_DYNAMIC = {"builtins.getattr", "builtins.eval", "builtins.exec", "builtins.__import__", "importlib.import_module"}
_SPECIAL = {"enter": ("__enter__", "__exit__", "__aenter__", "__aexit__"), "make": ("__init__", "__new__", "__post_init__")}
_MAX_CONDITION = 60  # characters


@dataclass(frozen=True)
class Edge:
    """A function that another one refers to at `line`."""

    target: Function
    how: str
    line: int
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Use:
    """An entry point that a function refers to at `line`."""

    kind: Kind
    name: str
    line: int
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unfollowed:
    """Something that runs, of which the source does not tell what."""

    kind: str
    text: str
    line: int


@dataclass
class References:
    """All of one function."""

    edges: list[Edge] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    unfollowed: list[Unfollowed] = field(default_factory=list)
    presumed: int = 0  # method calls taken for those of tensors and of Python's own types


class Collector:
    """Walks one function, or the statements of a module or class."""

    def __init__(self, resolver: Resolver, presumed: PresumedMethods, function: Function) -> None:
        self._resolver, self._presumed = resolver, presumed
        self._scope, self._receiver = function.scope, function.receiver
        self._conditions: tuple[str, ...] = ()
        self.found = References()

    def collect(self) -> References:
        """Walk, and return what was found."""
        node = self._scope.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._decorators(node)
        self._body(node.body)
        self.found.edges = _either_way(self.found.edges)
        return self.found

    # Statements

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        outside = self._conditions
        for statement in statements:
            self._visit(statement)
            if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return):
                self._conditions = (*self._conditions, f"not ({_short(statement.test)})")
        self._conditions = outside

    def _guarded(self, condition: str, nodes: Sequence[ast.AST]) -> None:
        outside, self._conditions = self._conditions, (*self._conditions, condition)
        for node in nodes:
            self._visit(node)
        self._conditions = outside

    def _guarded_body(self, condition: str, statements: Sequence[ast.stmt]) -> None:
        outside, self._conditions = self._conditions, (*self._conditions, condition)
        self._body(statements)
        self._conditions = outside

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._definition(node)
            case ast.ClassDef():
                self._class_definition(node)
            case ast.If() | ast.IfExp() | ast.Match() | ast.Try() | ast.TryStar() | ast.BoolOp():
                self._branches(node)
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[first, *_]):
                self._visit(first)
            case ast.Call():
                self._call(node)
            case ast.Name() | ast.Attribute():
                self._mention(node)
            case ast.Compare():
                self._compare(node)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.AnnAssign():
                self._children(node, skip=node.annotation)
            case _:
                self._children(node)

    def _children(self, node: ast.AST, skip: ast.AST | None = None) -> None:
        for child in ast.iter_child_nodes(node):
            if child is not skip:
                self._visit(child)

    def _branches(self, node: ast.AST) -> None:
        match node:
            case ast.If():
                self._visit(node.test)
                if _short(node.test).rpartition(".")[2] != "TYPE_CHECKING":
                    self._guarded_body(_short(node.test), node.body)
                self._guarded_body(f"not ({_short(node.test)})", node.orelse)
            case ast.IfExp():
                self._visit(node.test)
                self._guarded(_short(node.test), [node.body])
                self._guarded(f"not ({_short(node.test)})", [node.orelse])
            case ast.BoolOp(values=[first, *others]):
                self._visit(first)
                text = _short(first)
                self._guarded(text if isinstance(node.op, ast.And) else f"not ({text})", others)
            case ast.Match():
                self._visit(node.subject)
                for case in node.cases:
                    self._guarded_body(f"{_short(node.subject)} matches {_short(case.pattern)}", case.body)
            case ast.Try() | ast.TryStar():
                self._body(node.body)
                for handler in node.handlers:
                    self._guarded_body(f"except {_short(handler.type) if handler.type else ''}".rstrip(), handler.body)
                self._body([*node.orelse, *node.finalbody])

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Its body runs when somebody mentions it; what is written around it runs here.
        for part in (*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)):
            self._visit(part)

    def _class_definition(self, node: ast.ClassDef) -> None:
        for part in node.decorator_list:
            self._visit(part)
        if self._scope.parent is None or isinstance(self._scope.node, ast.ClassDef):
            inner = Collector(self._resolver, self._presumed, Function(self._scope.child(node)))
            inner._conditions, inner.found = self._conditions, self.found
            inner.collect()

    def _decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = Collector(self._resolver, self._presumed, Function(self._scope.parent or self._scope, self._receiver))
        outer.found = self.found
        for decorator in node.decorator_list:
            known = self._resolver.infer(decorator.func if isinstance(decorator, ast.Call) else decorator, outer._scope, None)
            own_property = isinstance(decorator, ast.Attribute) and decorator.attr in {"setter", "getter", "deleter"}
            if not known and not own_property:
                self._unfollowed("decorator", ast.unparse(decorator), decorator)
            else:
                outer._visit(decorator)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._visit(item.context_expr)
            for value in self._infer(item.context_expr):
                if isinstance(value, Instance):
                    self._special(value.cls, "enter", item.context_expr)
        self._body(node.body)

    def _compare(self, node: ast.Compare) -> None:
        for part in (node.left, *node.comparators):
            if not isinstance(part, ast.Name | ast.Attribute) or _flag(part):
                self._visit(part)
            elif isinstance(part, ast.Attribute):
                self._visit(part.value)

    # References

    def _infer(self, node: ast.expr) -> tuple[Value, ...]:
        return self._resolver.infer(node, self._scope, self._receiver)

    def _mention(self, node: ast.Name | ast.Attribute) -> None:
        if flag := _flag(node):
            does = "uses" if flag.endswith("_tls") else "reads" if isinstance(node.ctx, ast.Load) else "sets"
            self._use("tracing flag", f"{does} {flag}", node)
            return
        if isinstance(node.ctx, ast.Load):
            for value in self._raw(node):
                if isinstance(value, Function):
                    self._edge(value, "reads" if value.is_property else "hands on", node)
                elif isinstance(value, Class) and value.scope.qualname in FUNCTIONS:
                    self._use(FUNCTIONS[value.scope.qualname], value.scope.qualname, node)
        if isinstance(node, ast.Attribute):
            self._visit(node.value)

    def _raw(self, node: ast.expr) -> tuple[Value, ...]:
        """As `_infer`, but a property is the function that it calls."""
        if isinstance(node, ast.Attribute):
            return tuple(
                dict.fromkeys(one for value in self._infer(node.value) for one in self._resolver.attribute(value, node.attr))
            )
        return self._infer(node)

    def _call(self, node: ast.Call) -> None:
        if (name := constant_getattr(node)) in FLAGS:
            self._use("tracing flag", f"reads {name}", node)
        values = self._infer(node.func)
        for value in values:
            self._call_of(value, node)
        if not values:
            self._unknown_call(node)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "apply":
                self._apply(node, node.func.value)
            for value in self._raw(node.func):
                if isinstance(value, Function) and value.is_property:
                    self._edge(value, "reads", node)
            self._visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self._visit(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._visit(part)

    def _call_of(self, value: Value, node: ast.Call) -> None:
        match value:
            case Function():
                self._edge(value, "calls", node)
            case Class():
                self._special(value, "make", node)
            case Instance():
                self._call_of_instance(value, node)
            case External(name=name):
                self._call_of_external(name, node)
            case Module() | Super() | Elements():
                self._unfollowed("value", f"{_short(node.func)}(...)", node)

    def _apply(self, node: ast.Call, owner: ast.expr) -> None:
        # `Function.apply` is Python code up to torch 2.13 and compiled code from 2.14; either way it calls these
        for value in self._infer(owner):
            if isinstance(value, Class) and self._resolver.descends(value, AUTOGRAD_FUNCTION):
                for name, how in (("forward", "calls"), ("setup_context", "calls"), ("backward", "calls in backward")):
                    self._members(value, name, how, node)

    def _call_of_instance(self, value: Instance, node: ast.Call) -> None:
        if self._resolver.descends(value.cls, MODULE):
            self._members(value.cls, "forward", "calls", node)
            return
        if is_operator(self._resolver, value):
            self._resolver.dispatched.add(value.cls)
            for implementation in implementations(self._resolver, value):
                outside, self._conditions = self._conditions, (*self._conditions, f"dispatched by {implementation.rule}")
                for function in implementation.functions:
                    self._edge(function, "dispatches to", node)
                if not implementation.functions:
                    self._unfollowed("dispatcher", f"{implementation.rule} of {_short(node.func)}", node)
                self._conditions = outside
        self._members(value.cls, "__call__", "calls", node)

    def _call_of_external(self, name: str, node: ast.Call) -> None:
        if name.startswith("torch.ops.") and not name.startswith(("torch.ops.aten.", "torch.ops.prims.")):
            self._unfollowed("dispatcher", name, node)
        elif name.endswith(".backward"):
            self._use("backward", f"{_short(node.func)}()", node)
        elif name in _DYNAMIC and constant_getattr(node) is None and not self._infer(node):
            self._unfollowed("dynamic", f"{_short(node)} in {self._scope.qualname}", node)
        elif self._presumed.is_missing(name):
            self._unfollowed("no source", name, node)

    def _unknown_call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(id=name):
                binding = self._resolver.binding(name, self._scope)
                kind = "parameter" if binding is not None and binding.kind == "parameter" else "variable"
                self._unfollowed(kind, f"{name}(...) in {self._scope.qualname}", node)
            case ast.Attribute(value=value, attr=name):
                self._unknown_method(value, name, node)
            case ast.Call(func=inner) if any(isinstance(one, Function) for one in self._infer(inner)):
                pass  # the functions that it returns are mentioned in it, and followed from there
            case _:
                self._unfollowed("value", f"{_short(node.func)}(...) in {self._scope.qualname}", node)

    def _unknown_method(self, value: ast.expr, name: str, node: ast.Call) -> None:
        owners = [one.name for one in self._infer(value) if isinstance(one, Module)]
        if owners and not self._presumed.has(name):
            self._unfollowed("value", f"{owners[0]}.{name}(...)", node)
        elif name == "backward":
            self._use("backward", f"{_short(value)}.backward()", node)
        elif name not in _SUSPICIOUS_METHODS and self._presumed.has(name):
            self.found.presumed += 1
        else:
            self._unfollowed("method", f".{name}(...) of an object of unknown class", node)

    def _special(self, cls: Class, which: str, node: ast.AST) -> None:
        if cls.scope.qualname in FUNCTIONS:
            self._use(FUNCTIONS[cls.scope.qualname], cls.scope.qualname, node)
        for name in _SPECIAL[which]:
            self._members(cls, name, "enters" if which == "enter" else "makes", node)

    def _members(self, cls: Class, name: str, how: str, node: ast.AST) -> None:
        for value in self._resolver.attribute(cls, name):
            if isinstance(value, Function):
                self._edge(value, how, node)

    def _edge(self, value: Function, how: str, node: ast.AST) -> None:
        kind = entry_kind(self._resolver, value)
        if kind is not None:
            self._use(kind, value.qualname, node)
        elif value.qualname in IMPLEMENTED_BY_DISPATCH:
            if value.receiver not in self._resolver.dispatched:
                self._unfollowed("dispatcher", f"{value.qualname} of an operator that no module variable is known to hold", node)
        elif not value.qualname.startswith(_NOT_SCANNED):
            self.found.edges.append(Edge(value, how, _line(node), self._conditions))

    def _use(self, kind: Kind, name: str, node: ast.AST) -> None:
        self.found.uses.append(Use(kind, name, _line(node), self._conditions))

    def _unfollowed(self, kind: str, text: str, node: ast.AST) -> None:
        self.found.unfollowed.append(Unfollowed(kind, text, _line(node)))


def entry_kind(resolver: Resolver, function: Function) -> Kind | None:
    """Which entry point a function is, if any."""
    if function.qualname in FUNCTIONS:
        return FUNCTIONS[function.qualname]
    cls = class_around(function.scope) if function.qualname.endswith(".trace") else None
    return "Tracer.trace" if cls is not None and function.scope.parent is cls.scope and resolver.descends(cls, TRACER) else None


def all_functions(scope: Scope) -> Iterable[Function]:
    """The functions of a module and the methods of its classes."""
    for bindings in scope.bindings.values():
        for binding in bindings:
            if binding.kind == "function" and isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(scope.child(binding.node))
            elif binding.kind == "class" and isinstance(binding.node, ast.ClassDef):
                yield from methods(Class(scope.child(binding.node)))


def _either_way(edges: list[Edge]) -> list[Edge]:
    """A function that both branches of an `if` refer to does not depend on it."""
    ways: dict[Function, set[tuple[str, ...]]] = {}
    for edge in edges:
        ways.setdefault(edge.target, set()).add(edge.conditions)
    return [
        replace(edge, conditions=edge.conditions[:-1])
        if edge.conditions and (*edge.conditions[:-1], f"not ({edge.conditions[-1]})") in ways[edge.target]
        else edge
        for edge in edges
    ]


def _flag(node: ast.expr) -> str | None:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return name if name in FLAGS else None


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MAX_CONDITION else f"{text[: _MAX_CONDITION - 3]}..."
