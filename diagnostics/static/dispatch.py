"""Functions registered for an operator object (HigherOrderOperator): what runs when the operator is called.

Registrations are read from the module that holds the operator: `@op.py_impl(key)`, `@op.py_functionalize_impl`,
`@register_fake(op)`, and statements such as `op.py_autograd_impl(function)` and `redirect_to_mode(op, Mode)`.

Known limit: registrations made in other modules, or in a loop, are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from diagnostics.static.resolver import Resolver
from diagnostics.static.sources import Scope
from diagnostics.static.values import Class, Function, Instance

OPERATOR = "torch._ops.HigherOrderOperator"
# These look up the registrations at run time; a scan takes the registrations instead.
IMPLEMENTED_BY_DISPATCH = {f"{OPERATOR}.__call__", f"{OPERATOR}.dispatch"}


@dataclass(frozen=True)
class Implementation:
    """What a registration makes the operator call; `functions` is empty where the source does not tell."""

    rule: str
    functions: tuple[Function, ...]


def is_operator(resolver: Resolver, value: Instance) -> bool:
    """Whether calls of this object are dispatched to registered functions."""
    return resolver.descends(value.cls, OPERATOR)


def implementations(resolver: Resolver, value: Instance) -> list[Implementation]:
    """The registrations for an operator."""
    if value.home is None:
        return [Implementation("unknown registrations", ())]
    scope, name = value.home
    return list(_registrations(resolver, scope, name))


def _registrations(resolver: Resolver, scope: Scope, name: str) -> Iterator[Implementation]:
    for node in scope.nodes:
        match node:
            case ast.FunctionDef():
                for decorator in node.decorator_list:
                    if _mentions(decorator, name):
                        yield Implementation(_rule(decorator), (Function(scope.child(node)),))
            case ast.Expr(value=ast.Call() as call) if _mentions(call, name):
                yield Implementation(_rule(call.func), tuple(_handed_over(resolver, call, scope)))


def _handed_over(resolver: Resolver, call: ast.Call, scope: Scope) -> Iterator[Function]:
    for argument in call.args:
        for value in resolver.infer(argument, scope, None):
            if isinstance(value, Function):
                yield value
            elif isinstance(value, Class):
                yield from (one for one in resolver.attribute(value, "__torch_dispatch__") if isinstance(one, Function))


def _rule(node: ast.expr) -> str:
    return ast.unparse(node).partition("(autograd")[0]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))
