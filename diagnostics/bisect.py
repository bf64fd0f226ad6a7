"""Which package or which commit made it worse.

    python -m diagnostics.bisect --good COMMIT --bad COMMIT -- COMMAND
    python -m diagnostics.bisect --good-env good.txt --bad-env bad.txt --metric 'tokens/s: ([0-9.]+)' -- COMMAND

COMMAND fails (exit code) or, with --metric, prints a number. The ends are two commits, two files of exact versions (as `pip
freeze` writes), or both. Commits run in git worktrees, packages in virtual environments that are kept in the cache; the user's
checkout and Python are not touched. Packages are narrowed by delta debugging, commits as git bisect does. Noisy numbers are
repeated beside both ends until Welch's test decides, or are called undecided (`bisection.decisions` says how). Everything
tried is on disk at once: the same command, started again after a kill, goes on where it was; after the end it prints the same
from the journal.

Exit codes: 0 the culprit is named · 2 bad input, also when the ends are not good and bad as claimed, which is seen first ·
3 not decided: what is left is listed, or something outside (network, disk) failed.

Exit code 125 of COMMAND means "skip this state", as for git bisect run; with --metric so does every run that prints no number
or fails. Known limits: one culprit is looked for (several packages
that only together make it bad are found); COMMAND runs without the submodules and the ignored files of the checkout; packages
that are not in the files are those that their requirements bring; environments stay in the cache until it is deleted.
"""

from __future__ import annotations

from diagnostics import interrupts

# isort: split
import argparse
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.markup import escape

from dflash.standard_output import outlive_reader
from diagnostics.bisection import pins, shown
from diagnostics.bisection.commits import Repository, Worktrees
from diagnostics.bisection.decisions import ByExitCode, ByFigure, Judge
from diagnostics.bisection.logbook import Logbook
from diagnostics.bisection.outcomes import BadInput, NotObserved
from diagnostics.bisection.search import Conclusion, Question, Search, to_dict
from diagnostics.bisection.trials import Command
from diagnostics.bisection.venvs import Environments, chosen_installer
from diagnostics.environments.masking import masked, masked_command
from diagnostics.output import ended_plainly, number, output_file, printable, say, write_text
from diagnostics.terminal import ReportConsole, print_table

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-harness"


