"""Laws of triage: real programs that fail are recognised, known words name their kind, and nothing unknown is given a cause."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.fx._symbolic_trace as symbolic_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics import catalogue, hang, triage
from diagnostics.logs import reader
from diagnostics.logs.groups import Group, Groups
from diagnostics.logs.kinds import UNKNOWN
from diagnostics.logs.recognise import KINDS, gated, of_line
from diagnostics.logs.search import LogSearch

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
CRASHES = ("race", "foreign_module", "limit", "flex", "nan", "missing", "chain", "full", "leak", "ranks")
HIJACKED = "torch/fx/_symbolic_trace.py:module_call_wrapper"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 139.80 GiB of "
    "which 2.50 GiB is free. "
    "Process 77 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 77.00 GiB memory in use. Of the "
    "allocated memory "
    "40.00 GiB is allocated by PyTorch, and 30.00 GiB is reserved by PyTorch but unallocated."
)
WATCHDOG = (
    "[rank{rank}]:[E1130 04:00:08.4 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=158, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600004 milliseconds before "
    "timing out."
)
LINES = {  # words as the software prints them, and the kind
    OOM: "cuda-oom",
    WATCHDOG.format(rank=1): "nccl-timeout",
    "[rank0]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 0] Heartbeat monitor timed out! Process will": "nccl-watchdog-stuck",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "illegal-access",
    "CUDA error: device-side assert triggered": "device-assert",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.": "gpu-hardware",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update": "driver-mismatch",
    "Failed to initialize NVML: Driver/library version mismatch": "driver-mismatch",
    "CUDA error: no kernel image is available for execution on the device": "no-kernel-image",
    "torch._inductor.exc.LoweringException: NoValidChoicesError: No choices to select, please consider": "flex-no-choices",
    "ImportError: Using a `device_map` requires Accelerate: `pip install accelerate`": "missing-dependency",
    "ImportError: /x/_C.so: undefined symbol: _ZN3c10": "broken-install",
    "OSError: [Errno 28] No space left on device: '/data/run/step-1'": "disk-full",
    "ncclRemoteError: A call failed possibly due to a network error": "nccl-error",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective": "collective-mismatch",
    "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly": "dead-worker",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ": "killed",
    "Out of memory: Killed process 4711 (python) total-vm:1kB": "killed",
    "Killed": "killed",
    "RuntimeError: unable to write to file: insufficient shared memory (shm)": "shared-memory",
    "[Errno 98] EADDRINUSE: address already in use": "port-in-use",
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory": "checkpoint-damaged",
    "Fatal Python error: Segmentation fault": "segfault",
    "step 12 loss: nan grad_norm: 0.3": "nan",
    "FileNotFoundError: [Errno 2] No such file or directory: '/home/user/.triton/cache/ab/k.json.tmp.pid_1'": "cache-race",
    "OSError: [Errno 116] Stale file handle: '/tmp/torchinductor_root/iq/c.py'": "cache-race",
    "torch._dynamo.exc.FailOnRecompileLimitHit: Hard failure due to fullgraph=True": "F7-hit",
    "ValueError: Pointer argument (at 2) cannot be accessed from Triton (cpu tensor?)": "triton-pointer",
}


def search(text: str | bytes) -> list[Group]:
    groups = Groups()
    LogSearch("log", groups).read(io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return groups.ordered()


def only(text: str) -> Group:
    (group,) = search(text)
    return group


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two gloo ranks under torchrun printed, of which rank 1 failed in every way."""
    log = tmp_path_factory.mktemp("crashes") / "torchrun.log"
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", str(PROGRAMS / "crashes.py"), *CRASHES)  # fmt: skip
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=file, check=False, env=ENVIRONMENT)
    return log


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The deadlock of the compile lock and autograd's device thread, as py-spy and as faulthandler print it."""
    log = tmp_path_factory.mktemp("dumps") / "stderr"
    with log.open("w") as file:
        process = subprocess.Popen(
            (sys.executable, str(PROGRAMS / "deadlock.py")), stdout=subprocess.PIPE, stderr=file, env=ENVIRONMENT
        )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        while not hang.inspect(process.pid, seconds=0.2).stuck:
            pass
        py_spy = (str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(process.pid))
        text = subprocess.run(py_spy, capture_output=True, text=True, check=True).stdout
    finally:
        process.send_signal(signal.SIGABRT)  # faulthandler prints all stacks
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
    return {"py-spy": text, "faulthandler": log.read_text()}


