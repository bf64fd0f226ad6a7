"""Laws of asking again: when, how often, and never all at the same moment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.retrying import LONGEST_BACKOFF_SECONDS, RequestSchedule, backoff_seconds, retry_after_seconds


@settings(max_examples=30)
@given(st.floats(0.001, 100), st.integers(0, 5000), st.integers(0, 99), st.text(max_size=5))
def test_a_wait_doubles_up_to_the_longest_and_half_of_it_is_by_key(base: float, attempt: int, seed: int, name: str) -> None:
    whole = min(LONGEST_BACKOFF_SECONDS, base * 2.0 ** min(attempt, 64))
    found = backoff_seconds(base, attempt, seed=seed, sample_id=name)
    assert whole / 2 <= found <= whole
    assert found == backoff_seconds(base, attempt, seed=seed, sample_id=name)


def test_the_jitter_spreads_questions_seeds_and_attempts() -> None:
    waits = [backoff_seconds(8.0, 0, seed=0, sample_id=str(number)) for number in range(400)]
    assert 5.8 < sum(waits) / len(waits) < 6.2
    assert len({*waits, backoff_seconds(8.0, 0, seed=1, sample_id="0"), backoff_seconds(4.0, 1, seed=0, sample_id="0")}) == 402


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("7", 7),
        (" 0 ", 0),
        ("soon", 0),
        ("-3", 0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(header: str | None, seconds: float) -> None:
    assert retry_after_seconds(header, now_unix_seconds=100.0) == seconds


@settings(max_examples=30)
@given(st.lists(st.floats(0, 10), min_size=2, max_size=30), st.floats(0.1, 50))
def test_never_more_requests_start_than_allowed_in_any_second(moments: list[float], rate: float) -> None:
    schedule = RequestSchedule(rate)
    starts = [schedule.reserve(now) for now in sorted(moments)]
    assert all(start >= now for start, now in zip(starts, sorted(moments), strict=True))
    assert all(later - earlier >= 1 / rate - 1e-9 for earlier, later in itertools.pairwise(starts))


def test_nothing_starts_before_a_pause_is_over_and_a_shorter_one_does_not_end_it() -> None:
    schedule = RequestSchedule(None)
    assert schedule.reserve(1.0) == 1.0
    schedule.pause(5.0)
    schedule.pause(3.0)
    assert (schedule.reserve(2.0), schedule.reserve(6.0)) == (5.0, 6.0)
