"""Laws of the progress bar."""

from __future__ import annotations

import pytest
from rich.console import Console

from dflash.data import progress


def test_progress_is_shown_when_it_takes_long_and_not_before() -> None:
    for delay, shown in ((0.0, True), (1000.0, False)):
        console = Console(force_terminal=True, width=120)
        with console.capture() as capture, progress.GenerationProgress(4, show_after_seconds=delay, console=console) as bar:
            bar.tokens(3)
            bar.answered(2)
        assert ("answering prompts" in capture.get()) is shown
        assert ("2/4" in capture.get()) is shown
    assert progress.SHOW_AFTER_SECONDS == 2.0


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.GenerationProgress(4, show_after_seconds=0.0) as bar:
        bar.answered(4)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "4/4" in captured.err
