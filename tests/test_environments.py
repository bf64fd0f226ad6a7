"""Laws of describing environments: builds are read, edits are named, secrets never leave, doubt is said."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from diagnostics import environment
from diagnostics.environments import builds, distributions, edits, gpus, project, settings
from diagnostics.environments.masking import MASK

ROOT = Path(__file__).parent.parent
PASSWORD, TOKEN, OTHER_TOKEN = "hunter2secret", "hf_AbCdEfGhIjKlMnOpQrStUvWx", "ghp_0123456789abcdefghijABCDEFGHIJ012345"


def clean_git(*arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(("git", *who, *arguments), capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty commit, in the current directory."""
    home = tmp_path / "project"
    home.mkdir()
    monkeypatch.chdir(home)
    clean_git("init", "--quiet")
    clean_git("commit", "--quiet", "--allow-empty", "-m", "first")
    return home


def install(site: Path, name: str, files: dict[str, str], *, version: str = "1.0", by: str = "pip") -> Path:
    """A distribution as an installer leaves it: files older than RECORD, which is written last."""
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    written = {**files, f"{metadata.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    if by == "uv":
        written[f"{metadata.name}/uv_cache.json"] = "{}"
    written[f"{metadata.name}/INSTALLER"] = by
    lines = []
    for path, text in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        os.utime(site / path, (1_700_000_000, 1_700_000_000))
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    record = metadata / "RECORD"
    record.write_text("\n".join([*lines, f"{name}/__pycache__/a.cpython-311.pyc,,", f"{metadata.name}/RECORD,,"]) + "\n")
    os.utime(record, (1_700_000_001, 1_700_000_001))
    return metadata


def found(site: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> distributions.Distribution:
    monkeypatch.setattr(sys, "path", [str(site)])
    (one,) = [each for each in distributions.installed() if each.name == name]
    return one


# Secrets


def test_planted_secrets_leave_in_no_part(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plant = PASSWORD
    clean_git("remote", "add", "origin", f"https://me:{plant}@git.example/o/r.git")
    (repository / "pip.conf").write_text(f"[global]\nindex-url = https://me:{plant}@pypi.example/simple\n")
    monkeypatch.setattr(edits, "check", lambda *_, **__: edits.Check())  # it takes the longest, and is not the point
    for name, value in {
        "PIP_CONFIG_FILE": str(repository / "pip.conf"), "PIP_EXTRA_INDEX_URL": f"https://{plant}@pypi.example/simple",
        "HF_TOKEN": plant,
        "WANDB_API_KEY": plant, "TORCH_LOGS": f"dynamo,{TOKEN}", "UNRELATED": OTHER_TOKEN,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--hf-token", plant, f"--api-key={plant}"])
    target = repository / "now.json"
    assert environment.main(["--json", str(target), "--all"]) == 0
    text, shown = target.read_text(), capsys.readouterr().out
    assert [one for one in (PASSWORD, TOKEN, OTHER_TOKEN) if one in text + shown] == []
    values = json.loads(text)
    assert values["remotes"] == {"origin": f"https://{MASK}@git.example/o/r.git"}
    assert values["fingerprint"]["variables"]["HF_TOKEN"] == MASK
    assert f"https://{MASK}@pypi.example/simple" in values["pip"].values()
    assert values["command"] == f"python train.py --hf-token {MASK} --api-key={MASK}"
    assert "secrets masked" in " ".join(shown.split())


# Packages and their files


def test_one_wheel_has_one_hash_whoever_installed_it_and_another_file_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, other = {"a/x.py": "x = 1\n"}, {"a/x.py": "x = 2\n"}
    sites = [tmp_path / name for name in ("pip", "uv", "edited")]
    install(sites[0], "a", same)
    install(sites[1], "a", same, by="uv")
    install(sites[2], "a", other)
    hashes = [found(site, monkeypatch, "a").record for site in sites]
    assert hashes[0] is not None
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_second_copy_behind_the_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", "a", {"a/x.py": ""})
    install(tmp_path / "two", "a", {"a/x.py": ""}, version="2.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two")])
    (one,) = distributions.installed()
    assert (one.version, one.shadowed) == ("1.0", (f"2.0 in {tmp_path / 'two'}",))


def test_the_source_of_a_package_is_told_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = install(tmp_path, "a", {"a/x.py": ""})
    url = {"url": f"https://{OTHER_TOKEN}@github.com/o/a", "vcs_info": {"vcs": "git", "commit_id": "c" * 40}}
    (metadata / "direct_url.json").write_text(json.dumps(url))
    assert found(tmp_path, monkeypatch, "a").to_dict()["source"] == f"https://{MASK}@github.com/o/a@{'c' * 40}"


@pytest.mark.parametrize(
    ("name", "text", "old_date", "quick", "everything"),
    [("a", "x = 10\n", True, True, True), ("a", "x = 2\n", False, True, True), ("a", "x = 2\n", True, False, True),
     ("torch", "x = 2\n", True, True, True), ("a", "x = 1\n", False, False, False)],
    ids=["size", "date", "neither", "neither, but of torch", "only touched"],
)  # fmt: skip
def test_edited_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, *, old_date: bool, quick: bool, everything: bool
) -> None:
    install(tmp_path, name, {f"{name}/x.py": "x = 1\n", f"{name}/y.py": "y = 1\n"})
    one = found(tmp_path, monkeypatch, name)
    path = tmp_path / name / "x.py"
    path.write_text(text)
    if old_date:
        os.utime(path, (1_700_000_000, 1_700_000_000))
    expected = {name: [f"{name}/x.py [{hashlib.sha256(text.encode()).hexdigest()[:12]}]"]}
    assert edits.check([one]).edited == (expected if quick else {})
    assert edits.check([one], everything=True).edited == (expected if everything else {})


def test_missing_files_and_packages_without_record_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "a", {"a/x.py": "", "a/y.py": ""})
    (install(tmp_path, "b", {"b/x.py": ""}) / "RECORD").unlink()
    (tmp_path / "a" / "x.py").unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check = edits.check(distributions.installed())
    assert (check.gone, check.without_record, check.edited) == ({"a": ["a/x.py"]}, ["b"], {})


