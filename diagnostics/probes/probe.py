"""What all probes have in common: a log to write to, and a context in which they watch, entered once at a time."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator

from diagnostics.records import Log


class Probe(abc.ABC):
    """Watches one thing and writes observations into `log`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._is_attached = False

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Observe inside the block. Raises NotObservable on a torch without the seam, RuntimeError when attached already."""
        if self._is_attached:
            raise RuntimeError(f"this {type(self).__name__} is attached already: everything would be counted twice; make another")
        self._is_attached = True
        try:
            with self._watching():
                yield
        finally:
            self._is_attached = False

    @abc.abstractmethod
    def _watching(self) -> contextlib.AbstractContextManager[None]:
        """Attach for the length of the context."""
