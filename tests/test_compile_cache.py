import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_training import make_config

from dflash import events
from dflash.compile_cache import CompileCache, fingerprint
from dflash.trainer import train
from diagnostics.caches import past_runs

ROOT = Path(__file__).parent.parent


def artifacts(directory: Path) -> list[Path]:
    return sorted((directory / fingerprint()).glob("artifacts-*.bin"))


def test_without_a_directory_nothing_is_changed() -> None:
    before = dict(os.environ)
    cache = CompileCache(None)
    with cache.active():
        assert dict(os.environ) == before
        cache.save()
    assert cache.state == "torch's own"


def test_a_run_uses_the_directory_of_its_fingerprint_and_the_environment_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    seen: list[str] = []
    with events.subscribed(lambda event: seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]) if event.name == "step" else None):
        compiling = {"policy": "prewarm", "backend": "aot_eager", "cache": tmp_path / "cache"}
        result = train(make_config(tmp_path / "run", optim={"steps": 1}, compile=compiling))
    assert result["compile_cache"] == "cold"
    assert seen == [str(tmp_path / "cache" / fingerprint() / "torch")]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    ((run,), notes) = past_runs.read([tmp_path])
    assert (run.log, run.directory, run.state, notes) == (str(tmp_path / "run/events.jsonl"), seen[0], "cold", [])
    assert run.graphs == {"hits": 0, "misses": 0, "bypassed": 0}  # this backend keeps no graphs


def test_a_failed_run_tells_of_its_cache_too(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with events.subscribed(seen.append), pytest.raises(ZeroDivisionError), CompileCache(tmp_path).active():
        raise ZeroDivisionError
    assert seen[-1].name == "compile_cache"


# Compiles once in a fork for each directory: importing what compiles takes longer than all else.
FORKS = """
import json, os, sys
from pathlib import Path
import torch, torch._functorch.aot_autograd, torch._inductor.compile_fx
from dflash.compile_cache import CompileCache
from torch._dynamo.utils import counters
from dflash import events
def starts(directory):
    cache, seen = CompileCache(Path(directory)), []
    counters["inductor"]["fxgraph_cache_hit"] += 7  # of what compiled before
    with events.subscribed(lambda event: seen.append(event.fields) if event.name == "compile_cache" else None), cache.active():
        torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # no C++ to build
        cache.save()
    (told,) = seen
    assert told["state"] == cache.state
    assert sum(told["autograd"].values()) == 1, told
    assert Path(told["directory"]).is_dir()
    print(json.dumps([cache.state, told["graphs"]["hits"], told["graphs"]["misses"]]), flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        starts(line.strip())
        os._exit(0)
    if os.wait()[1]:
        break
os._exit(0)
"""


@pytest.fixture
def child() -> Iterator[Callable[[Path], list[object]]]:
    """State, hits and misses of a process that starts with a directory as its cache."""
    command = (sys.executable, "-c", FORKS)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def started(directory: Path) -> list[object]:
            requests.write(f"{directory}\n")
            requests.flush()
            found: list[object] = json.loads(answers.readline())
            return found

        yield started
        requests.close()


def test_a_second_process_starts_warm_and_a_copied_file_of_artefacts_restores_an_empty_directory(
    tmp_path: Path, child: Callable[[Path], list[object]]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert child(here) == ["cold", 0, 1]
    assert child(here) == ["warm", 1, 0]
    (saved,) = artifacts(here)
    assert saved.name == f"artifacts-{hashlib.sha256(saved.read_bytes()).hexdigest()}.bin"
    assert any((here / fingerprint() / "torch").rglob("*.py"))
    (there / fingerprint()).mkdir(parents=True)
    (there / fingerprint() / saved.name).write_bytes(saved.read_bytes())
    assert child(there) == ["restored", 1, 0]


def test_a_damaged_file_of_artefacts_is_named_and_not_loaded(tmp_path: Path) -> None:
    home = tmp_path / fingerprint()
    home.mkdir()
    (home / f"artifacts-{'0' * 64}.bin").write_bytes(b"torn")
    told: list[str] = []
    with events.subscribed(lambda event: told.append(str(event))):
        cache = CompileCache(tmp_path)
        with cache.active():
            assert cache.state == "cold"
    assert any("is damaged" in text for text in told)