def main(arguments: Sequence[str] | None = None) -> int:
    """Bisect, print, and return the exit code."""
    options = _options(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the command that runs, as Ctrl-C does
    try:
        return _bisect(options)
    except BadInput as error:
        say(f"bisect: {error}")
        return 2
    except NotObserved as error:
        say(f"bisect: not observed: {error}. The same command goes on from here")
        return 3
    except OSError as error:  # a full disk, mostly: what is in the journal stays
        say(f"bisect: not observed: {error}. The same command goes on from here")
        return 3
    except KeyboardInterrupt:
        say("bisect: interrupted: the same command goes on from here")
        return interrupts.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _bisect(options: argparse.Namespace) -> int:
    cache, directory = options.cache.expanduser().absolute(), Path.cwd()
    environments = _environments(options, cache) if options.good_env else None
    repository = Repository(directory) if options.good else None
    question, command = _question(options, repository), _command(options)
    identity = _identity(options, question, environments, directory)
    folder = cache / "bisections" / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    with ExitStack() as stack:
        logbook = stack.enter_context(Logbook(folder, {"asked": _masked(identity)}, fresh=options.fresh))
        for note in logbook.notes:
            say(f"bisect: {note}")
        say(f"bisect: journal {logbook.path}" + (f", {len(logbook.trials)} trials are done" if logbook.trials else ""))
        search = Search(
            question=question,
            command=command,
            judge=_judge(options),
            logbook=logbook,
            directory=directory,
            cache=cache,
            environments=environments,
            worktrees=stack.enter_context(Worktrees(repository, folder / "worktrees")) if repository is not None else None,
            tell=lambda text: say(f"bisect: {text}"),
        )
        conclusion = search.run()
    return _report(options, conclusion, search)


def _report(options: argparse.Namespace, conclusion: Conclusion, search: Search) -> int:
    code = 0 if conclusion.is_decided else 3
    console = ReportConsole()
    print_table(console, shown.trials_table(search, higher_is_better=not options.lower_is_better))
    if search.num_unbuildable:
        console.print(f"[yellow]{search.num_unbuildable} combinations of packages could not be built[/]", highlight=False)
    for sentence in shown.sentences(conclusion):
        console.print(escape(sentence), style="bold", highlight=False)
    if options.json is not None:
        try:
            write_text(options.json, json.dumps(to_dict(conclusion, search, code), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"cannot write {options.json}: {error}") from error
    return code


def _question(options: argparse.Namespace, repository: Repository | None) -> Question:
    """The ends, checked as far as that is possible without running anything."""
    good = pins.read(options.good_env) if options.good_env else None
    bad = pins.read(options.bad_env) if options.bad_env else None
    if good is not None and good == bad:
        raise BadInput(f"{options.good_env} and {options.bad_env} pin the same versions: there is nothing to bisect in them")
    if repository is None:
        return Question(good_commit=None, bad_commit=None, good_pins=good, bad_pins=bad)
    commits = [repository.full(commit) for commit in (options.good, options.bad)]
    repository.check_order(*commits)
    return Question(good_commit=commits[0], bad_commit=commits[1], good_pins=good, bad_pins=bad)


def _environments(options: argparse.Namespace, cache: Path) -> Environments:
    return Environments(
        folder=cache / "environments",
        python=options.python,
        options=tuple(options.pip_option),
        installer=chosen_installer(options.installer),
    )


def _command(options: argparse.Namespace) -> Command:
    try:
        metric = None if options.metric is None else re.compile(options.metric, re.MULTILINE)
    except re.error as error:
        raise BadInput(f"--metric {options.metric!r} is no regular expression: {error}") from error
    return Command(arguments=tuple(options.command), metric=metric, timeout_seconds=options.timeout)


def _judge(options: argparse.Namespace) -> Judge:
    if options.metric is None:
        return ByExitCode(repeats=options.repeat or 1, max_repeats=options.max_repeat or 20, error_rate=options.error_rate)
    repeats = max(2, options.repeat or 3)  # a variance needs two
    return ByFigure(
        higher_is_better=not options.lower_is_better,
        repeats=repeats,
        max_repeats=max(repeats, options.max_repeat or 10),
        error_rate=options.error_rate,
    )


def _identity(
    options: argparse.Namespace, question: Question, environments: Environments | None, directory: Path
) -> dict[str, Any]:
    """What decides every trial: with another identity it is another question."""
    return {
        **vars(question),
        "command": options.command,
        "directory": str(directory),
        "metric": options.metric,
        "lower_is_better": options.lower_is_better,
        "limits": [options.repeat, options.max_repeat, options.error_rate, options.timeout],
        "environments": environments.key(()) if environments is not None else None,
    }


def _masked(identity: dict[str, Any]) -> dict[str, Any]:
    """As it may lie on disk; what was masked is told apart by the folder's name, a hash of everything."""
    known = {name: {key: masked(pin) for key, pin in (identity[name] or {}).items()} for name in ("good_pins", "bad_pins")}
    return {**identity, **known, "command": masked_command(identity["command"])}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(
        prog="python -m diagnostics.bisect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND",
    )  # fmt: skip
    parser.add_argument("--good", metavar="COMMIT", help="a commit that works, an ancestor of --bad")
    parser.add_argument("--bad", metavar="COMMIT", help="a commit that does not")
    parser.add_argument("--good-env", type=Path, metavar="FILE", help="exact versions that work (pip freeze)")
    parser.add_argument("--bad-env", type=Path, metavar="FILE", help="exact versions that do not")
    parser.add_argument("--metric", metavar="REGEX", help="the number in the output: the last match's first group")
    parser.add_argument("--lower-is-better", action="store_true", help="of --metric (default: higher is better)")
    parser.add_argument("--repeat", type=_positive, metavar="N", help="least runs of a state (1; 3 with --metric)")
    parser.add_argument("--max-repeat", type=_positive, metavar="N", help="most runs of a state (20; 10 with --metric)")
    parser.add_argument("--error-rate", type=_rate, default=0.01, metavar="P", help="of one decision about a state (0.01)")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="a run that takes longer has failed")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="what environments are made of (this one)")
    parser.add_argument("--installer", choices=("auto", "uv", "pip"), default="auto", help="auto: uv where it is installed")
    parser.add_argument(
        "--pip-option", action="append", default=[], metavar="OPTION", help="for the installer, as --pip-option=--no-index"
    )
    parser.add_argument("--cache", type=Path, default=_CACHE, metavar="DIR", help="of journals and environments (the user's)")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything")
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    options.command = command
    if not command:
        parser.error("no command: put it after --")
    for one, other in (("good", "bad"), ("good_env", "bad_env")):
        if bool(getattr(options, one)) != bool(getattr(options, other)):
            parser.error(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} go together")
    if not options.good and not options.good_env:
        parser.error("name two commits (--good, --bad), two environments (--good-env, --bad-env), or both")
    if options.lower_is_better and options.metric is None:
        parser.error("--lower-is-better is about --metric")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(printable(f"{text}: use a whole number from 1 on"))
    return int(text)


def _seconds(text: str) -> float:
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(printable(f"{text}: use a positive number of seconds"))
    return value


def _rate(text: str) -> float:
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(printable(f"{text}: use a number between 0 and 1"))
    return value


if __name__ == "__main__":
    outlive_reader()
    sys.exit(ended_plainly("bisect", main))