def test_programs_that_really_fail_are_recognised(crashes: Path) -> None:
    found = {group.kind.id: group for group in search(crashes.read_bytes())}
    assert {
        "F3",
        "F5",
        "F7",
        "F7-flex",
        "nan",
        "missing-dependency",
        "disk-full",
        "unknown",
        "peer-lost",
        "dead-worker",
    } <= found.keys()
    assert found["missing-dependency"].facts == {"missing: a_package_that_is_missing": None}
    assert [one.thread for one in found["F3"].evidence] == ["drafter-1"]


@pytest.mark.skipif(
    not hasattr(symbolic_trace, "_is_fx_tracing_flag"), reason="this torch keeps the tracing flag per thread: F1 cannot happen"
)
def test_the_stack_of_a_real_race_says_that_the_trace_is_another_threads(crashes: Path) -> None:
    (group,) = [group for group in search(crashes.read_bytes()) if group.kind.id == "F1"]
    assert (group.sure, group.evidence[0].thread) == ("certain", "drafter-0")
    first, last = group.evidence[0].first_line, group.evidence[0].last_line
    lines = crashes.read_text().splitlines()
    assert lines[first - 1].endswith("Traceback (most recent call last):")
    assert "Detected that you are using FX" in lines[last - 1]


def test_what_ranks_say_after_a_failure_is_told_as_its_consequence(crashes: Path) -> None:
    found = search(crashes.read_bytes())
    first = min(found.index(group) for group in found if group.kind.follows)
    assert not any(group.kind.follows for group in found[:first])
    assert all(group.after for group in found if group.kind.id in {"peer-lost", "dead-worker"})


@pytest.mark.parametrize("printed_by", ["py-spy", "faulthandler"])
def test_a_real_dump_of_the_deadlock_names_both_threads(dumps: dict[str, str], printed_by: str) -> None:
    group = next(group for group in search(dumps[printed_by]) if group.kind.id == "F8")
    assert group.sure == "likely"
    holds, waits = group.facts
    assert "holds the compile lock" in holds
    assert "gradient_on_device" in holds
    assert "waits for the compile lock" in waits
    assert "recompute" in waits


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 25_000), st.integers(0, 25_000))
def test_a_real_log_cut_anywhere_keeps_what_is_whole_in_it(crashes: Path, start: int, length: int) -> None:
    piece = crashes.read_bytes()[start : start + length]
    found = {group.kind.id for group in search(piece)}
    for words, kind in ((b"ModuleNotFoundError: No module named 'a_p", "missing-dependency"), (b"CURRENT_PATCHER is None", "F5")):
        whole = words in piece[piece.find(b"\n") + 1 : piece.rfind(b"\n") + 1]
        assert not whole or kind in found


@pytest.mark.parametrize("printed_by", ["py-spy", "faulthandler"])
def test_a_dump_that_begins_at_any_thread_shows_the_deadlock_if_both_threads_are_left(
    dumps: dict[str, str], printed_by: str
) -> None:
    text = dumps[printed_by]
    seen = set()
    for begin in re.finditer(r"^(?:Thread|Current thread) ", text, re.MULTILINE):
        left = text[begin.start() :]
        both = bool(re.search(r"recompute\b", left)) and bool(re.search(r"\bbackend\b", left))
        assert ("F8" in {group.kind.id for group in search(left)}) == both
        seen.add(both)
    assert seen == {True, False}


@pytest.mark.parametrize(("line", "kind"), LINES.items(), ids=LINES.values())
def test_known_words_name_their_kind(line: str, kind: str) -> None:
    group = only(f"step 1 loss 2.0\n{line}\nstep 2 loss 1.9\n")
    assert group.kind.id == kind
    assert (group.evidence[0].first_line, group.evidence[0].log) == (2, "log")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.sampled_from([*LINES, "", "step 5 loss 2.0 tok/s 21503", "of an iterator: failed never", "\tindented"]), max_size=25
    )
)
def test_every_line_with_known_words_is_counted_wherever_it_stands(lines: list[str]) -> None:
    found = search("\n".join(lines))
    assert sum(group.count for group in found) == sum(line in LINES for line in lines)
    assert {group.kind.id for group in found} == {LINES[line] for line in lines if line in LINES}


@pytest.mark.parametrize("message", [message for message, _ in catalogue._MESSAGES])
def test_every_message_of_the_catalogue_is_known_here_by_the_same_id(message: str) -> None:
    match = of_line(message)
    assert match is not None
    assert match[0].id.partition("-")[0] == str(catalogue.match(message)).partition("-")[0]


