"""Fixtures of the tests of dflash.data; what else they share is in helpers_data.py.

What they need is imported when a test asks for them: the tests of diagnostics also run where there is no transformers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model() -> Any:
    from helpers_data import tiny_target  # noqa: PLC0415 - see the module's docstring

    return tiny_target()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers_data import saved_target  # noqa: PLC0415 - see the module's docstring

    return saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def configure(tmp_path: Path, target: Path) -> Any:
    """A function that makes the configuration for some rows of prompts."""
    from helpers_data import prepare_config  # noqa: PLC0415 - see the module's docstring

    return functools.partial(prepare_config, tmp_path, target)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over-fitted on a few answers of the tiny target, its data and its export beside it; nobody changes them."""
    from helpers_checking import trained  # noqa: PLC0415 - most tests need no trainer

    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name, what runs in processes left: they are made by one program, because its imports take longer than a run."""
    from helpers_processes import run_all  # noqa: PLC0415 - most tests need no trainer

    return run_all(tmp_path_factory.mktemp("processes"))
