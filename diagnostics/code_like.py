"""Code made from a template, to be given to a function of torch in place of its own. Changes nothing by itself."""

from __future__ import annotations

import ast
import types
from typing import Any


def code_like(body: str, like: types.CodeType, *, cells: tuple[str, ...] = (), **objects: Any) -> types.CodeType:
    """Code with `objects` as constants, that stands in stack traces, and for Dynamo, where `like` stands, at its first line.

    Constants, because a name would be looked up in torch's globals, or imported by a program that has a module of our name.
    """
    parameters = "*arguments, **keywords" if "arguments" in body else ""
    lines = [f"{name} = '<{name}>'" for name in objects] + body.splitlines()
    source = "def make():\n" + "".join(f" {cell} = None\n" for cell in cells)  # code fits a function with as many cells only
    source += f" def call({parameters}):\n" + "".join(f"  {line}\n" for line in (*cells, *lines)) + " return call"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = -1  # no column: nothing is underlined
    namespace: dict[str, Any] = {}
    exec(compile(tree, "<probe>", "exec"), namespace)  # noqa: S102 - the templates are in diagnostics.patch
    code: types.CodeType = namespace["make"]().__code__
    named = {f"<{name}>": value for name, value in objects.items()}
    return code.replace(
        co_consts=tuple(named.get(value, value) if isinstance(value, str) else value for value in code.co_consts),
        co_filename=like.co_filename,
        co_name=like.co_name,
        co_qualname=like.co_qualname,
        co_firstlineno=like.co_firstlineno,
    )