def test_every_kind_says_what_to_do_and_what_does_not_help() -> None:
    assert len(KINDS) >= 20
    assert len({kind.id for kind in KINDS}) == len(KINDS)
    for kind in (*KINDS, UNKNOWN):
        assert min(map(len, (kind.title, kind.means, kind.to_do, kind.no_help))) > 0
        assert all(gated(mark.text) for mark in kind.marks)


def test_the_readme_names_every_kind() -> None:
    text = (Path(triage.__file__).parent / "README.md").read_text()
    assert [kind.id for kind in KINDS if f"`{kind.id}`" not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "loss nano 3",
        "finance: 3",
        "INFO no errors found",
        "saved 12 checkpoints",
        "Signal quality 3",
        "Killed by design: 0 tasks",
        "Step: 3",
        "0 failed, 3 passed",
    ],
)
def test_healthy_lines_are_no_failures(line: str) -> None:
    assert search(f"{line}\n" * 3) == []


def test_an_unknown_error_is_counted_and_given_no_cause() -> None:
    text = "".join(
        f'Traceback (most recent call last):\n  File "/me/t.py", line 3, in f\n    g()\nmy.OwnError: item {n} is odd\n'
        for n in range(5)
    )
    group = only(text)
    assert (group.kind, group.sure, group.count) == (UNKNOWN, "possible", 5)
    assert "item # is odd" in group.signature


@pytest.mark.parametrize(
    ("stack", "kind", "sure"),
    [
        (
            f"train.py:step {HIJACKED} torch/_dynamo/eval_frame.py:compile_wrapper",
            "F1",
            "certain",
        ),
        ("train.py:step torch/_dynamo/eval_frame.py:compile_wrapper", "F1", "likely"),
        (
            f"torch/fx/_symbolic_trace.py:trace {HIJACKED} torch/_dynamo/eval_frame.py:compile_wrapper",
            "F1-own",
            "certain",
        ),
        ("", "F1", "possible"),
    ],
)
def test_whose_trace_it_was_is_told_as_far_as_the_stack_shows(stack: str, kind: str, sure: str) -> None:
    frames = "".join(
        f'  File "/v/{file}", line 1, in {function}\n' for file, function in (part.split(":") for part in stack.split())
    )
    message = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."
    group = only(f"Traceback (most recent call last):\n{frames}{message}\n")
    assert (group.kind.id, group.sure) == (kind, sure)


def test_foreign_frames_under_another_error_are_told() -> None:
    frames = '  File "/me/t.py", line 3, in f\n  File "/v/torch/fx/_symbolic_trace.py", line 9, in module_call_wrapper\n'
    group = only(f"Traceback (most recent call last):\n{frames}my.OwnError: x\n")
    assert (group.kind.id, group.sure) == ("F4", "likely")


def test_who_held_the_memory_is_computed_from_the_message() -> None:
    facts = list(only(OOM).facts)
    assert facts[0] == "GPU 3: 20.00 GiB asked for, of 139.80 GiB, 2.50 GiB free"
    assert "process 77 held 60.00 GiB: another process is on this GPU" in facts
    assert any("30.00 GiB lay unused" in fact and "expandable_segments" in fact for fact in facts)


def test_the_rank_that_did_not_come_is_named() -> None:
    group = only("\n".join(WATCHDOG.format(rank=rank) for rank in (0, 1, 3)))
    assert list(group.facts) == ["waited in ALLREDUCE 158: ranks 0, 1, 3", "no time-out was printed by rank 2: look there first"]
    assert list(group.streams) == ["rank 0", "rank 1", "rank 3"]


def test_a_cause_comes_before_what_follows_from_it() -> None:
    found = search(f"{WATCHDOG.format(rank=0)}\n{OOM}\nChildFailedError: \n")
    assert [group.kind.id for group in found] == ["cuda-oom", "nccl-timeout", "dead-worker"]
    assert found[1].after == "cuda-oom at log:2"


