"""When to ask a server again: exponential back-off with jitter by key, Retry-After, and a limit of requests per second.

Pure functions of the time that they are given, so that waiting can be tested without waiting. The jitter comes from
(seed, sample id, attempt): many clients spread out, and one run waits as it did before.
"""

from __future__ import annotations

import email.utils
import hashlib

LONGEST_BACKOFF_SECONDS = 60.0


def backoff_seconds(base_seconds: float, attempt: int, *, seed: int, sample_id: str) -> float:
    """How long to wait after the failed attempt number `attempt`, which counts from 0: half fixed, half by chance."""
    whole = min(LONGEST_BACKOFF_SECONDS, base_seconds * 2.0 ** min(attempt, 64))
    text = f"{seed}\0{attempt}\0{sample_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, person=b"dflash-retry").digest()
    return whole * (0.5 + 0.5 * int.from_bytes(digest, "little") / 2**64)


def retry_after_seconds(value: str | None, *, now_unix_seconds: float) -> float:
    """The seconds that a Retry-After header asks to wait: a number, or a date; 0 without one that can be read."""
    if value is None:
        return 0.0
    text = value.strip()
    if text.isdecimal():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, date.timestamp() - now_unix_seconds)


class RequestSchedule:
    """Starts of requests: at most `per_second` of them (None: any number), and none before a pause is over."""

    def __init__(self, per_second: float | None) -> None:
        self._gap_seconds = 0.0 if per_second is None else 1.0 / per_second
        self._next = float("-inf")  # on the caller's clock, in seconds
        self.paused_until = float("-inf")

    def reserve(self, now: float) -> float:
        """The time at which the next request may start, on the clock of `now`; that start is taken then."""
        start = max(now, self._next, self.paused_until)
        self._next = start + self._gap_seconds
        return start

    def pause(self, until: float) -> None:
        """Let no request start before `until`."""
        self.paused_until = max(self.paused_until, until)
