"""Laws of the nightly report: what stands where, how large it is, and how it looks in a real browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers_nights import CPU, FINDING, GPU, NIGHTS, START, commit, keep, note, one
from helpers_regression import measurement

from regression import changes, junit, line, mirror, report
from regression.decision import outcomes
from regression.history import History, read
from regression.laws import Outcome
from regression.measurement import Measurement
from regression.store import Store
from regression.verdict import Kind
from regression.watch import Night, replay

NOW = START + timedelta(days=NIGHTS)
TONIGHT = one(GPU, NIGHTS - 1)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nights")
    keep(directory / "store")
    return directory


@pytest.fixture(scope="module")
def history(store: Path) -> History:
    return read(Store(store / "store"))


@pytest.fixture(scope="module")
def texts(history: History) -> tuple[str, str, str]:
    return report.texts(Path("nights"), history, TONIGHT, now=NOW)


@pytest.fixture(scope="module")
def page(texts: tuple[str, str, str]) -> str:
    return texts[0]


def plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def test_the_page_is_small_and_refers_to_nothing_outside(page: str) -> None:
    assert len(page.encode()) < 300_000
    assert re.findall(r"<script|<link|<img|<iframe|@import|url\(|\bsrc=|\bhref=|https?:", page) == []


def test_the_verdict_comes_first(page: str) -> None:
    body = plain(page[page.index("<body>") :])
    assert body.startswith(f"FAIL {GPU}, 2026-03-01 02:00 UTC FAIL throughput :")
    assert body.index("confirmed by the gate") < body.index("Series")


def test_every_series_has_its_plot_and_every_night_its_mark(page: str) -> None:
    sections = re.findall(r'<section class="series">.*?</section>', page, flags=re.DOTALL)
    assert len(sections) == 2
    for section in sections:
        (picture,) = re.findall(r"<svg.*?</svg>", section, flags=re.DOTALL)
        root = ET.fromstring(picture)
        assert len([path for path in root.findall("path") if path.find("title") is not None]) == NIGHTS
        assert picture.count('class="INVALID"') == 1
        assert 'class="SUSPECT"' in picture
        assert 'class="band"' in picture


def test_changes_are_marked_in_the_series_they_happened_to(page: str) -> None:
    gpu, cpu = re.findall(r"<svg viewBox=\"0 0 420.*?</svg>", page, flags=re.DOTALL)
    assert gpu.count('<g class="environment">') == cpu.count('<g class="environment">') == 1
    assert "driver 570.86.15 → 570.124.06; packages.numpy 2.4.4 → 2.4.6" in gpu
    assert (gpu.count('<g class="accepted">'), cpu.count('<g class="accepted">')) == (0, 1)
    assert "change point: -4.9%" in cpu
    assert gpu.count('class="FAIL"') == 2


def test_tables_findings_cache_changes_and_commands_are_there(page: str) -> None:
    text = plain(page)
    for words in (
        "7 NVIDIA H200 1830 97 655 61 12% 0.0%",
        "drafter-2 cuda:7 360 7,681 85% 10% 5% 81% 19%",
        "drafter.backward 360 300.00 +0.0%",
        "hazard F3 Two threads traced at one time. (2 times)",
        "412 files, 89.1 MiB in /tmp/torchinductor_ci",
        f"{commit(NIGHTS - 4)[:12]}..{commit(NIGHTS - 1)[:12]}",
        f"git checkout {commit(NIGHTS - 1)}",
        "python -m regression.nightly --output nights --gpus 8",
        "python -m regression.report nights",
    ):
        assert words in text, words


def test_the_summary_says_the_same_and_fits_a_build(texts: tuple[str, str, str]) -> None:
    _, summary, _ = texts
    assert len(summary.encode()) < 1024 * 1024
    assert summary.startswith(f"## FAIL: {GPU}")
    assert "| throughput | **FAIL** | 7,680.8 tok/s per device, -8.7% to the median of 30 nights" in summary
    for line_ in summary.splitlines():
        if line_.startswith("| ---"):
            continue
        assert line_.count("|") - line_.count("\\|") in (0, 4, 5, 6, 8, 9, 10), line_


def test_junit_has_one_case_a_law_and_no_skip(texts: tuple[str, str, str], history: History) -> None:
    suite = ET.fromstring(texts[2]).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("7", "1", "0", "0")
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed == ["throughput"]
    assert {case.get("name") for case in suite.iter("testcase")} == set(outcomes(TONIGHT, history))


def test_insufficient_data_is_an_error_in_junit_and_any_text_is_valid_xml() -> None:
    sentence = "\x1b[31mred\x00 <&> \ud800"
    text = junit.document(TONIGHT, {"a": Outcome(kind="INSUFFICIENT", sentence=sentence, hazards=("h",))})
    (case,) = ET.fromstring(text).iter("testcase")
    error = case.find("error")
    assert error is not None
    assert "INSUFFICIENT DATA: \ufffd[31mred\ufffd <&> \ufffd" in str(error.get("message"))


def test_text_of_the_program_is_escaped(history: History) -> None:
    evil = "<script>alert(1)</script> | `x`\nnew"
    found = note(TONIGHT, probed={"findings": [{**FINDING, "what": evil}], "num_findings": 1, "program_exit_code": 0,
                                  "not_observed": [evil]}, gate_not_run=evil)  # fmt: skip
    changed = dataclasses.replace(
        history,
        notes=[found],
        unread=[evil],
        measurements=[*history.measurements[:-1], dataclasses.replace(TONIGHT, invalid=(evil,))],
    )
    page, summary, _ = report.texts(Path("nights"), changed, changed.measurements[-1], now=NOW)
    assert "<script" not in page
    assert "<script" not in summary
    assert "&lt;script&gt;alert(1)&lt;/script&gt; \\| \\`x\\`<br>new" in summary


def test_a_long_history_stays_small_and_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        dataclasses.replace(one(GPU, night), series=f"{GPU} [{number}]", steps={}) for number in range(9) for night in range(60)
    ]
    monkeypatch.setattr(report, "HTML_BYTES", 150_000)
    page, _, _ = report.texts(Path("nights"), History(measurements=many), many[-1], now=NOW)
    assert len(page.encode()) <= 150_000
    assert "older series are in the store only" in page
    assert "older ones are in the store" in page
    assert page.count('<section class="series">') == page.count('<svg viewBox="0 0 420')


def test_the_command_writes_the_same_again_from_the_store_alone(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(store)]) == 0
    files = [Path(line_) for line_ in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["report.html", "summary.md", "junit.xml"]
    first = [file.read_text() for file in files]
    assert report.main([str(store)]) == 0
    assert [file.read_text() for file in files] == first
    assert first[0].count('<svg viewBox="0 0 420') == 2


def test_without_a_history_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "holds no measurement" in capsys.readouterr().err


def test_a_missing_workload_is_told(history: History) -> None:
    page, summary, _ = report.texts(Path("nights"), history, TONIGHT, now=NOW + timedelta(days=5))
    assert f"Missing: {CPU}: no valid night since 2026-03-01 02:00" in plain(page)
    assert f"- **Missing:** {CPU}: no valid night" in summary


@pytest.mark.parametrize("values", [[None], [100.0], [100.0, None], [100.0] * 3])
def test_a_series_of_any_length_can_be_drawn(values: Sequence[float | None]) -> None:
    nights = [
        Night(series="s", time=START + timedelta(days=day), value=value, invalid=() if value else ("x",))
        for day, value in enumerate(values)
    ]
    picture = line.svg("s", replay(nights))
    assert "nan" not in picture
    assert len(re.findall("<title>", picture)) == len(values)


def test_marks_lie_inside_the_picture_in_the_order_of_time() -> None:
    nights = [Night(series="s", time=START + timedelta(days=day), value=100.0 + day % 7) for day in range(40)]
    picture = line.svg("s", replay(nights))
    (points,) = re.findall(r'class="line" points="([^"]*)"', picture)
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert places == sorted(places)
    assert all(0 < x < line.WIDTH and 0 < y < line.HEIGHT for x, y in places)
    top, bottom = places[6][1], places[0][1]
    assert top < bottom  # 106 is drawn above 100


def at(day: int, fingerprint: dict[str, Any]) -> Measurement:
    return dataclasses.replace(TONIGHT, time=(START + timedelta(days=day)).isoformat(timespec="seconds"), fingerprint=fingerprint)


def test_the_environment_of_a_night_is_marked_only_where_it_could_change_the_speed() -> None:
    before, after = ({"packages": {"torch": torch, "colorlog": "1"}, "git": {"commit": torch}} for torch in ("2.12", "2.13"))
    other = {**after, "packages": {"torch": "2.13", "colorlog": "2"}}
    nights = [at(day, fingerprint) for day, fingerprint in enumerate((before, after, other), 1)]
    assert list(changes.environment_changes(nights).values()) == ["packages.torch 2.12 → 2.13"]


def test_the_likeliest_cause_stands_first_and_what_a_night_did_not_record_is_said() -> None:
    before = {"packages": {"numpy": "1", "torch": "1"}, "omp_num_threads": None}
    after = {"packages": {"numpy": "2", "torch": "2"}, "omp_num_threads": None, "distributions": {"torch": "2"}}
    rows = report._changed(at(1, before), at(2, after)).rows
    assert [row[:3] for row in rows] == [
        ("packages.torch", "1", "2"), ("packages.numpy", "1", "2"), ("not compared", "", "")
    ]  # fmt: skip
    assert rows[0][3] == "likely / likely"
    assert rows[2][4] == "distributions: recorded after only"


def test_the_command_that_finds_the_commit_reads_the_rate_that_is_judged() -> None:
    before, after = ({"git": {"commit": letter * 40}} for letter in "ab")
    beside = note(TONIGHT, commands={"the measured run": "CUDA_VISIBLE_DEVICES=0 python -m dflash train --output runs/measured"})
    found = dict(report._commands(Path("d"), at(1, before), at(2, after), beside))["which commit it was"]
    words = shlex.split(found)
    assert words[3:7] == ["--good", "a" * 40, "--bad", "b" * 40]
    assert words[-3:] == ["sh", "-c", 'CUDA_VISIBLE_DEVICES=0 python -m dflash train --output "$(mktemp -d)/run"']
    rates = {"tokens_per_second_per_device": 1.0, "measure": {"tokens_per_second_per_device": 2.5, "segments": [
        {"tokens_per_second_per_device": 3.0}]}}  # fmt: skip
    assert re.findall(words[words.index("--metric") + 1], json.dumps(rates)) == ["2.5"]
    assert "which commit it was" not in dict(report._commands(Path("d"), at(1, after), at(2, after), beside))


def test_the_commits_between_two_nights_are_listed_where_the_repository_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(("git", "init", "--quiet"), check=True)
    for text in ("first", "second", "third"):
        subprocess.run(("git", *who, "commit", "--quiet", "--allow-empty", "-m", text), check=True)
    done = subprocess.run(("git", "log", "--format=%H"), capture_output=True, text=True, check=True)
    new, _, old = done.stdout.split()
    before, after = {"git": {"commit": old, "dirty": False}}, {"git": {"commit": new, "dirty": True}}
    words, listed = changes.commits(before, after)
    assert words == f"{old[:12]}..{new[:12]} with uncommitted changes"
    assert [line.partition(" ")[2] for line in listed] == ["third", "second"]
    assert changes.commits(after, after)[0] == f"commit {new[:12]} with uncommitted changes, as before"


def test_a_cache_that_others_wrote_is_told_in_its_title_and_nights_without_states_have_none() -> None:
    rows = [{"part": "FX graphs", "files": 3, "bytes": 2**20}]
    cache = {"directory": "/tmp/c", "files": 3, "bytes": 2**20, "parts": rows}
    told = report._cache({"cache": {**cache, "states": ["cold", "foreign"]}}, {"cache": cache})
    assert told.title == "Compile cache (cold, foreign): 3 files, 1.0 MiB in /tmp/c"
    assert [*told.rows] == [("FX graphs", "3", "1.0", "3", "1.0")]
    assert report._cache({"cache": cache}, {}).title == "Compile cache: 3 files, 1.0 MiB in /tmp/c"


def test_the_mirror_is_offline_without_a_key_and_has_a_stable_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    small = measurement()
    told = mirror.mirror(small, {"a": Outcome(kind="PASS", sentence="s")}, tmp_path)
    assert f"mirrored offline, run {mirror.run_id(small)}" in told
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{mirror.run_id(small)}"))
    assert mirror.run_id(small) == mirror.run_id(measurement()) != mirror.run_id(measurement(per_device=1.0))


def test_a_mirror_that_fails_is_told_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise OSError("no space")

    monkeypatch.setattr(mirror, "_write", fail)
    assert mirror.mirror(TONIGHT, {}, tmp_path) == "not mirrored: OSError: no space"
    assert mirror.mirror(TONIGHT, {}, tmp_path, mode="off") == "not mirrored, --wandb off"


# Chromium's window is at least 500 pixels wide, so the page is looked at in a frame.
FRAME = """<body style="margin:0"><iframe width="{width}" height="{height}" style="border:0" srcdoc="{page}"></iframe><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const wide = [...inside.querySelectorAll("body *")].filter(
    one => !one.closest("svg *") && one.getBoundingClientRect().right > root.clientWidth + 0.5
      && !(one.closest(".wide") && one.className !== "wide"));
  const plots = [...inside.querySelectorAll("section.series > svg")].map(one => one.getBoundingClientRect());
  document.title = JSON.stringify({{
    width: root.clientWidth, scrolls: root.scrollWidth, wide: wide.map(one => one.outerHTML.slice(0, 80)),
    plots: plots.map(one => [one.width, one.height]), series: inside.querySelectorAll("section.series").length}});
}};
</script>"""


def look(page: str, width: int, directory: Path, picture: Path | None = None) -> dict[str, Any]:
    """What a browser makes of the page at a width; with `picture`, a screenshot as well."""
    height = 4600 if width < 500 else 3200
    file = directory / f"frame-{width}.html"
    file.write_text(FRAME.format(width=width, height=height, page=html.escape(page)))
    common = (
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--window-size={width},{height}", f"--user-data-dir={directory / 'profile'}"),
    )
    dump = subprocess.run((*common, "--dump-dom", file.as_uri()), capture_output=True, text=True, check=True).stdout
    if picture is not None:
        subprocess.run((*common, f"--screenshot={picture}", file.as_uri()), capture_output=True, check=True)
    found = re.search(r"<title>(.*?)</title>", dump, flags=re.DOTALL)
    assert found, dump[:500]
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    return values


@pytest.mark.skipif(CHROMIUM is None, reason="not run: no chromium or chromium-browser on PATH, the page was not looked at")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_overflows_and_no_plot_is_missing(page: str, width: int, tmp_path: Path) -> None:
    seen = look(page, width, tmp_path, tmp_path / "page.png")
    assert (seen["width"], seen["scrolls"], seen["wide"]) == (width, width, [])
    assert seen["series"] == len(seen["plots"]) == 2
    assert all(plot_width > 300 and plot_height > 130 for plot_width, plot_height in seen["plots"])
    assert (tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.skipif(CHROMIUM is None, reason="not run: no chromium or chromium-browser on PATH, the page was not looked at")
def test_the_look_finds_an_overflow(page: str, tmp_path: Path) -> None:
    broken = page.replace("<h2>Series</h2>", '<h2 style="width: 900px">Series</h2>')
    seen = look(broken, 390, tmp_path)
    assert seen["scrolls"] > 390
    assert len(seen["wide"]) == 1


def test_every_kind_has_a_colour_of_its_own_class(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    assert [kind for kind in Kind if f"path.{kind}" not in style] == []
    assert [kind for kind in Kind if f"w-{kind}" not in style] == []
