"""Laws about the READMEs: every command in them names a session or a module that exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))]
OURS = ("dflash", "diagnostics", "regression", "fixtures")


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def named_sessions(text: str) -> set[str]:
    commands = re.findall(r"nox(?: -\S+| --no-venv)* -s ((?:[a-z][a-z_]*[ \t]?)+)", text)
    return {name for command in commands for name in command.split()}


def named_modules(text: str) -> set[str]:
    return set(re.findall(r"python3? -m ([A-Za-z_][\w.]*\w)", text))


def runs(module: str) -> bool:
    """`python -m module` finds something to run."""
    if module.partition(".")[0] not in OURS:
        return importlib.util.find_spec(module) is not None
    path = ROOT / Path(*module.split("."))
    if (path / "__main__.py").exists():
        return True
    file = path.with_suffix(".py")
    return file.exists() and ("__main__" in file.read_text() or file.name == "__main__.py")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_existing_sessions_and_modules(readme: Path) -> None:
    text = readme.read_text()
    assert named_sessions(text) <= sessions()
    assert [module for module in named_modules(text) if not runs(module)] == []


@pytest.mark.parametrize("package", ["diagnostics", "regression"])
def test_a_package_that_a_user_runs_alone_says_how(package: str) -> None:
    assert f"python -m {package}" in (ROOT / package / "README.md").read_text()


def test_the_readme_names_every_session_that_a_user_starts() -> None:
    assert sessions() - {"environment"} <= named_sessions((ROOT / "README.md").read_text())


def test_commands_in_a_text_are_found() -> None:
    text = (
        "`nox -s lint types`, `nox -r -s tests -- -k x`, then\n    python -m dflash train --x\n`python -m diagnostics.fxprobe`."
    )
    assert named_sessions(text) == {"lint", "types", "tests"}
    assert named_modules(text) == {"dflash", "diagnostics.fxprobe"}
    assert [runs(name) for name in ("dflash", "diagnostics.fxprobe", "regression", "pytest", "no_such_thing")] == [
        *(True, True, False),
        *(True, False),
    ]
