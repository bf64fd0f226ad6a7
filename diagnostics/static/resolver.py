"""From an expression in a scope to what it may stand for.

Rules: names through local, enclosing, module and star imports; attributes of modules (re-exports, then submodules), of
classes and instances (base classes, what any method assigns to `self`, annotations), `super()`, properties; results of calls
from classes, return annotations and return statements; parameters from their annotations and defaults; elements of lists
and of `nn.ModuleList` from the calls in them. A name with several bindings stands for all of them.

Known limits: no flow of values between callers and callees; base classes are searched depth first instead of in C3 order;
an annotation is taken at its word, so that subclasses of the annotated class are not considered; where names are defined by
each other in a circle, what is reached through the circle may be incomplete; a value of which one origin is known (`given or
default`) counts as known; what a function of the standard library returns is taken for something of the standard library.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

from diagnostics.static.entry_points import FUNCTIONS
from diagnostics.static.sources import Binding, FunctionNode, Scope, Sources, absolute
from diagnostics.static.values import Class, Elements, External, Function, Instance, Module, Super, Value

_MAX_STEPS = 90  # of names and calls looked through for one expression
_CONTAINERS = {
    "ModuleList",
    "ModuleDict",
    "Sequential",
    "list",
    "tuple",
    "dict",
    "zip",
    "enumerate",
    "reversed",
    "items",
    "values",
}
_PASSED_THROUGH = {"functools.partial", "functools.lru_cache", "functools.cache", "copy.copy", "copy.deepcopy", "typing.cast"}


class Resolver:
    """Answers for all modules of one `Sources`."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._busy: set[tuple[int, int, int]] = set()
        self._known: dict[tuple[int, int, int], tuple[Value, ...]] = {}
        self.dispatched: set[Class] = set()  # classes of operators whose registrations are followed
        self._mro: dict[Class, tuple[Class, ...]] = {}
        self._self_attributes: dict[Class, dict[str, list[tuple[ast.expr, Function, bool]]]] = {}

    # Names

    def lookup(self, name: str, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        """What `name` stands for in `scope`."""
        here: Scope | None = scope
        while here is not None:
            skipped = here is not scope and isinstance(here.node, ast.ClassDef)
            if skipped or here.parent is None:
                receiver = None  # functions out there are not methods of it
            if not skipped and name not in here.global_names and name in here.bindings:
                return self._bound(here.bindings[name], name, here, receiver)
            if here.parent is None:
                return self._starred(here, name) or ((External(f"builtins.{name}"),) if hasattr(builtins, name) else ())
            here = here.parent
        return ()

    def binding(self, name: str, scope: Scope) -> Binding | None:
        """The nearest binding of `name` within functions, for saying why a name stands for nothing known."""
        here: Scope | None = scope
        while here is not None and name not in here.bindings:
            here = here.parent
        return None if here is None else here.bindings[name][0]

    def _starred(self, module: Scope, name: str) -> tuple[Value, ...]:
        for star in module.stars:
            other = self.sources.module(star)
            if other is not None and (found := self._in_module(other, name)):
                return found
        return ()

    def _in_module(self, module: Scope, name: str) -> tuple[Value, ...]:
        if name in module.bindings:
            return self._bound(module.bindings[name], name, module, None)
        return self._starred(module, name)

    def _bound(self, bindings: list[Binding], name: str, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        return _unique(value for binding in bindings for value in self._one(binding, name, scope, receiver))

    def _one(self, binding: Binding, name: str, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        found: tuple[Value, ...] = ()
        match binding.kind, binding.node:
            case "import", _:
                found = (self.module(binding.name),)
            case "from", ast.ImportFrom() as node:
                found = self.imported(absolute(scope, node), binding.name)
            case "function", ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                found = (Function(scope.child(node), receiver),)
            case "class", ast.ClassDef() as node:
                found = (Class(scope.child(node)),)
            case "value", ast.expr() as node:
                values = self.infer(node, scope, receiver)
                found = tuple(_at_home(one, scope, name) for one in values) if scope.parent is None else values
            case "annotation", ast.expr() as node:
                found = self.annotated(node, scope, receiver)
            case "parameter", ast.arg() as node:
                found = self._parameter(node, scope, receiver)
            case "element" | "enter", ast.expr() as node:
                values = self.infer(node, scope, receiver)
                found = (
                    _elements(values) if binding.kind == "element" else tuple(one for one in values if isinstance(one, Instance))
                )
        return found

    def _parameter(self, argument: ast.arg, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        node = scope.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and receiver is not None and is_first(argument, scope):
            of_class = "classmethod" in Function(scope).decorators() or node.name in {"__new__", "__init_subclass__"}
            return (receiver,) if of_class else (Instance(receiver),)
        return self.annotated(argument.annotation, scope.parent or scope, receiver) if argument.annotation else ()

    def annotated(self, node: ast.expr, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        """What a variable with this annotation may hold; known for classes, their unions and containers of them."""
        match node:
            case ast.Constant(value=str(text)):
                try:
                    return self.annotated(ast.parse(text, mode="eval").body, scope, receiver)
                except SyntaxError:
                    return ()
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return (*self.annotated(left, scope, receiver), *self.annotated(right, scope, receiver))
            case ast.Subscript(value=outer, slice=inner):
                held = [
                    one
                    for part in (inner.elts if isinstance(inner, ast.Tuple) else [inner])
                    for one in self.annotated(part, scope, receiver)
                ]
                name = ast.unparse(outer).rpartition(".")[2]
                return tuple(held) if name in {"Optional", "Union"} else (Elements(tuple(held)),) if held else ()
            case ast.Name() | ast.Attribute():
                return tuple(Instance(one) for one in self.infer(node, scope, receiver) if isinstance(one, Class))
        return ()

    # Modules

    def module(self, name: str) -> Module | External:
        """The module, or External where nobody has its source."""
        place = self.sources.place(name)
        has_source = place is not None and (place.source is not None or place.is_package)
        return Module(name) if has_source else External(name)

    def imported(self, module: str, name: str) -> tuple[Value, ...]:
        """What `from module import name` gives."""
        return self.attribute(self.module(module), name)

    # Attributes

    def attribute(self, value: Value, name: str) -> tuple[Value, ...]:
        """What `value.name` stands for."""
        found: tuple[Value, ...] = ()
        match value:
            case External():
                found = (External(f"{value.name}.{name}"),)
            case Module():
                found = self._module_attribute(value, name)
            case Class():
                found = self._member(self.mro(value), name, value) or self._inherited(self.mro(value), name)
            case Instance() if value.cls.scope.qualname == "torch._ops._Ops":
                found = (External(f"torch.ops.{name}"),)  # operators are looked up in the dispatcher, by name
            case Instance():
                found = self._member(self.mro(value.cls), name, value.cls) or self._assigned_to_self(value.cls, name)
                found = found or self._inherited(self.mro(value.cls), name)
            case Super():
                classes = self.mro(value.receiver)
                here = classes.index(value.after) if value.after in classes else 0
                found = self._member(classes[here + 1 :], name, value.receiver) or self._inherited(classes[here:], name)
        return found

    def _module_attribute(self, value: Module, name: str) -> tuple[Value, ...]:
        module = self.sources.module(value.name)
        guard = (id(module), hash(name), 0)
        if module is not None and guard not in self._busy:
            self._busy.add(guard)
            try:
                if found := self._in_module(module, name):
                    return found
            finally:
                self._busy.discard(guard)
        submodule = f"{value.name}.{name}"
        if self.sources.place(submodule) is not None:
            return (self.module(submodule),)
        compiled = [star for star in (module.stars if module is not None else ()) if self.sources.module(star) is None]
        return (External(f"{compiled[0]}.{name}"),) if compiled else ()

    def _member(self, classes: Iterable[Class], name: str, receiver: Class) -> tuple[Value, ...]:
        for one in classes:
            if name in one.scope.bindings:
                return self._bound(one.scope.bindings[name], name, one.scope, receiver)
        return ()

    def _inherited(self, classes: Iterable[Class], name: str) -> tuple[Value, ...]:
        """The attribute of the first base class without source, which is `object` in the end."""
        if hasattr(object, name):
            return (External(f"builtins.object.{name}"),)
        bases = (
            base for one in classes for node in _bases(one) for base in self.infer(node, one.scope.parent or one.scope, None)
        )
        return next(((External(f"{base.name}.{name}"),) for base in bases if isinstance(base, External)), ())

    def _assigned_to_self(self, cls: Class, name: str) -> tuple[Value, ...]:
        found: list[Value] = []
        for one in self.mro(cls):
            if one not in self._self_attributes:
                self._self_attributes[one] = _self_attributes(one)
            for expression, method, is_annotation in self._self_attributes[one].get(name, ()):
                resolve = self.annotated if is_annotation else self.infer
                found += resolve(expression, method.scope, cls)
        return _unique(found)

    def mro(self, cls: Class) -> tuple[Class, ...]:
        """The class and its base classes of which there is source, depth first."""
        if cls not in self._mro:
            self._mro[cls] = (cls,)  # for a class that is its own base by mistake
            bases = [one for node in _bases(cls) for one in self.infer(node, cls.scope.parent or cls.scope, None)]
            self._mro[cls] = tuple(
                dict.fromkeys((cls, *(above for base in bases if isinstance(base, Class) for above in self.mro(base))))
            )
        return self._mro[cls]

    def descends(self, cls: Class, *names: str) -> bool:
        """Whether `cls` is, or derives from, a class with one of these dotted names."""
        return any(one.scope.qualname in names for one in self.mro(cls))

    # Expressions

    def infer(self, node: ast.expr, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        """What an expression may stand for; nothing when the source does not tell."""
        key = (id(node), id(scope), id(receiver and receiver.scope))
        if key not in self._known:
            if key in self._busy or len(self._busy) > _MAX_STEPS:
                return ()
            self._busy.add(key)
            try:
                self._known[key] = self._infer(node, scope, receiver)
            finally:
                self._busy.discard(key)
        return self._known[key]

    def _infer(self, node: ast.expr, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        found: tuple[Value, ...] = ()
        match node:
            case ast.Name(id=name):
                found = self.lookup(name, scope, receiver)
            case ast.Attribute(value=value, attr=name):
                found = self._read(self.infer(value, scope, receiver), name)
            case ast.Call():
                found = self._called(node, scope, receiver)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                found = self.infer(value, scope, receiver)
            case ast.Subscript(value=value):
                found = _item(self.infer(value, scope, receiver))
            case ast.IfExp(body=body, orelse=orelse):
                found = self._any([body, orelse], scope, receiver)
            case ast.BoolOp(values=values):
                found = self._any(values, scope, receiver)
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values) | ast.Dict(values=values):
                found = _container(self._any(values, scope, receiver))
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.SetComp(elt=value) | ast.DictComp(value=value):
                found = _container(self._any([value], scope, receiver))
        return found

    def _any(self, nodes: list[ast.expr], scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        return _unique(one for node in nodes for one in self.infer(node, scope, receiver))

    def _read(self, values: Iterable[Value], name: str) -> tuple[Value, ...]:
        found = _unique(one for value in values for one in self.attribute(value, name))
        return _unique(
            result
            for one in found
            for result in (self.returned(one) if isinstance(one, Function) and one.is_property else (one,))
        )

    def _called(self, node: ast.Call, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and receiver is not None:
            after = class_around(scope)
            return (Super(after, receiver),) if after is not None else ()
        if (name := constant_getattr(node)) is not None:
            return self._read(self.infer(node.args[0], scope, receiver), name)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CONTAINERS and not node.args:
            return self.infer(node.func.value, scope, receiver)  # .items(), .values()
        return _unique(
            one for value in self.infer(node.func, scope, receiver) for one in self._result(value, node, scope, receiver)
        )

    def _result(self, value: Value, node: ast.Call, scope: Scope, receiver: Class | None) -> tuple[Value, ...]:
        found: tuple[Value, ...] = ()
        match value:
            case Class():
                found = (Instance(value),)
                if _last(value.scope.qualname) in _CONTAINERS:
                    found += _container(_flat(self._any([_bare(one) for one in node.args], scope, receiver)))
            case Function():
                found = self.returned(value)
            case External(name="builtins.type") if len(node.args) == 1:
                found = tuple(one.cls for one in self._any(node.args, scope, receiver) if isinstance(one, Instance))
            case External(name="importlib.import_module") if node.args and isinstance(node.args[0], ast.Constant):
                found = (self.module(str(node.args[0].value)),)
            case External(name=name) if name in _PASSED_THROUGH and node.args:
                found = self.infer(node.args[-1 if name == "typing.cast" else 0], scope, receiver)
            case External(name=name) if _last(name) in _CONTAINERS:
                found = self._any([_bare(one) for one in node.args], scope, receiver)
            case External(name=name) if not name.startswith(("builtins.", "importlib.import_module")):
                found = (External(f"{name}()"),)
        return found

    def returned(self, function: Function) -> tuple[Value, ...]:
        """What a call of `function` may give: its annotation's classes, else what its return statements tell."""
        node = function.scope.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return ()
        if function.qualname in FUNCTIONS:
            return (External(f"{function.qualname}()"),)  # a compiled or traced function: what it does begins there
        outer = function.scope.parent or function.scope
        if node.returns is not None and (found := self.annotated(node.returns, outer, function.receiver)):
            return found
        returns = [one.value for one in function.scope.nodes if isinstance(one, ast.Return) and one.value is not None]
        return _unique(one for value in returns for one in self.infer(value, function.scope, function.receiver))


def _at_home(value: Value, module: Scope, name: str) -> Value:
    return Instance(value.cls, (module, name)) if isinstance(value, Instance) and value.home is None else value


def is_first(argument: ast.arg, scope: Scope) -> bool:
    """Whether this is the first argument of a method that is not static."""
    node = scope.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or scope.parent is None:
        return False
    positional = [*node.args.posonlyargs, *node.args.args]
    is_method = isinstance(scope.parent.node, ast.ClassDef) and "staticmethod" not in Function(scope).decorators()
    return is_method and bool(positional) and positional[0] is argument


def class_around(scope: Scope) -> Class | None:
    """The class whose method `scope` is, or is in."""
    here: Scope | None = scope
    while here is not None and not isinstance(here.node, ast.ClassDef):
        here = here.parent
    return None if here is None else Class(here)


def constant_getattr(node: ast.Call) -> str | None:
    """The name in `getattr(x, "name")`."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
    return None


def methods(cls: Class) -> Iterator[Function]:
    """The functions that a class defines itself."""
    for node in cls.scope.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(cls.scope.child(node), cls)


def _self_attributes(cls: Class) -> dict[str, list[tuple[ast.expr, Function, bool]]]:
    found: dict[str, list[tuple[ast.expr, Function, bool]]] = {}
    for method in methods(cls):
        node = method.scope.node
        assert isinstance(node, FunctionNode)
        first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
        for one in method.scope.nodes:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and first
                    and target.value.id == first.arg
                ):
                    assert isinstance(one, ast.Assign | ast.AnnAssign)
                    if one.value is not None:
                        found.setdefault(target.attr, []).append((one.value, method, False))
                    if isinstance(one, ast.AnnAssign):
                        found.setdefault(target.attr, []).append((one.annotation, method, True))
    return found


def _bases(cls: Class) -> list[ast.expr]:
    return cls.scope.node.bases if isinstance(cls.scope.node, ast.ClassDef) else []


def _bare(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Starred) else node


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _flat(values: Iterable[Value]) -> tuple[Value, ...]:
    return _unique(one for value in values for one in (value.values if isinstance(value, Elements) else (value,)))


def _container(held: tuple[Value, ...]) -> tuple[Value, ...]:
    return (Elements(held),) if held else ()


def _item(values: Iterable[Value]) -> tuple[Value, ...]:
    # `Generic[T]` is the class; an item of a container is what is in it
    return _unique((*_elements(values), *(value for value in values if isinstance(value, Class))))


def _elements(values: Iterable[Value]) -> tuple[Value, ...]:
    return _unique(one for value in values if isinstance(value, Elements) for one in value.values)


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))
