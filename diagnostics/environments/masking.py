"""Take secrets out of text before it is kept or printed: credentials in URLs, tokens, passwords in command lines.

A text is masked rather than kept when in doubt: a long word of mixed characters is taken for a token. The home folder becomes
`~`, so that no user is named. Known limit: a short or plain password under an innocent name cannot be told from a word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

MASK = "***"

_WORD = r"(?:token(?!iz|s)|secret|passwd|password|passphrase|credential|api[_-]?key|access[_-]?key|auth(?!or)|cookie|signature)"
# Every repetition that may be tried at each place of a text has an end: a variable can hold 128 KiB without a space.
_REST = r"[\w-]{0,64}"
_SECRET_NAME = re.compile(rf"{_WORD}|(?:^|[_-])(?:key|pass|pw|pwd|pat|sas|creds?)$", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)
_URL_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s@'\"]{1,2048}@|[^\s@'\"]{1,2048}@(?=[\w-]+(?:\.[\w-]+)+[/:]))")  # / is in some
_SCP_CREDENTIALS = re.compile(
    r"(?<![\w./:@+-])[\w.+-]{1,64}:(?!//)[^\s@'\"]{1,256}@(?=[\w-][\w.-]{0,253}:)"
)  # user:password@host:path
_BEARER = re.compile(r"\b(bearer|basic)\s+[^\s'\"]+", re.IGNORECASE)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s&;,'\"]+)"
_ASSIGNED = re.compile(rf"({_WORD}{_REST}['\"]?\s{{0,8}}[=:]\s*){_VALUE}", re.IGNORECASE)
_OPTION = re.compile(rf"(?<!\S)(--?{_REST}{_WORD}{_REST}\s+)(?!-){_VALUE}", re.IGNORECASE)
_KNOWN_PREFIX = re.compile(
    r"\b(?:(?:hf_|gh[pousr]_|github_pat_|npm_|dckr_pat_|wandb_v1_)\w{16,}|(?:glpat-|sk-|xox[abeprs]-|pypi-AgE|nvapi-)[\w-]{16,}|"
    r"(?:AKIA|ASIA|AIza)[\w-]{12,}|eyJ[\w.-]{16,})"
)
_HEXADECIMAL = re.compile(r"(?<![\w/])[0-9a-fA-F]{32,}(?!\w)")
_PATH_OR_GPU = r"(?!(?:/[^/\s]*){3}|(?:GPU|MIG)-)"
_MIXED = re.compile(
    rf"(?<![A-Za-z0-9_\-/+.]){_PATH_OR_GPU}(?=\S{{0,200}}[0-9])(?=\S{{0,200}}[a-z])(?=\S{{0,200}}[A-Z])"
    r"(?:[A-Za-z0-9_\-]{24,}|[A-Za-z0-9/+]{40,}={0,2})(?![A-Za-z0-9_\-/+.])"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def masked(text: str) -> str:
    """`text` with `***` in the place of everything that looks like a secret, and `~` in that of the home folder."""
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _URL_CREDENTIALS.sub(f"{MASK}@", text)
    text = _SCP_CREDENTIALS.sub(f"{MASK}@", text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    text = _OPTION.sub(rf"\g<1>{MASK}", text)
    for pattern in (_KNOWN_PREFIX, _HEXADECIMAL, _MIXED):
        text = pattern.sub(MASK, text)
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=[/:\s'\"]|$)", "~", text) if len(home) > 1 else text


def masked_variable(name: str, value: str) -> str:
    """The value of an environment variable as it may be shown."""
    return MASK if is_secret_name(name) else masked(value)


def masked_command(arguments: Sequence[str]) -> str:
    """A command line in one string as it may be shown."""
    return masked(shlex.join(arguments))
