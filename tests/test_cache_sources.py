"""Laws of torch's hash of its own sources: computed from the files by torch's own lines, never stale, without torch.

That it is torch's value is held by test_cache_compiled.py. Here torch is its lines for the hash and a few files.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_caches import SEEN, graph

from diagnostics.caches import here, inventory
from diagnostics.caches.sources import UnknownTorch, hash_of_sources

ROOT = Path(__file__).parent.parent
HASHES = "_inductor/codecache.py"


@pytest.fixture
def torch_here(tmp_path: Path) -> Path:
    """A torch of few files, two of which are the installed one's."""
    installed = here.torch_folder()
    assert installed is not None
    folder = tmp_path / "torch"
    for path in ("__init__.py", "nn/__init__.py", "nn/modules.py", "_inductor/__init__.py", "_inductor/script.ld", "lib/x.so"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"# {path}\n")
    for path in ("_environment.py", HASHES):
        (folder / path).write_bytes((Path(installed) / path).read_bytes())
    return folder


def test_the_hash_is_of_the_version_the_sources_and_the_files_that_kernels_include(torch_here: Path) -> None:
    expected = hashlib.sha256(b"1.0")
    for name in ("_environment", "_inductor", "_inductor.codecache", "nn", "nn.modules"):
        path = torch_here / name.replace(".", "/")
        expected.update(name.encode())
        expected.update((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes())
    expected.update((torch_here / "_inductor/script.ld").read_bytes())
    assert hash_of_sources(torch_here, "1.0") == expected.digest()


@pytest.mark.parametrize("path", ["nn/modules.py", "_inductor/script.ld", "nn/new.py"])
def test_an_edit_of_a_source_changes_the_hash_at_once_and_taking_it_back_too(torch_here: Path, path: str) -> None:
    before, file = hash_of_sources(torch_here, "1.0"), torch_here / path
    was = file.read_bytes() if file.exists() else None
    file.write_bytes((was or b"") + b"pass\n")
    assert hash_of_sources(torch_here, "1.0") != before
    if was is None:
        file.unlink()
    else:
        file.write_bytes(was)
    assert hash_of_sources(torch_here, "1.0") == before


def test_what_another_torch_hashes_is_hashed_as_it_does(torch_here: Path) -> None:
    file = torch_here / HASHES
    file.write_text(file.read_text().replace('"script.ld"', '"script.ld", "more.h"'))
    before = hash_of_sources(torch_here, "1.0")
    (torch_here / "_inductor/more.h").write_text("int x;")
    assert hash_of_sources(torch_here, "1.0") != before


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def torch_key()", "def torch_keys()", "defines torch_key 0 times"),
        ("hasher = hashlib.sha256()", "hasher = blake()", "NameError: name 'blake' is not defined"),
        ("hasher.digest()", "hasher.hexdigest()", "to a str, bytes were expected"),
    ],
)
def test_a_torch_that_hashes_in_an_unknown_way_is_said_with_the_reason_and_nothing_is_called_foreign(
    torch_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, why: str
) -> None:
    file = torch_here / HASHES
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UnknownTorch, match=why):
        hash_of_sources(torch_here, "1.0")
    monkeypatch.setattr(here, "torch_folder", lambda: str(torch_here))
    for kept in ("torch_key", "fingerprint"):  # neither is to be kept for other tests
        monkeypatch.setattr(here, kept, getattr(here, kept).__wrapped__)
    (torch_here / "version.py").write_text("__version__ = '1.0'\n")
    graph(tmp_path / "cache", 1, SEEN["2.14.1"])
    found = inventory.take(tmp_path / "cache")
    assert found.states == ("warm",)
    assert found.notes[0].startswith("whose are 4 entries that name no torch")
    assert why in found.notes[0]


def test_no_torch_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "torch_folder", lambda: None)
    with pytest.raises(UnknownTorch, match="no torch is installed here"):
        here.torch_key.__wrapped__()


def test_the_hash_is_told_without_importing_torch() -> None:
    code = "import sys; from diagnostics.caches import here; here.torch_key(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