def test_suspects_beyond_the_budget_are_counted_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "a", {f"a/{letter}.py": "x = 1\n" for letter in "bcd"})
    one = found(tmp_path, monkeypatch, "a")
    for path in (tmp_path / "a").iterdir():
        os.utime(path)
    monkeypatch.setattr(edits, "MAX_BYTES", 10)
    check = edits.check([one])
    assert (check.num_hashed, check.num_not_hashed) == (2, 1)
    assert edits.check([one], everything=True).num_not_hashed == 0


def test_what_runs_at_the_start_of_python_beside_packages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "a", {"a.pth": "import os\n", "a/x.py": ""})
    (tmp_path / "sitecustomize.py").write_text("import torch\n")
    monkeypatch.setattr(edits.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(edits.startup_files(distributions.installed())) == ["sitecustomize.py"]


# torch


def test_a_build_is_read_without_importing_torch() -> None:
    code = (
        "import sys, json\nfrom diagnostics.environments import builds, distributions, settings\n"
        "found = builds.torch_build(distributions.installed())\nsettings.differing()\nassert 'torch' not in sys.modules\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout)
    version = torch.version
    assert (read["version"], read["git"], read["cuda"], read["hip"]) == (
        *(torch.__version__, version.git_version),
        *(version.cuda, version.hip),
    )
    assert read["record"] is not None


def test_a_torch_that_cannot_be_imported_is_described(tmp_path: Path) -> None:
    site = tmp_path / "site"
    version = "__version__ = '9.9'\ngit_version = 'abc'\ncuda: str = '14.0'\n"
    broken = "raise ImportError('libcudnn.so.9: cannot open')\n"
    install(site, "torch", {"torch/__init__.py": broken, "torch/version.py": version}, version="9.9")
    target = tmp_path / "now.json"
    command = (sys.executable, "-m", "diagnostics.environment", "--import", "--json", str(target))
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(target.read_text())
    assert values["fingerprint"]["torch_build"] | {"record": ""} == {
        **dict.fromkeys(("hip", "xpu", "debug")), "version": "9.9", "git": "abc", "cuda": "14.0", "record": ""
    }  # fmt: skip
    assert "libcudnn.so.9: cannot open" in values["torch_runtime"]["import"]
    assert "not observed: torch_runtime.import: import torch failed with exit code 1" in " ".join(done.stdout.split())


def test_a_torch_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds.importlib.util, "find_spec", lambda _: None)
    assert builds.torch_build([])["not_observed"] == "torch is not installed in this Python"


def test_a_variable_that_a_config_reads_is_told_with_its_setting() -> None:
    told = dict(settings._from_variables({"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "PATH": "/bin"}))
    assert told == {"torch._inductor.config.max_autotune": "set by TORCHINDUCTOR_MAX_AUTOTUNE=1"}


def test_a_setting_that_a_program_changed_is_told_and_no_other() -> None:
    from torch.fx.experimental import _config as config  # noqa: PLC0415 - so that a test before this one finds none loaded

    before = dict(settings._live(config.__name__, config))
    name, default = next((key, value) for key, value in config.get_config_copy().items() if value is False)
    with config.patch(**{name: True}):
        after = dict(settings._live(config.__name__, config))
    assert {key: after[key] for key in after.keys() - before.keys()} == {f"{config.__name__}.{name}": f"True (default {default})"}


# Project and GPUs


def test_the_same_changes_have_one_hash_and_others_another(repository: Path) -> None:
    assert project.state() == {"commit": clean_git("rev-parse", "HEAD").strip(), "dirty": False, "diff": None}
    hashes = []
    for text in ("one", "two", "one"):
        (repository / "new.py").write_text(text)
        hashes.append((project.state() or {})["diff"])
    assert hashes[0] == hashes[2] != hashes[1]


def test_looking_at_a_project_changes_nothing_in_it(repository: Path) -> None:
    (repository / "a").write_text("1")
    clean_git("add", "a")
    clean_git("commit", "--quiet", "-m", "second")
    os.utime(repository / "a", (1, 1))  # a plain `git status` would now write the index anew
    index = (repository / ".git" / "index").read_bytes()
    project.state()
    assert (repository / ".git" / "index").read_bytes() == index


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What NVML answered for one H200 (nvidia-ml-py 13.610); it did not support questions about NVLink there."""

    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": 0,
        "nvmlSystemGetDriverVersion": "580.159.04", "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlDeviceGetName": "NVIDIA H200", "nvmlDeviceGetVbiosVersion": "96.00.A5.00.1A",
        "nvmlDeviceGetEnforcedPowerLimit": 700000, "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
        "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetApplicationsClock": 1980, "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetEccMode": [1, 1], "nvmlDeviceGetPersistenceMode": 1, "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5, "nvmlDeviceGetCurrPcieLinkWidth": 16, "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", unsupported)
    return {"unsupported": unsupported}


@pytest.mark.usefixtures("nvml")
def test_limits_of_a_gpu_are_told_in_their_units_and_what_it_does_not_answer_with_the_reason() -> None:
    seen = gpus.settings()
    expected = {
        "name": ["NVIDIA H200"], "power_limit_watts": [700.0], "default_power_limit_watts": [700.0], "mig": ["off"],
        "ecc": ["on"], "persistence": ["on"], "compute_mode": [0],
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert (seen["driver"], seen["cuda_of_driver"], seen["max_sm_clock_mhz"]) == ("580.159.04", "13.0", [1980])
    assert seen["nvlinks_up"] == ["not observed: Not Supported"]


def test_several_gpus_stand_beside_each_other_and_links_that_are_up_are_counted(
    nvml: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: (700_000, 500_000)[handle])
    states = [0 if link == 3 else 1 for link in range(18)]

    def link_state(_handle: int, link: int) -> Any:
        return states[link] if link < len(states) else nvml["unsupported"]()

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", link_state)
    monkeypatch.delattr(pynvml, "nvmlDeviceGetVbiosVersion")
    seen = gpus.settings()
    assert (seen["power_limit_watts"], seen["nvlinks_up"]) == ([700.0, 500.0], [17, 17])
    assert seen["vbios"] == ["not observed: this nvidia-ml-py has no nvmlDeviceGetVbiosVersion"] * 2
