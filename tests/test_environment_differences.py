"""Laws of comparing environments: builds are told apart, likely causes come first, what is not known is no difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diagnostics import environment
from diagnostics.environments import differences, distributions, documents, ranking


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """The fingerprint of what is here."""
    return environment.fingerprint()


def ranked(before: dict[str, Any], after: dict[str, Any]) -> list[differences.Difference]:
    return list(differences.compare(before, after).differences)


def test_two_builds_of_one_commit_are_told_apart() -> None:
    git = "70d99e998b4955e0049d13a98d77ae1b14db1f45"
    one_build = {"version": "2.11.0+cu128", "git": git, "cuda": "12.8", "record": "a" * 12}
    other_build = {"version": "2.11.0+cu130", "git": git, "cuda": "13.0", "record": "b" * 12}
    before = {"torch_build": one_build, "torch_git": git, "cuda": "12.8"}
    after = {"torch_build": other_build, "torch_git": git, "cuda": "13.0"}
    (one,) = ranked(before, after)
    assert one.why.startswith("another build of the same commit, by cuda, record, version")
    assert (one.speed, one.tracing) == (3, 3)
    rebuilt, newer = ({"torch_build": {**one_build, **changed}} for changed in ({"record": "c" * 12}, {"git": "f" * 40}))
    assert "by record:" in ranked({"torch_build": one_build}, rebuilt)[0].why
    assert ranked({"torch_build": one_build}, newer)[0].why.startswith("another commit of torch")


def test_likely_causes_stand_before_unlikely_ones() -> None:
    before = {
        "distributions": {"torch": "1", "numpy": "1", "colorlog": "1"},
        "gpu_settings": {"power_limit_watts": [700.0]},
        "variables": {},
    }
    after = {"distributions": {"torch": "2", "numpy": "2", "colorlog": "2"}, "gpu_settings": {"power_limit_watts": [500.0]},
             "variables": {"TORCHDYNAMO_DISABLE": "1"}}  # fmt: skip
    names = [one.name for one in ranked(before, after)]
    assert names == ["distributions.torch", "variables.TORCHDYNAMO_DISABLE", "gpu_settings.power_limit_watts",
                     "distributions.numpy", "distributions.colorlog"]  # fmt: skip


def test_every_part_of_a_fingerprint_is_known_to_the_ranking(values: dict[str, Any]) -> None:
    emptied: dict[str, Any] = {name: {} for name, value in values.items() if isinstance(value, dict)}
    flat = [(name, value) for name, value, _ in differences._leaves("", values, emptied) if not differences._is_missing(value)]
    assert len(flat) > len(values)
    assert [name for name, _ in flat if not ranking.rule_of(name).pattern] == []


def test_what_one_side_did_not_record_or_observe_is_no_difference() -> None:
    before = {
        "cpu": "x",
        "gpu_settings": {"nvml": "not observed: no NVML"},
        "system_details": {"cpu_quota": "not observed: gone", "kernel": "6"},
    }
    after = {"cpu": "x", "gpu_settings": {"mig": ["off"]}, "system_details": {"cpu_quota": "none", "kernel": "6"},
             "distributions": {"a": "1"}}  # fmt: skip
    compared = differences.compare(before, after)
    assert compared.differences == ()
    assert compared.not_compared == (
        "distributions: recorded after only", "gpu_settings: no NVML (before)", "system_details.cpu_quota: gone (before)"
    )  # fmt: skip


def document(path: Path, **values: Any) -> str:
    path.write_text(json.dumps({"kind": "environment", "version": documents.VERSION, "fingerprint": values}))
    return str(path)


def test_the_exit_code_says_whether_something_differs(tmp_path: Path, capsys: Any) -> None:
    one, same = document(tmp_path / "a", cpu="x"), document(tmp_path / "b", cpu="x")
    other, fewer = document(tmp_path / "c", cpu="y"), document(tmp_path / "d", cpu="x", variables={})
    target = tmp_path / "out.json"
    assert environment.main(["--diff", one, same]) == 0
    assert environment.main(["--diff", one, other, "--json", str(target)]) == 1
    assert environment.main(["--diff", one, fewer]) == 3
    assert "not compared: variables: recorded after only" in capsys.readouterr().out
    (told,) = json.loads(target.read_text())["differences"]
    assert (told["name"], told["speed"], told["before"], told["after"]) == ("cpu", "likely", "x", "y")


def test_what_json_wrote_is_what_diff_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(environment, "installed", lambda: distributions.installed()[:3])
    path = str(tmp_path / "now.json")
    assert environment.main(["--json", path]) == 0
    assert environment.main(["--diff", path, path]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file"), (b"", "is empty"), (b'{"kind": "envi', "damaged"), (b"\xff\xfe\x00", "is no text"),
     (b"[" * 100_000, "damaged"), (b"[1]", "no description"), (b'{"kind": "differences"}', "no description"),
     (b'{"kind": "environment", "version": 1, "fingerprint": {"variables": 3}}', "variables should hold"),
     (b'{"kind": "environment", "version": 1, "fingerprint": {}, "files": {"edited": 3}}', "edited should hold"),
     (b'{"kind": "environment", "version": 99, "fingerprint": {}}', "has version 99")],
)  # fmt: skip
def test_a_file_that_is_no_description_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: Any, content: bytes | None, told: str
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    assert environment.main(["--diff", str(path), document(tmp_path / "good", cpu="x")]) == 2
    assert told in capsys.readouterr().err
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert environment.main(["--diff", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err


def test_the_bare_fingerprint_of_an_earlier_version_is_compared_with_what_is_now(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(environment, "installed", list)  # what is installed here is not the point
    old = {name: value for name, value in values.items() if name not in differences.PARTS}
    (tmp_path / "old.json").write_text(json.dumps({**old, "cores": 99}))
    assert environment.main(["--diff", str(tmp_path / "old.json")]) == 1
    shown = capsys.readouterr().out
    assert "distributions: recorded after only" in shown
    assert "cores" in shown
