"""Find the order in which two threads fail, shorten it, replay it: `python -m diagnostics.stress.schedule SCENARIO`.

The threads of a scenario (races.py) run one at a time and stop at the park points (parkpoints.py); a strategy decides who
goes on. The first failing schedule is made shorter while the same failures stay, and the command that replays it is printed.
Each try runs in a forked copy of this process, because a failure leaves the process damaged.
Exit codes: 0 no try failed, 1 a failure was found, 2 bad usage, 3 this torch cannot be observed.

Known limits: needs fork (Linux, macOS), and the CPU; only the threads of the scenario are controlled.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.patch import NotObservable
from diagnostics.stress import strategies
from diagnostics.stress.attempts import Attempt, Attempts
from diagnostics.stress.races import RACES
from diagnostics.stress.scheduler import Choose

_MAX_SHRINK_TRIES = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, shorten and print; or replay."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    race = RACES[options.scenario]()
    try:
        attempts = Attempts(race)
        if options.strategy == "explicit":
            return _replay(console, options, attempts)
        found = _search(console, options, attempts, threads=len(race.bodies))
    except NotObservable as reason:
        console.print(f"[yellow]not observed[/]: {escape(str(reason))}", highlight=False)
        return 3
    if found is None:
        console.print(f"no failure of {options.scenario} in {attempts.count} tries", highlight=False)
        return 0
    _print_attempt(console, f"try {attempts.count} failed", found)
    minimal = shrink(attempts, found)
    if minimal != found:
        _print_attempt(console, "shortened", minimal)
    command = ["python", "-m", "diagnostics.stress.schedule", options.scenario, "--strategy", "explicit"]
    command += ["--schedule", minimal.asked]
    console.print(f"replay: {shlex.join(command)}", highlight=False, soft_wrap=True, markup=False)
    return 1


def shrink(attempts: Attempts, failed: Attempt) -> Attempt:
    """A schedule with the same failures from which no letter, nor half of its letters, can be left out."""
    best = failed
    tries = 0
    size = max(len(best.asked) // 2, 1)
    while size and tries < _MAX_SHRINK_TRIES:
        start = 0
        while start < len(best.asked) and tries < _MAX_SHRINK_TRIES:
            shorter = best.asked[:start] + best.asked[start + size :]
            tried = attempts.run(strategies.Explicit(shorter), asked=shorter)
            tries += 1
            if tried.failures == best.failures:
                best = tried
            else:
                start += size
        size //= 2
    return best


def _search(console: Console, options: argparse.Namespace, attempts: Attempts, *, threads: int) -> Attempt | None:
    if options.strategy == "hypothesis":
        return _search_by_hypothesis(options, attempts, threads=threads)
    for choose in _strategies(console, options, attempts, threads=threads):
        tried = attempts.run(choose)
        if tried.failures:
            # The choices made are a schedule; it has to fail again before it is worth shortening.
            again = attempts.run(strategies.Explicit(tried.made), asked=tried.made)
            if again.failures == tried.failures:
                return again
            console.print(f"{tried.made} failed with {tried.failures}, its replay with {again.failures}", highlight=False)
    return None


def _strategies(console: Console, options: argparse.Namespace, attempts: Attempts, *, threads: int) -> Iterator[Choose]:
    if options.strategy == "random":
        for number in range(options.tries):
            yield strategies.Random(f"{options.seed}-{number}")
        return
    steps = len(attempts.run(strategies.Explicit("")).made)
    bound = strategies.pct_bound(threads=threads, steps=steps, depth=options.depth)
    known = f"{threads} threads, {steps} steps, depth {options.depth}"
    console.print(f"PCT: {known}: one try finds such a failure with a probability of at least {bound:.4f}", highlight=False)
    for number in range(options.tries):
        yield strategies.PCT(f"{options.seed}-{number}", threads=threads, steps=steps, depth=options.depth)


def _search_by_hypothesis(options: argparse.Namespace, attempts: Attempts, *, threads: int) -> Attempt | None:
    import hypothesis  # noqa: PLC0415 - of the extra `test`, needed for this strategy alone

    failing: dict[str, Attempt] = {}
    first: list[tuple[str, ...]] = []

    def fails(schedule: str) -> bool:
        tried = attempts.run(strategies.Explicit(schedule), asked=schedule)
        if tried.failures and tried.failures == (first or [tried.failures])[0]:
            first[:] = [tried.failures]
            failing[schedule] = tried
        return schedule in failing

    steps = len(attempts.run(strategies.Explicit("")).made)
    settings = hypothesis.settings(
        max_examples=options.tries, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    try:
        drawn = hypothesis.find(
            strategies.schedules(threads, max_steps=steps), fails, settings=settings, random=random.Random(options.seed)
        )
    except hypothesis.errors.NoSuchExample:
        return None
    return failing[drawn]


def _replay(console: Console, options: argparse.Namespace, attempts: Attempts) -> int:
    outcomes: Counter[str] = Counter()
    for _ in range(options.tries):
        choose = strategies.Explicit(options.schedule)
        tried = attempts.run(choose, asked=options.schedule)
        outcomes[", ".join(tried.failures) or "no failure"] += 1
    _print_attempt(console, "the last try", tried)
    for outcome, count in outcomes.most_common():
        console.print(f"{outcome}: {count} of {options.tries}", highlight=False)
    return 0 if set(outcomes) == {"no failure"} else 1


def _print_attempt(console: Console, title: str, attempt: Attempt) -> None:
    console.print(f"{title}: schedule {attempt.asked or '(empty: one thread after the other)'}", highlight=False)
    for letter, place in zip(attempt.made, attempt.places, strict=True):
        console.print(f"    {letter} goes on from: {escape(place)}", highlight=False)
    if attempt.skipped:
        console.print(f"    {attempt.skipped} letters were skipped: their thread had ended, or was blocked", highlight=False)
    for message in attempt.messages:
        console.print(f"    {escape(message)}", highlight=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.stress.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=tuple(RACES), help="named by the failure that some order of its threads gives")
    parser.add_argument(
        "--strategy", choices=("random", "pct", "hypothesis", "explicit"), default="random", help="default random"
    )
    parser.add_argument("--schedule", metavar="STRING", help="for explicit: one letter for each choice, as printed")
    parser.add_argument("--depth", type=int, default=3, help="for pct: orderings that the failure needs: F3 2, F5 3 (default 3)")
    parser.add_argument("--tries", type=int, help="default 200; for explicit 1")
    parser.add_argument("--seed", type=int, default=0, help="of random, pct and hypothesis (default 0)")
    options = parser.parse_args(arguments)
    if options.tries is None:
        options.tries = 1 if options.strategy == "explicit" else 200
    if options.tries < 1 or options.depth < 1:
        parser.error("use at least 1 for --tries and --depth")
    if (options.strategy == "explicit") != (options.schedule is not None):
        parser.error("--strategy explicit and --schedule STRING belong together")
    if options.strategy == "hypothesis" and importlib.util.find_spec("hypothesis") is None:
        parser.error("--strategy hypothesis needs the package hypothesis: install it, or use random or pct")
    try:
        strategies.check_schedule(options.schedule or "", threads=2)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
