"""Plant a fault in a training run, to see that the build goes red: `python -m regression.faults FAULT train --preset P ...`.

The run is the same program with one thing done to it after a few steps, as its users do by accident:

| fault | what is done | what should fail |
|---|---|---|
| recompile | a global setting that compiled code is guarded by is changed | `test_training_compiles_nothing_after_the_warm_up` |
| fallback | compiled functions are told to run uncompiled | `test_training_never_falls_back_to_uncompiled_code` |
| race | another thread traces with FX; compile policy `none` | `test_training_meets_no_fx_error`, `test_fxprobe_finds_no_error` |

`pytest regression/ --plant FAULT` runs the workload so. Known limit: a torch whose tracing flag is one per thread has no race.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

STEP = 3  # after which the fault is there; a probed run has at least 4
_TRACE_SECONDS = 1.0


def recompile() -> None:
    """Change a setting that guards of every compiled function look at."""
    import torch  # noqa: PLC0415 - `regression` names the faults without it

    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)


def fallback() -> None:
    """Let compiled functions run as plain Python."""
    import torch  # noqa: PLC0415 - see recompile

    torch.compiler.set_stance("force_eager")


def race() -> None:
    """Trace for ever in another thread, as a program does that quantizes or exports beside its training."""
    threading.Thread(target=_trace_for_ever, name="planted-tracer", daemon=True).start()


def _trace_for_ever() -> None:
    import torch  # noqa: PLC0415 - see recompile

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(_TRACE_SECONDS)
            return x + 1

    while True:
        torch.fx.symbolic_trace(Slow())


FAULTS: dict[str, Callable[[], None]] = {"recompile": recompile, "fallback": fallback, "race": race}
FLAGS = {"race": ("--compile.policy", "none")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run dflash with the fault; returns its exit code."""
    fault, *command = sys.argv[1:] if arguments is None else arguments
    if fault not in FAULTS or command[:1] != ["train"]:
        sys.stderr.write(f"usage: python -m regression.faults {'|'.join(FAULTS)} train --preset P ...\n")
        return 2
    from dflash import events  # noqa: PLC0415 - see recompile
    from dflash.__main__ import main as dflash  # noqa: PLC0415

    def after_step(event: events.Event) -> None:
        if event.name == "step" and event.fields["step"] == STEP:
            events.record("notice", text=f"planted after step {STEP}: {fault}")
            FAULTS[fault]()

    with events.subscribed(after_step):
        return dflash([*command, *FLAGS.get(fault, ())])


if __name__ == "__main__":
    sys.exit(main())
