"""Laws of unhandled exceptions: those of the catalogue are told with their thread, and all stay the program's."""

from __future__ import annotations

import threading

import pytest

from diagnostics.probes.exceptions import ExceptionsProbe
from diagnostics.records import Log


def test_a_thread_that_ends_with_an_exception_of_the_catalogue_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: heard.append(hook.exc_value))
    known, other = AssertionError("CURRENT_PATCHER is None in finally block"), ValueError("of the program")

    def fails(error: Exception) -> None:
        raise error

    log = Log()
    with ExceptionsProbe(log).attached():
        for error in (known, other):
            thread = threading.Thread(target=fails, args=(error,), name=f"ends with a {type(error).__name__}")
            thread.start()
            thread.join()
    assert heard == [known, other]
    assert [(seen.name, seen.threads) for seen in log.observations()] == [("AssertionError", ("ends with a AssertionError",))]