def test_colours_progress_bars_and_wrapped_lines_hide_nothing() -> None:
    found = search("\x1b[31mKilled\x1b[0m\n 5%|#  | 1/20\r10%|## | 2/20\rFatal Python error: Segmentation fault\n")
    assert [group.kind.id for group in found] == ["killed", "segfault"]
    wrapped = "W1130 04:00:00.1 7 torch/x.py:9] flex_attention called without tor\nch.compile() - this will use an unfused\n"
    assert [group.kind.id for group in search(wrapped)] == ["F7-flex"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_the_encoding_of_a_log_does_not_matter(encoding: str) -> None:
    text = "Köln: step 1 loss 2.0\n" * 4 + f"{OOM}\n"
    group = next(iter(search(text.encode(encoding))))
    assert (group.kind.id, group.evidence[0].first_line) == ("cuda-oom", 5)
    (line,) = reader.lines("Köln".encode("latin-1" if encoding == "latin-1" else "utf-8"))
    assert line.text == "Köln"


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", WIDE)
def test_a_wide_encoding_is_seen_by_its_few_ascii_characters(encoding: str) -> None:
    text = "第一步训练损失正在下降一切正常\n" * 30
    assert b"".join(reader.blocks(io.BytesIO(text.encode(encoding)))).decode() == text


@pytest.mark.parametrize("encoding", WIDE)
def test_what_two_programs_wrote_in_two_encodings_is_read(encoding: str) -> None:
    wide, ascii_ = ("step 1 loss 2.0\n" * 20).encode(encoding), b"step 1 loss 2.0\n" * 20
    assert [group.kind.id for group in search(wide + ascii_ + OOM.encode() + b"\n")] == ["cuda-oom"]
    assert [group.kind.id for group in search(ascii_ + wide + OOM.encode(encoding))] == ["cuda-oom"]


@pytest.mark.parametrize("pattern", [b"\x01\0\0\0", b"\x07\x01\0\0", b"\x03\0", b"\0\x12\x05\0"])
def test_numbers_are_no_text_in_a_wide_encoding(pattern: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pattern * 500)
    assert triage.main([str(tmp_path / "a")]) == 2


@pytest.mark.parametrize("tail", ["", "\n"])
@pytest.mark.parametrize("filler", [0, 5_000, 40_000])
def test_lines_are_numbered_as_an_editor_numbers_them(filler: int, tail: str) -> None:
    text = "a healthy line of a log, number so and so\n" * filler + "Fatal Python error: Segmentation fault" + tail
    groups = Groups()
    reading = LogSearch("log", groups)
    reading.read(io.BytesIO(text.encode()))
    assert groups.ordered()[0].evidence[0].first_line == filler + 1


@settings(max_examples=50, deadline=None)
@given(st.text("ab \n\r\té", max_size=60), st.integers(1, 9), st.integers(1, 9))
def test_blocks_of_any_size_are_whole_lines_and_lose_nothing(text: str, head: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_HEAD_BYTES", head)
        patch.setattr(reader, "BLOCK_BYTES", size)
        found = list(reader.blocks(io.BytesIO(text.encode())))
    assert b"".join(found) == text.encode()
    short = max(map(len, text.encode().split(b"\n"))) < size
    assert not short or all(block.endswith(b"\n") for block in found[:-1])


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "bad": f"{OOM}\n".encode(),
        "good": b"step 1\n",
        "empty": b"",
        "binary": bytes(range(1, 32)) * 99,
        "zip": b"\x1f\x8b\x08data",
        "stopped": b"KeyboardInterrupt\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    expected = {
        ("bad",): 1, ("good",): 0, ("empty",): 3, ("binary",): 2, ("zip",): 2, ("nowhere",): 2, ("stopped",): 0,
        ("good", "empty"): 0, ("good", "binary"): 2, ("bad", "binary"): 1, (".",): 2,
    }  # fmt: skip
    assert {names: triage.main([str(tmp_path / name) for name in names]) for names in expected} == expected
    assert "cannot read" in capsys.readouterr().err
    out = tmp_path / "out.json"
    assert triage.main([str(tmp_path / "bad"), "--json", str(out)]) == 1
    written: dict[str, Any] = json.loads(out.read_text())
    (failure,) = written["failures"]
    assert (failure["kind"], failure["evidence"][0]["first_line"]) == ("cuda-oom", 1)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()):
        triage.main([])
    assert stopped.value.code == 2


def test_a_command_without_torch_reads_standard_input() -> None:
    code = (
        "import sys; from diagnostics import triage; code = triage.main(['-']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run((sys.executable, "-c", code), input=OOM, capture_output=True, text=True, check=False)
    assert (done.returncode, "cuda-oom" in done.stdout) == (1, True), done.stderr


def test_no_secret_of_a_log_is_shown_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "a.log", tmp_path / "out.json"
    message = "401 for https://me:plant@host.example/x with token=plant2 hf_plantABCDEFGHIJKLMNOP"
    log.write_text(f'Traceback (most recent call last):\n  File "/a/b.py", line 1, in f\nRuntimeError: {message}\n')
    assert triage.main([str(log), "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "401 for https://***@host.example/x" in shown
    assert "plant" not in shown + out.read_text()
