"""Work that must be done alone among work that may overlap: a lock for one writer or many readers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Threads work together, or one of them alone. Who wants to be alone goes first. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False
        self._want_alone = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Beside any number of others, while nobody is or wants to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._want_alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else works."""
        with self._changed:
            self._want_alone += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._together)
                self._alone = True
            finally:
                self._want_alone -= 1
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
