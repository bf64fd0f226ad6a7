"""Laws of fixtures.real_run: the prompts, made of documentation that is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.command_config import PrepareConfig
from dflash.data.meta import DataError
from dflash.data.prompts import load_prompts
from fixtures.real_run.prompts import KINDS, collect, split_of, write_prompts
from fixtures.real_run.texts import DOC_CHARS, documented, hash_of, roots, source_files

LONG = "It does a thing that takes a whole sentence to describe, and then a second one to say why. " * 2


def library(root: Path, modules: int, functions: int = 3) -> Path:
    """A directory with documented modules."""
    (root / "pack" / "tests").mkdir(parents=True)
    for number in range(modules):
        body = "".join(f'def f{k}(x, y={k}):\n    """Number {number}.{k}. {LONG}"""\n' for k in range(functions))
        (root / "pack" / f"m{number}.py").write_text(body)
    (root / "pack" / "tests" / "m.py").write_text(f'def hidden():\n    """{LONG}"""\n')
    (root / "pack" / "test_me.py").write_text(f'def hidden():\n    """{LONG}"""\n')
    return root


def test_documentation_is_read_with_its_name_and_signature_and_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        f'raise SystemExit\nclass C(Base):\n    """{LONG}"""\n'
        f'    async def g(self, *, a: int = 1) -> str:\n        """{LONG * 20}"""\n'
        f'def short():\n    """Too short."""\n'
    )
    found = list(documented("pack.m", file))
    assert [(it.name, it.kind, it.signature) for it in found] == [
        ("pack.m.C", "class", "class C(Base)"),
        ("pack.m.C.g", "function", "async def g(self, *, a: int=1) -> str"),
    ]
    assert len(found[1].doc) <= DOC_CHARS[1] < len(LONG * 20)


def test_what_is_no_python_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("print 'two'")
    assert list(documented("m", tmp_path / "m.py")) == []
    assert list(documented("m", tmp_path / "absent.py")) == []


def test_tests_of_packages_are_left_out_and_the_order_is_by_hash(tmp_path: Path) -> None:
    names = list(source_files([library(tmp_path, 6)]))
    assert sorted(names) == [f"pack.m{number}" for number in range(6)]
    assert names == sorted(names, key=hash_of)


def test_the_standard_library_is_among_the_roots() -> None:
    assert "json.decoder" in source_files(roots()[:1])


def test_prompts_are_the_same_each_time_distinct_and_split_by_module(tmp_path: Path) -> None:
    directories = [library(tmp_path, 60)]
    chosen, _ = collect(directories, {"train": 100, "heldout": 6})
    again, _ = collect(directories, {"train": 100, "heldout": 6})
    assert chosen == again
    texts = [prompt.text for prompts in chosen.values() for prompt in prompts]
    assert len(set(texts)) == len(texts) == 106
    for split, prompts in chosen.items():
        assert {split_of(prompt.id.split()[0].rpartition(".")[0]) for prompt in prompts} == {split}


def test_the_side_of_a_module_never_changes() -> None:
    names = ("json", "asyncio", "calendar", "pprint", "socket")
    assert [name for name in names if split_of(name) == "heldout"] == ["pprint", "socket"]


def test_too_little_documentation_is_an_error_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gives 1?\d prompts to train on and \d+ held out, 500 and 1 are wanted: install more"):
        collect([library(tmp_path, 2)], {"train": 500, "heldout": 1})


def test_prompts_are_read_by_prepare_as_conversations(tmp_path: Path) -> None:
    chosen, _ = collect([library(tmp_path / "lib", 12)], {"train": 8, "heldout": 0})
    write_prompts(tmp_path / "p.jsonl", chosen["train"])
    config = PrepareConfig(prompts=str(tmp_path / "p.jsonl"), output=tmp_path / "data", heldout_fraction=0.0)
    read = load_prompts(config).prompts
    assert [prompt.sample_id for prompt in read] == [prompt.id for prompt in chosen["train"]]
    assert [prompt.messages[0]["content"] for prompt in read] == [prompt.text for prompt in chosen["train"]]


def test_every_kind_of_prompt_shows_the_object(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(f'class C:\n    """{LONG}"""\ndef f(x):\n    """{LONG}"""\n')
    for it in documented("m", tmp_path / "m.py"):
        for make in KINDS[it.kind].values():
            assert LONG.split(",", maxsplit=1)[0] in make(it)
