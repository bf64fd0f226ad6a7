"""Options and rules of every test run.

Warnings are errors (pyproject.toml), among them pytest's own about exceptions in threads and in finalizers: an exception in
a worker thread fails the test in which it happened.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--gpus N`."""
    parser.getgroup("dflash").addoption(
        "--gpus", type=int, default=0, metavar="N", help="GPUs that the workloads use; 0 (default): the CPU workload"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run with fewer GPUs than asked for: a green run that measured nothing is worse than none."""
    wanted = config.getoption("--gpus")
    if wanted < 0:
        raise pytest.UsageError(f"--gpus {wanted}: use 0 for the CPU workload, or a number of GPUs")
    if wanted > 0:
        import torch  # noqa: PLC0415 - the CPU path of collection needs none

        from diagnostics.gpu import missing_gpus  # noqa: PLC0415 - the same

        message = missing_gpus(wanted, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if message:
            raise pytest.UsageError(message)
