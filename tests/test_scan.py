"""Laws of diagnostics.scan: what a static scan finds, what it says that it cannot follow, and that it runs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from diagnostics import scan as command
from diagnostics.static.search import ScanResult, scan
from diagnostics.static.targets import TargetError

ROOT = Path(__file__).parent.parent
FLEX = "torch.nn.attention.flex_attention"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that dotted targets are looked up in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(directory: Path, **files: str) -> None:
    """Modules by name; `a__b` is b.py in the package a."""
    for name, text in files.items():
        path = directory.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        if path.parent != directory:
            (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))


def way(result: ScanResult, number: int = 0) -> list[str]:
    """The functions of a path, without their modules, and the entry point."""
    found = result.found[number]
    return [*(step.function.rpartition(".")[2] for step in found.path), found.kind]


def unfollowed(result: ScanResult) -> set[str]:
    return {one.kind for one in result.unfollowed}


def test_a_chain_is_reported_function_by_function_with_lines(here: Path) -> None:
    write(
        here,
        work="""
        from torch.fx import symbolic_trace

        def start(model):
            middle(model)

        def middle(model):
            return symbolic_trace(model)
        """,
    )
    result = scan("work.start")
    assert way(result) == ["start", "middle", "symbolic_trace"]
    assert [step.where for step in result.found[0].path] == ["work.py:5", "work.py:8"]
    assert result.found[0].conditions == ()
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "use",
    [
        "import torch.fx\n\ndef f(m): torch.fx.symbolic_trace(m)",
        "import torch.fx as other\n\ndef f(m): other.symbolic_trace(m)",
        "from torch import fx\n\ndef f(m): fx.symbolic_trace(m)",
        "from torch.fx import symbolic_trace as g\n\ndef f(m): g(m)",
        "from torch.fx import *\n\ndef f(m): symbolic_trace(m)",
        "def f(m):\n    from torch.fx import symbolic_trace\n    symbolic_trace(m)",
        "import torch\n\ng = torch.fx.symbolic_trace\n\ndef f(m): g(m)",
        "import torch\n\ndef f(m):\n    g = h = torch.fx.symbolic_trace\n    h(m)",
        "import torch\n\ndef f(m): getattr(torch.fx, 'symbolic_trace')(m)",
        "import torch\n\ndef f(m): return list(map(torch.fx.symbolic_trace, m))",
        "import functools, torch\n\ndef f(m): functools.partial(torch.fx.symbolic_trace, m)()",
        "import importlib\n\ndef f(m): importlib.import_module('torch.fx').symbolic_trace(m)",
        "import torch\n\ndef f(m, g=torch.fx.symbolic_trace): g(m)",
        "import torch\n\ndef f(m): (torch.fx.symbolic_trace if m else None)(m)",
    ],
)
def test_every_way_to_name_a_function_leads_to_it(here: Path, use: str) -> None:
    write(here, work=use)
    assert {found.kind for found in scan("work.f").found} == {"symbolic_trace"}


def test_reexports_and_relative_imports_lead_to_the_definition(here: Path) -> None:
    write(
        here,
        package__deep="import torch\n\ndef inner(m): return torch.compile(m)",
        package__user="from . import api\n\ndef f(m): api(m)",
    )
    (here / "package" / "__init__.py").write_text("from .deep import inner as api\n")
    assert way(scan("package.user.f")) == ["f", "inner", "torch.compile"]
    assert way(scan("package.api")) == ["inner", "torch.compile"]


@pytest.mark.parametrize(
    ("body", "functions"),
    [
        ("def f(): Derived().run()", ["f", "run", "step"]),
        ("def f():\n    x = Derived()\n    x.run()", ["f", "run", "step"]),
        ("def f(x: Derived): x.run()", ["f", "run", "step"]),
        ("def f(x: 'Derived | None'): x.run()", ["f", "run", "step"]),
        ("def make(): return Derived()\n\ndef f(): make().run()", ["f", "run", "step"]),
        ("def f(): Holder().go()", ["f", "go", "run", "step"]),
        ("def f(): Derived().lazy", ["f", "lazy"]),
        ("def f(): Derived()()", ["f", "__call__"]),
        ("def f():\n    with Derived(): pass", ["f", "__enter__"]),
        ("def f():\n    for one in [Derived()]: one.run()", ["f", "run", "step"]),
        ("def f(): Derived.of_class()", ["f", "of_class", "step"]),
    ],
)
def test_methods_are_found_on_the_class_of_the_object(here: Path, body: str, functions: list[str]) -> None:
    classes = """
        import torch

        class Base:
            def run(self): self.step()
            def step(self): pass

        class Derived(Base):
            def step(self): torch.fx.symbolic_trace(self)
            def __call__(self): torch.fx.symbolic_trace(self)
            def __enter__(self): torch.fx.symbolic_trace(self)
            @property
            def lazy(self): return torch.fx.symbolic_trace(self)
            @classmethod
            def of_class(cls): cls.step(None)

        class Holder:
            def __init__(self): self.held = Derived()
            def go(self): self.held.run()
        """
    write(here, work=textwrap.dedent(classes) + "\n" + body)
    assert way(scan("work.f")) == [*functions, "symbolic_trace"]
    assert scan("work.Base.run").found == ()


def test_super_a_modules_forward_and_an_autograd_function_are_followed(here: Path) -> None:
    write(
        here,
        work="""
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        class Base(torch.nn.Module):
            def forward(self, x): return make_fx(x)

        class Layer(Base):
            def forward(self, x): return super().forward(x)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList([Layer() for _ in range(2)])

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x
            @staticmethod
            def backward(ctx, x): return make_fx(x)

        def f(x): return Function.apply(x)
        """,
    )
    assert way(scan("work.Model")) == ["forward", "forward", "forward", "make_fx"]
    assert way(scan("work.f")) == ["f", "backward", "make_fx"]


def test_a_tracers_own_trace_is_found_through_subclasses(here: Path) -> None:
    write(here, work="import torch.fx\n\nclass Mine(torch.fx.Tracer): pass\n\ndef f(m): return Mine().trace(m)")
    assert [found.kind for found in scan("work.f").found] == ["Tracer.trace"]


def test_decorators_wrappers_and_callbacks_count_as_called(here: Path) -> None:
    write(
        here,
        work="""
        import functools
        import torch

        @torch.compile
        def compiled(x): return x

        def traced(function):
            @functools.wraps(function)
            def wrapper(x): return torch.fx.symbolic_trace(function)
            return wrapper

        @traced
        def decorated(x): return x

        def callback(x): return torch.fx.symbolic_trace(x)

        def hands_on(run): run(callback)
        """,
    )
    assert way(scan("work.compiled")) == ["compiled", "torch.compile"]
    assert way(scan("work.decorated")) == ["decorated", "traced", "wrapper", "symbolic_trace"]
    assert way(scan("work.hands_on")) == ["hands_on", "callback", "symbolic_trace"]


def test_an_operator_leads_to_what_is_registered_for_it(here: Path) -> None:
    write(
        here,
        work="""
        import torch
        from torch._ops import HigherOrderOperator

        class Operator(HigherOrderOperator):
            def __init__(self): super().__init__("mine")
            def __call__(self, *args): return super().__call__(*args)

        operator = Operator()
        other = Operator()

        @operator.py_impl(torch._C.DispatchKey.Autograd)
        def by_key(x): return torch.fx.symbolic_trace(x)

        def by_call(x): return torch.export.export(x)
        operator.py_autograd_impl(by_call)

        def f(x): return operator(x)
        def g(x): return other(x)
        """,
    )
    result = scan("work.f")
    assert {tuple(way(result, number)) for number in range(len(result.found))} == {
        ("f", "by_key", "symbolic_trace"),
        ("f", "by_call", "torch.export"),
    }
    assert any("py_impl(torch._C.DispatchKey.Autograd)" in text for found in result.found for text in found.conditions)
    assert scan("work.g").found == ()
    assert {found.kind for found in scan("work.operator").found} == {"symbolic_trace", "torch.export"}
    assert unfollowed(scan("work.operator")) == set()
    assert unfollowed(scan("work.Operator")) == {"dispatcher"}


def test_conditions_are_reported_and_an_unconditional_path_is_not_hidden_by_a_shorter_one(here: Path) -> None:
    write(
        here,
        work="""
        import torch

        def inner(m): torch.fx.symbolic_trace(m)
        def longer(m): inner(m)

        def f(m, fast):
            if fast:
                inner(m)
            longer(m)

        def early(m, fast):
            if not fast:
                return
            inner(m)

        def either(m, fast): return fast and inner(m)

        def both(m, fast):
            if fast:
                run = inner
            else:
                run = torch.compile(inner)
        """,
    )
    assert [found.conditions for found in scan("work.f").found] == [("fast",), ()]
    assert [found.conditions for found in scan("work.early").found] == [("not (not fast)",)]
    assert [found.conditions for found in scan("work.either").found] == [("fast",)]
    assert [(found.kind, found.conditions) for found in scan("work.both").found] == [
        ("torch.compile", ("not (fast)",)),
        ("symbolic_trace", ()),
    ]


def test_cycles_end_and_a_bound_is_said(here: Path) -> None:
    write(
        here,
        work="def f(): g()\n\ndef g(): f()\n\n" + "\n".join(f"def h{n}(): h{n + 1}()" for n in range(9)) + "\ndef h9(): pass",
    )
    assert scan("work.f").exit_code == 0
    for bounds in ({"max_functions": 3}, {"max_depth": 3}):
        bounded = scan("work.h0", **bounds)
        assert bounded.exit_code == 3
        assert "3" in bounded.bounds[0] or "4" in bounded.bounds[0]


def test_code_that_is_nested_too_deeply_is_listed(here: Path) -> None:
    write(here, work=f"def f(x): return {' + '.join(['x'] * 2000)}")
    assert unfollowed(scan("work.f")) == {"nested too deeply"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("def f(name): getattr(f, name)()", "dynamic"),
        ("def f(name): __import__(name)", "dynamic"),
        ("import importlib\n\ndef f(name): importlib.import_module(name).run()", "dynamic"),
        ("def f(text): exec(text)", "dynamic"),
        ("def f(callback): callback()", "parameter"),
        ("table = {}\n\ndef f(): table['x']()", "value"),
        ("def f(x): x.unheard_of()", "method"),
        ("def f(tracer): tracer.trace()", "method"),
        ("import no_such_package\n\ndef f(): no_such_package.run()", "no source"),
        ("import torch\n\ndef f(x): torch.ops.mine.run(x)", "dispatcher"),
        ("def outer(d):\n    @d\n    def f(): pass\n    f()", "decorator"),
    ],
)
def test_what_cannot_be_followed_is_listed(here: Path, body: str, kind: str) -> None:
    write(here, work=body)
    result = scan("work.outer" if "outer" in body else "work.f")
    assert kind in unfollowed(result)
    assert result.exit_code == 3


def test_comparisons_annotations_and_type_checking_are_no_calls(here: Path) -> None:
    write(
        here,
        work="""
        import typing
        import torch

        def f(x: torch.fx.symbolic_trace) -> bool:
            y: torch.fx.symbolic_trace = x
            if typing.TYPE_CHECKING:
                torch.fx.symbolic_trace(x)
            return y.view(-1) is torch.fx.symbolic_trace
        """,
    )
    result = scan("work.f")
    assert (result.found, result.unfollowed, result.presumed, result.exit_code) == ((), (), 1, 0)


def test_the_flag_is_found_by_name(here: Path) -> None:
    write(
        here,
        work="""
        import torch

        def f():
            torch.fx._symbolic_trace._is_fx_tracing_flag = False
            return torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        """,
    )
    assert [found.name for found in scan("work.f").found] == [
        "sets _is_fx_tracing_flag",
        "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
    ]


def test_a_backward_counts_where_something_is_compiled(here: Path) -> None:
    write(here, work="import torch\n\ndef f(x): torch.compile(x)(x).sum().backward()\n\ndef g(x): x.sum().backward()")
    assert {found.kind for found in scan("work.f").found} == {"torch.compile", "backward"}
    assert scan("work.g").exit_code == 0


def test_a_file_and_a_directory_are_scanned_without_running_them(here: Path) -> None:
    write(
        here,
        package__a="raise SystemExit('ran')\nimport torch\n\nclass C:\n    def m(self): torch.compile(self)",
        package__b="from package.a import C\nC().m()",
    )
    assert way(scan("package/a.py")) == ["m", "torch.compile"]
    assert {found.path[0].function for found in scan("package").found} == {"package.a.C.m"}
    assert way(scan("package/b.py")) == ["b", "m", "torch.compile"]


def test_a_scan_does_not_import_torch() -> None:
    code = f"import sys\nfrom diagnostics import scan\nscan.main(['{FLEX}.create_block_mask'])\nassert 'torch' not in sys.modules"
    done = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module.f", "no module no_such_module"),
        ("work.no_such_function", "has no no_such_function"),
        ("no_such_file.py", "no such file"),
        ("not a name", "neither a file"),
        ("broken.py", "broken.py:1: not Python"),
        ("broken.f", "broken.py:1: not Python"),
        ("empty", "without .py files"),
        ("math", "math is not scanned"),
    ],
)
def test_a_target_that_cannot_be_scanned_is_explained(
    here: Path, target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, work="def f(): pass", broken="def f(:\n")
    (here / "empty").mkdir()
    with pytest.raises(TargetError, match=words):
        scan(target)
    assert command.main([target]) == 2
    assert words in capsys.readouterr().err


def test_a_broken_file_behind_the_target_is_listed(here: Path) -> None:
    write(here, work="import broken\n\ndef f(): broken.g()", broken="def f(:\n")
    result = scan("work.f")
    assert result.exit_code == 3
    assert any("not Python" in one.text for one in result.unfollowed)


def test_the_command_prints_and_writes_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, work="import torch\n\ndef f(m):\n    torch.compile(m)\n    torch.fx.symbolic_trace(m)\n    m[0]()")
    assert command.main(["work.f", "--json", "out.json", "--max-paths", "1"]) == 1
    printed = capsys.readouterr().out
    assert "work.py:4" in printed
    assert "and 1 more" in printed
    assert "could not be followed: value" in printed
    written = json.loads((here / "out.json").read_text())
    assert [found["kind"] for found in written["found"]] == ["torch.compile", "symbolic_trace"]
    assert written["exit_code"] == 1


def test_flex_attention_reaches_make_fx_through_its_operators_autograd_rule() -> None:
    result = scan(f"{FLEX}.flex_attention")
    traced = [
        found for found in result.found if found.kind == "make_fx" and found.path[-1].function.endswith(".create_fw_bw_graph")
    ]
    assert len(traced) == 1
    functions = [step.function.rpartition(".")[2] for step in traced[0].path]
    assert functions == ["flex_attention", "_flex_attention_hop_wrapper", "flex_attention_autograd", "create_fw_bw_graph"]
    assert traced[0].path[0].conditions == ("not (torch.compiler.is_dynamo_compiling())",)
    assert {"torch.compile", "tracing flag"} <= {found.kind for found in result.found}


def test_create_block_mask_reaches_nothing_but_its_conditional_compile() -> None:
    result = scan(f"{FLEX}.create_block_mask")
    assert [(found.kind, found.conditions) for found in result.found] == [("torch.compile", ("_compile",))]
    assert result.bounds == ()
