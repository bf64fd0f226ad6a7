"""Laws of dflash.fx.repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from dflash.fx import seams
from dflash.fx.repair import repair

ROOT = Path(__file__).parent.parent
PROGRAM = """
import math, torch
from dflash.fx import seams
from dflash.fx.repair import repair
from diagnostics.stress import scenarios
try:
    scenarios.SCENARIOS["F6"]()
except Exception:
    pass
compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=True)
assert seams.leaks(seams.tracing_state())
print(repair())
assert not seams.leaks(seams.tracing_state())
compiled(torch.ones(1, 2))
assert not hasattr(math.sqrt, "__wrapped__")
print(repair())
"""


def test_a_poisoned_process_works_again() -> None:
    done = subprocess.run((sys.executable, "-c", PROGRAM), cwd=ROOT, capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert "restored torch.nn.Module.__call__" in first
    assert (done.returncode, second) == (0, "[]"), done.stderr


def test_nothing_is_done_where_nothing_is_wrong() -> None:
    before = (torch.nn.Module.__call__, torch.nn.Module.__getattr__)
    assert repair() == []
    assert before == (torch.nn.Module.__call__, torch.nn.Module.__getattr__)
    assert not seams.leaks(seams.tracing_state())
