"""A progress bar on stderr for generation that takes long enough to wonder about."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOW_AFTER_SECONDS = 2.0


class GenerationProgress:
    """Counts answered prompts and generated tokens; shows itself once `show_after_seconds` have passed."""

    def __init__(
        self, num_prompts: int, *, show_after_seconds: float = SHOW_AFTER_SECONDS, console: Console | None = None
    ) -> None:
        self.num_tokens = 0
        self._num_prompts = num_prompts
        self._answered = 0
        self._show_after_seconds = show_after_seconds
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("answering prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens_per_second]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._task is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Print one line, whether the bar is shown or not."""
        self._progress.console.print(text, highlight=False)

    def tokens(self, count: int) -> None:
        """`count` more tokens were generated."""
        self.num_tokens += count
        self._show()

    def answered(self, count: int) -> None:
        """`count` more prompts are answered."""
        self._answered += count
        self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._started
        if self._task is None:
            if seconds < self._show_after_seconds:
                return
            self._progress.start()
            self._task = self._progress.add_task("", total=self._num_prompts, tokens_per_second=0.0)
            self._progress.tasks[0].start_time = self._started  # the work began before the bar was shown
        rate = self.num_tokens / seconds if seconds > 0 else 0.0
        self._progress.update(self._task, completed=self._answered, tokens_per_second=rate)
