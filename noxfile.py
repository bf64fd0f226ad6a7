"""The front door: `nox -s demo`, `nox -s case_study`, `nox -s tests`, `nox -s lint types`, `nox -s stress`, `nox -s nightly`.

All sessions share one environment (the session `environment`), because each copy holds its own torch. What follows `--` goes
to the command of the session: `nox -s tests -- tests/test_masks.py`. `nox --no-venv` uses the packages of the Python that
runs nox, for machines whose torch was installed by somebody else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

_python = sys.executable  # of the environment; set by the session `environment`, which all others require


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Install the project, pinned by constraints.txt."""
    global _python
    if isinstance(session.virtualenv, PassthroughEnv):
        session.log(f"no environment of our own: using the packages of {_python}")
        return
    session.install("-c", "constraints.txt", "-e", ".[test,lint]")
    _python = str(Path(session.virtualenv.bin) / "python")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def demo(session: nox.Session) -> None:
    """Train a drafter on two CPU cores and speculate with it, end to end."""
    _run(session, "-m", "fixtures.demo", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def case_study(session: nox.Session) -> None:
    """Replay the incident that this project exists for, step by step, each under fxprobe."""
    _run(session, "-m", "fixtures.case_study", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Prove the laws."""
    by_file = ("--dist", "loadfile", "--no-loadscope-reorder")  # what a file's tests share is made once
    _run(session, "-m", "pytest", "-n", "2", *by_file, *session.posargs)  # most tests wait for child processes


@nox.session(venv_backend="none", requires=["environment"])
def lint(session: nox.Session) -> None:
    """Check style and format."""
    _run(session, "-m", "ruff", "check", ".")
    _run(session, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["environment"])
def types(session: nox.Session) -> None:
    """Check types."""
    _run(session, "-m", "mypy")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def stress(session: nox.Session) -> None:
    """Calls from many threads after a warm-up in one: must be clean. Beside it, what this torch does unprotected."""
    _run(session, "-m", "diagnostics.stress", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def upstream(session: nox.Session) -> None:
    """Run PyTorch's own tests without and with thread isolation: `-- PATH_TO_PYTORCH_SOURCE [pytest arguments]`."""
    _run(session, "-m", "fixtures.upstream", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def regression(session: nox.Session) -> None:
    """Train in a fresh process and fail on FX errors, recompiles and fallbacks; `-- --gpus N` for GPUs."""
    _run(session, "-m", "pytest", "regression/", "--gpus", "0", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def nightly(session: nox.Session) -> None:
    """Measure, decide by the history, write the report: `-- --output DIR [--gpus N]`."""
    _run(session, "-m", "regression.nightly", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def headline(session: nox.Session) -> None:
    """The whole claim on one machine, command by command: `-- --output DIR --gpus 8`."""
    _run(session, "-m", "regression.headline", *session.posargs)


@nox.session(requires=["environment"], default=False)
def otava(session: nox.Session) -> None:
    """Compare change points with those of Apache Otava, in an environment of its own: it pins an old numpy."""
    if isinstance(session.virtualenv, PassthroughEnv):
        session.error("Apache Otava needs an environment of its own: run without --no-venv")
    session.install("apache-otava==0.8.0")
    _run(session, "-m", "regression.otava_agreement", "--otava", str(Path(session.bin) / "otava"), *session.posargs)


@nox.session(requires=["environment"], default=False)
def interop(session: nox.Session) -> None:
    """Compare drafters with what z-lab's code, speculators and SpecForge make of them, in an environment that holds them."""
    if isinstance(session.virtualenv, PassthroughEnv):
        session.error("z-lab's dflash needs an environment of its own: run without --no-venv")
    session.install("dflash[local]==0.1.0", "speculators==0.9.0")
    session.install(
        "--no-deps", "specforge==0.2.0"
    )  # its own dependencies bring SGLang; the drafter needs torch and transformers
    # Not used here, but transformers imports them if they are there, and they fail beside another build of torch.
    session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", "torchvision", "torchaudio")
    _run(session, "-m", "fixtures.interop", "--python", str(Path(session.bin) / "python"), *session.posargs)


def _run(session: nox.Session, *command: str) -> None:
    session.run(_python, *command, external=True)
