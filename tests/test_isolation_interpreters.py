"""Laws of sub-interpreters: isolation is refused there, before torch is imported, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARES_THE_LOCK = "legacy"  # as web servers make them; extension modules of one interpreter can be imported there

MAKE = """
try:
    import _interpreters as interpreters  # Python 3.13 and later
    made = interpreters.create({config!r})
except ImportError:
    import _xxsubinterpreters as interpreters
    made = interpreters.create(isolated={config!r} == "isolated")
failed = interpreters.run_string(made, {code!r})
assert failed is None, failed
"""


def in_sub_interpreter(config: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a sub-interpreter of a process of its own."""
    program = MAKE.format(config=config, code=f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(code)}")
    return subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=False, timeout=120, env={"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize("config", ["isolated", SHARES_THE_LOCK])
@pytest.mark.parametrize("name", ["isolate", "limits"])
def test_asking_for_isolation_is_refused_before_torch_is_imported(config: str, name: str) -> None:
    done = in_sub_interpreter(
        config,
        f"""
        import dflash.fx
        try:
            dflash.fx.{name}
        except dflash.fx.IsolationError as error:
            print("refused:", error, "torch" in sys.modules, flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: this is a sub-interpreter")
    assert done.stdout.rstrip().endswith("nothing was changed False")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="import torch never returns in a sub-interpreter of Python 3.11")
def test_where_torch_can_be_imported_isolation_is_refused_all_the_same() -> None:
    done = in_sub_interpreter(
        SHARES_THE_LOCK,
        """
        import warnings
        warnings.simplefilter("ignore")  # NumPy warns of sub-interpreters
        from dflash.fx import isolation
        try:
            isolation.isolate()
        except isolation.IsolationError as error:
            print("refused:", error, isolation.is_isolated(), flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: this is a sub-interpreter")
    assert done.stdout.rstrip().endswith("False")


def test_the_main_interpreter_is_not_taken_for_another() -> None:
    code = "from dflash.fx.interpreters import refuse_sub_interpreter; refuse_sub_interpreter()"
    assert subprocess.run((sys.executable, "-c", code), cwd=ROOT, check=False).returncode == 0
