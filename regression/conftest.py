"""The `measure` fixture: one training run in a fresh process, shared by the tests of a session."""

from __future__ import annotations

import pytest

from regression.measurement import Measurement, prepare_data
from regression.measurement import measure as run_and_measure
from regression.spec import workload

_TIMEOUT_SECONDS = 1500.0


@pytest.fixture(scope="session")
def measure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The standard workload for `--gpus N`, measured once."""
    gpus: int = request.config.getoption("--gpus")
    directory = tmp_path_factory.mktemp("regression")
    data = prepare_data(directory, timeout_seconds=_TIMEOUT_SECONDS) if gpus == 0 else directory
    return run_and_measure(workload(gpus, data=data), directory / "measured", timeout_seconds=_TIMEOUT_SECONDS)
