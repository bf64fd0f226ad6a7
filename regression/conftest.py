"""The `measure` fixture: one training run in a fresh process, shared by the tests of a session."""

from __future__ import annotations

import pytest

from regression.child import run_json
from regression.measurement import Measurement
from regression.measurement import measure as run_and_measure
from regression.spec import prepare_commands, workload

_TIMEOUT_SECONDS = 1500.0


@pytest.fixture(scope="session")
def measure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The standard workload for `--gpus N`, measured once."""
    gpus: int = request.config.getoption("--gpus")
    directory = tmp_path_factory.mktemp("regression")
    if gpus == 0:
        make, prepare = prepare_commands(directory)
        run_json(make, log=directory / "prompts.log", timeout_seconds=_TIMEOUT_SECONDS)
        run_json(prepare, log=directory / "prepare.log", timeout_seconds=_TIMEOUT_SECONDS)
    spec = workload(gpus, data=directory / "data")
    return run_and_measure(spec, directory / "measured", timeout_seconds=_TIMEOUT_SECONDS)
