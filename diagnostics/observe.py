"""All probes at once, around a block of code: `with observed() as log: ...`, then `conclude(log.observations())`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dflash.fx import seams
from diagnostics.patch import NotObservable
from diagnostics.probes.compiles import CompilesProbe
from diagnostics.probes.config import ConfigProbe
from diagnostics.probes.exceptions import ExceptionsProbe
from diagnostics.probes.flag import FlagProbe
from diagnostics.probes.modules import ModulesProbe
from diagnostics.probes.probe import Probe
from diagnostics.probes.selector import SelectorProbe
from diagnostics.probes.threads import ThreadsProbe
from diagnostics.probes.tracer import TracerProbe
from diagnostics.probes.uncompiled import UncompiledProbe
from diagnostics.probes.undone import UndoneProbe
from diagnostics.records import Log

PROBES: tuple[type[Probe], ...] = (
    TracerProbe,
    ModulesProbe,
    FlagProbe,
    CompilesProbe,
    UncompiledProbe,
    ConfigProbe,
    SelectorProbe,
    ThreadsProbe,
    UndoneProbe,
    ExceptionsProbe,
)


@contextlib.contextmanager
def observed() -> Iterator[Log]:
    """Attach every probe that this torch allows; the others are noted as not observed."""
    log = Log()
    with contextlib.ExitStack() as stack:
        attach(log, stack)
        yield log


def attach(log: Log, stack: contextlib.ExitStack) -> None:
    """Attach every probe until `stack` closes."""
    for probe in PROBES:
        try:
            stack.enter_context(probe(log).attached())
        except NotObservable as reason:
            log.not_observed(str(reason))
    for sentence in seams.unknown(seams.tracing_state()):
        log.not_observed(sentence)
