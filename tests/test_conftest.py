"""Laws of the rules that every test run follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from diagnostics.gpu import missing_gpus

ROOT = Path(__file__).parent.parent


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_missing_gpus_are_told_with_what_to_do() -> None:
    expected = "needs 8 GPUs, found 2 (CUDA_VISIBLE_DEVICES=0,1): run with --gpus 2, or --gpus 0 for the CPU workload"
    assert missing_gpus(8, 2, "0,1") == expected
    assert (
        missing_gpus(1, 0, None)
        == "needs 1 GPUs, found 0 (CUDA_VISIBLE_DEVICES is not set): run with --gpus 0 for the CPU workload"
    )
    assert missing_gpus(2, 2, None) is None


def test_more_gpus_than_present_is_bad_usage_before_any_test() -> None:
    done = pytest_run("--gpus", "1000", "tests/test_seams.py")
    assert done.returncode == 4
    assert "needs 1000 GPUs, found" in done.stderr


def test_an_exception_in_a_worker_thread_fails_the_test(tmp_path: Path) -> None:
    file = tmp_path / "test_worker.py"
    file.write_text(
        "import threading\n"
        "def fails():\n    raise ValueError('in a thread')\n"
        "def test_worker():\n    worker = threading.Thread(target=fails)\n    worker.start()\n    worker.join()\n"
    )
    done = pytest_run("-c", str(ROOT / "pyproject.toml"), str(file))
    assert done.returncode == 1, done.stdout
    assert "PytestUnhandledThreadExceptionWarning" in done.stdout
