"""Laws of the commands, above all of those about what changed: what ends them is told in one line, and by the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diagnostics import environment, triage

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: 5 € are \udcff\n'

# Ctrl-C when the command's own work begins: its arguments have just been read.
_INTERRUPTED = """
import argparse, os, signal
parse = argparse.ArgumentParser.parse_args
def interrupted(self, *arguments, **options):
    parse(self, *arguments, **options)
    os.kill(os.getpid(), signal.SIGINT)
argparse.ArgumentParser.parse_args = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
"""


# Ctrl-C when a command imports the first of what it needs.
_INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name in ("argparse", "json") and "diagnostics.interrupts" in sys.modules:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
"""


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A command of diagnostics."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="backslashreplace",
        **options,
    )  # fmt: skip


def interrupted(how: str, name: str, folder: Path) -> subprocess.Popen[str]:
    """A command that got Ctrl-C, when it has ended."""
    (folder / "sitecustomize.py").write_text(how)
    arguments = {"compile_cache": ["inventory"], "timeline": [folder], "triage": [os.devnull]}.get(name, [])
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    command = started(f"diagnostics.{name}", *arguments, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    command.wait()
    return command


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(TRACEBACK, encoding="utf-8", errors="surrogateescape")
    return path


def test_a_reader_that_has_gone_changes_neither_exit_code_nor_files(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    empty = tmp_path / "empty.log"
    empty.touch()
    command = started("diagnostics.triage", empty, "--json", tmp_path / "found.json", stdout=writing)
    os.close(writing)
    _, told = command.communicate()
    assert (command.returncode, told) == (3, f"triage: {empty} is empty: nothing was observed\n")
    assert (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("command", "code"),
    [("dflash evaluate --help", 0), ("diagnostics.scan {file}", 0), ("regression.store verify {empty}", 0)],
)
def test_every_command_ends_as_if_it_were_read(command: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("x = 1\n")
    reading, writing = os.pipe()
    os.close(reading)
    unread = started(*command.format(file=tmp_path / "nothing.py", empty=tmp_path).split(), stdout=writing)
    os.close(writing)
    assert (unread.communicate()[1], unread.returncode) == ("", code)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is Linux's")
def test_a_log_that_nobody_can_write_changes_no_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "dflash", "plan", "--preset", "none"]
        assert subprocess.run(command, stderr=full, stdout=subprocess.PIPE, check=False).returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_read_of_a_command_comes_at_once_and_what_is_not_stops_nothing(unbuffered: str) -> None:
    code = f"""
import os, subprocess, sys
from dflash.standard_output import outlive_reader
print("before")
outlive_reader()
print("first €", flush={not unbuffered})
input()
print("lost", flush={not unbuffered})
subprocess.run([sys.executable, "-c", "print('lost too')"], check=True)
print("on", file=sys.stderr)
sys.exit(5)
"""
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert command.stdin is not None
    assert command.stdout is not None
    assert command.stderr is not None
    assert [command.stdout.readline() for _ in range(2)] == ["before\n", "first €\n"]
    command.stdout.close()
    command.stdin.write("\n")
    command.stdin.close()
    assert (command.stderr.read(), command.wait()) == ("on\n", 5)
    command.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is Linux's")
@pytest.mark.parametrize("name", ["triage", "timeline"])
def test_a_full_disk_is_told_in_a_line(name: str, tmp_path: Path, log: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = started(f"diagnostics.{name}", log if name == "triage" else tmp_path, stdout=full)
        _, told = command.communicate()
    assert (command.returncode, told) == (2, f"{name}: [Errno 28] No space left on device\n")


def test_what_the_output_cannot_spell_is_escaped(log: Path) -> None:
    strange = log.with_name(os.fsdecode(b"n\xffm.log"))
    log.rename(strange)
    for encoding in ("ascii", "utf-8"):
        command = started(
            "diagnostics.triage", strange, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
        )
        shown, told = command.communicate()
        assert (command.returncode, told) == (1, "")
        assert "are" in shown


@pytest.mark.parametrize("name", ["environment", "compile_cache", "timeline", "triage"])
def test_ctrl_c_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    command = interrupted(_INTERRUPTED, name, tmp_path)
    assert (command.returncode, command.communicate()[1]) == (130, f"{name}: interrupted\n")


@pytest.mark.parametrize("name", ["bisect", "environment", "compile_cache", "timeline", "triage"])
def test_ctrl_c_while_a_command_is_imported_ends_it_quietly(name: str, tmp_path: Path) -> None:
    command = interrupted(_INTERRUPTED_IMPORT, name, tmp_path)
    assert (command.returncode, command.communicate()) == (130, ("", ""))


def test_a_program_that_imports_a_command_keeps_its_ctrl_c() -> None:
    code = "import signal; from diagnostics import triage; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler); {code}"], check=True)


@pytest.mark.parametrize("name", ["timeline", "triage"])
def test_no_escape_sequence_of_what_is_read_reaches_the_terminal(name: str, tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202e"
    folder = tmp_path / f"run{evil}"
    folder.mkdir()
    log = folder / f"a{evil}.log"
    failure = f'Traceback (most recent call last):\n  File "/a{evil}.py", line 1, in f{evil}\nValueError: {evil}\x1bP of it\n'
    log.write_text(f"2026-11-30 04:00:00,000 step 1 tok/s 2000 {evil}\n{failure}" * 3)
    subprocess.run(["git", "init", "-q", folder], check=True)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", folder, *author, "commit", "-qm", f"subject {evil}", "--allow-empty"], check=True)
    for arguments in ([log if name == "triage" else folder], [tmp_path / f"none{evil}"]):
        command = started(f"diagnostics.{name}", *arguments, stdout=subprocess.PIPE)
        shown = "".join(command.communicate())
        assert "x1b]0;title" in shown
        assert not set("\x1b\x07\x9b\u202e") & set(shown)


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (("loop", "symbolic links"), ("a" * 300, "name too long")):
        with pytest.raises(SystemExit, match="2"):
            environment.main(["--json", str(tmp_path / name)])
        assert why in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="this system has no file that is standard output")
def test_json_goes_into_a_pipe_through_dev_stdout(log: Path) -> None:
    command = started("diagnostics.triage", log, "--json", "/dev/stdout", stdout=subprocess.PIPE)
    shown, told = command.communicate()
    assert (command.returncode, told) == (1, "")
    assert json.loads("{" + shown.split("\n{", 1)[1])["exit_code"] == 1


def test_what_is_read_is_not_overwritten(log: Path, tmp_path: Path) -> None:
    before = log.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(log)
    for main, arguments in ((triage.main, [str(log)]), (environment.main, ["--diff", str(log)])):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, "--json", str(link)])
    assert log.read_bytes() == before


def test_a_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert triage.main(["-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
