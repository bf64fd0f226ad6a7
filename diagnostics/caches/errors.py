"""Why a command on a compile cache did nothing. The exit code travels with the sentence."""

from __future__ import annotations


class CacheError(Exception):
    """Bad input: a folder that is missing, a file that is no snapshot. Exit code 2."""

    exit_code = 2


class RefusedError(CacheError):
    """What was asked for was found to be wrong here: a snapshot of another machine, a cache in use. Exit code 1."""

    exit_code = 1


class NotObservedError(CacheError):
    """Something could not be looked at, so nothing was done. Exit code 3."""

    exit_code = 3
