import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from dflash.__main__ import main
from dflash.config import ConfigError, LossConfig
from dflash.engine import processes
from dflash.engine.launch import Agreement, Launch, Silent, differences, source_digest
from dflash.engine.storage import check_storage
from dflash.presets import tiny_cpu

ROOT = Path(__file__).parent.parent
VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_without_torchrun_the_command_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--preset", "tiny-cpu", "--engine", "processes"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1
    assert "not set: RANK, WORLD_SIZE" in shown
    assert "torchrun --nproc-per-node N -m dflash train" in shown


def test_a_rank_says_what_its_device_cannot_do_before_anything_is_loaded() -> None:
    config = dataclasses.replace(tiny_cpu(), engine="processes", loss=LossConfig(fp8_head=True))
    with pytest.raises(ConfigError, match="fp8-head is for GPUs"):
        processes._device(config, Launch.read(VARIABLES))
    assert processes._device(dataclasses.replace(config, loss=LossConfig()), Launch.read(VARIABLES)) == torch.device("cpu")


@pytest.mark.parametrize(("local_rank", "told"), [("0", 1), ("1", 0)])
def test_a_missing_address_is_told_once_a_machine(
    local_rank: str, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in (VARIABLES | {"LOCAL_RANK": local_rank}).items():
        if name != "MASTER_ADDR":
            monkeypatch.setenv(name, value)
    with contextlib.nullcontext() if told else pytest.raises(Silent, match="2"):
        assert main(["train", "--preset", "tiny-cpu", "--engine", "processes"]) == 2
    assert capsys.readouterr().err.count("not set: MASTER_ADDR;") == told


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", ""), ("RANK", "first"), ("RANK", "7"), ("MASTER_PORT", "999999")])
def test_a_missing_or_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Launch.read(VARIABLES | {name: value})


@pytest.mark.parametrize(("agents", "limit"), [("True", "CONNECT_TO_AGENT_SECONDS"), ("False", "CONNECT_SECONDS")])
def test_a_store_that_nobody_serves_is_bad_input(agents: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
    monkeypatch.setattr(f"dflash.engine.launch.{limit}", 0.5)
    with pytest.raises(ConfigError, match="no store answers at MASTER_ADDR localhost, MASTER_PORT 1"):
        Launch.read(VARIABLES).open_store()


BAD_STARTS = """
import os, sys
from dflash.__main__ import main
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
for flags in (["--topology", "1t+1d"], ["--topology", "0t+1d", "--data.features", "x", "--output", sys.argv[1]],
              ["--topology", "1t+1d", "--devices", "cuda"],
              ["--topology", "0t+1d", "--data.features", "x", "--data.path", sys.argv[1], "--output", sys.argv[2]]):
    try:
        main(["train", "--preset", "tiny-cpu", "--engine", "processes", *flags])
        raise AssertionError(flags)
    except SystemExit as end:
        assert end.code == 2, flags
    assert not {"transformers", "torch._dynamo", "torch._inductor", "pyarrow"} & sys.modules.keys(), flags
"""


def test_ranks_look_at_workers_storage_devices_and_data_before_they_import_what_takes_long(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    command = (sys.executable, "-c", BAD_STARTS, str(tmp_path / "file" / "run"), str(tmp_path / "run"))
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    workers, storage, device, data = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "has 2 workers, torchrun started 1 processes" in workers
    assert "cannot write to the output directory" in storage
    assert "needs a GPU for each of the 1 processes" in device
    assert f"{tmp_path / 'file' / 'run'} is not a directory of prepared data" in data


def test_differences_name_the_value_and_both_ranks() -> None:
    one = {"versions": {"torch": "2.13.0"}, "config": {"seed": 0, "optim": {"steps": 5}}}
    other = {"versions": {"torch": "2.12.1"}, "config": {"seed": 0, "optim": {"steps": 6}}}
    text = differences([one, one, other])
    assert text is not None
    assert "config.optim.steps is 6 on rank 2 and 5 on rank 0" in text
    assert "versions.torch is '2.12.1' on rank 2 and '2.13.0' on rank 0" in text
    assert "rank 1" not in text
    assert differences([one, dict(one)]) is None


def test_sources_that_differ_have_another_digest_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "file.py").write_text("x = 1\n")
        (tmp_path / name / "notes.txt").write_text(name)
    assert source_digest(tmp_path / "one") == source_digest(tmp_path / "two")
    (tmp_path / "two" / "part" / "file.py").write_text("x = 2\n")
    assert source_digest(tmp_path / "one") != source_digest(tmp_path / "two")
    (tmp_path / "one" / "part" / "file.py").rename(tmp_path / "one" / "part" / "moved.py")
    (tmp_path / "two" / "part" / "file.py").write_text("x = 1\n")
    assert source_digest(tmp_path / "one") != source_digest(tmp_path / "two")
    config = dataclasses.replace(tiny_cpu(), engine="processes")
    assert source_digest() in processes._facts(config)["versions"].values()


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--devices", "cuda:0"], "has one device of its own"),
     (["--engine-timeout-seconds", "0"], "engine-timeout-seconds is 0.0")],
)  # fmt: skip
def test_what_processes_cannot_do_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--preset", "tiny-cpu", "--engine", "processes", *flags])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_rank_without_a_gpu_of_its_own_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers_training import make_config  # noqa: PLC0415

    from dflash.engine.processes import _device  # noqa: PLC0415 - private, and only here

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = make_config(tmp_path, engine="processes", devices="cuda")
    with pytest.raises(ConfigError, match=r"each of the 2 processes of this machine, rank 3 on \S+ found 1"):
        _device(config, Launch.read(VARIABLES))


def storage_errors(outputs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What two ranks with these output directories say; both end with 2 where they say something."""
    store = HashStore()
    ends: list[object] = []

    def rank(number: int) -> None:
        launch = Launch.read(VARIABLES | {"RANK": str(number), "WORLD_SIZE": "2"})
        try:
            check_storage(outputs[number], launch, Agreement(PrefixStore("test", store), launch))
        except Silent as end:
            ends.append(end.code)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ends == ([2, 2] if errors else [])
    return errors


def test_ranks_go_on_where_they_share_one_output_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "run"
    assert storage_errors((output, output), capsys) == []
    assert list(output.iterdir()) == []


def test_a_rank_with_a_directory_of_its_own_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = storage_errors((tmp_path / "one", tmp_path / "two"), capsys)
    assert "rank 1 on" in error
    assert f"does not see in the output directory {tmp_path / 'two'} what rank 0 wrote" in error


def test_storage_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for outputs in ((tmp_path / "file" / "run",) * 2, (tmp_path / "run", tmp_path / "file" / "run")):
        (error,) = storage_errors(outputs, capsys)
        assert f"cannot write to the output directory {tmp_path / 'file' / 'run'}" in error
