"""Subscribers: events.jsonl always, a console line and progress bar on stderr, wandb; and the verdict on supply and demand."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash import events
from dflash.config import ConfigError, RunConfig, to_dict
from dflash.engine.loops import WorkerTimes

IMBALANCE = 0.15  # part of its time that a side may wait before the verdict names it


@contextlib.contextmanager
def listening(config: RunConfig, *, first_step: int) -> Iterator[None]:
    """Subscribe everything that `config` asks for, for the length of the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_jsonl(config.output / "events.jsonl"))
        stack.enter_context(_wandb(config))
        stack.enter_context(_console(config, first_step=first_step))
        yield


@contextlib.contextmanager
def _jsonl(path: Path) -> Iterator[None]:
    lock = threading.Lock()
    with path.open("a", encoding="utf-8") as file:

        def write(event: events.Event) -> None:
            values = {key: value for key, value in vars(event).items() if value not in (None, {})}
            line = json.dumps(events.finite(values)) + "\n"
            with lock:
                file.write(line)
                file.flush()

        with events.subscribed(write):
            yield


@contextlib.contextmanager
def _console(config: RunConfig, *, first_step: int) -> Iterator[None]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=config.optim.steps, completed=first_step)

        def show(event: events.Event) -> None:
            if event.name == "step":
                values = event.fields
                progress.update(task, completed=values["step"])
                if values["step"] % config.telemetry.log_every_steps == 0 or values["step"] == config.optim.steps:
                    progress.console.print(_step_line(values), highlight=False, soft_wrap=True)
            elif event.name == "phase":
                progress.update(task, description=event.fields["text"])
                if not console.is_terminal:
                    progress.console.print(event.fields["text"], highlight=False, soft_wrap=True)
            elif event.name == "checkpoint":
                progress.console.print(
                    f"checkpoint {event.fields['directory']} {_metrics(event.fields['metrics'])}", highlight=False
                )
            elif event.name == "acceptance":
                progress.console.print(_acceptance_line(event.fields), highlight=False, soft_wrap=True)
            elif event.name == "waits" and event.fields["waited_for"]:
                progress.console.print(_waits_line(event.fields), highlight=False, soft_wrap=True)
            elif event.name == "notice":
                progress.console.print(event.fields["text"], highlight=False, soft_wrap=True)

        with events.subscribed(show):
            yield


def _step_line(values: dict[str, Any]) -> str:
    return (
        f"step {values['step']:>6}  loss {values['loss']:.4f}  acceptance {values['teacher_forced_acceptance']:.2f}  "
        f"grad {values['gradient_norm']:.2f}  lr {values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tok/s  "
        f"queue {values['queue_occupancy']:.0%}"
    )


def _acceptance_line(values: dict[str, Any]) -> str:
    """The figures of `dflash.live_acceptance`."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    if values["kind"] == "decode":
        decoded, expected = number(values["tau"]), number(values["foretold"])
        return f"step {values['step']:>6}  decoded acceptance length: {decoded}, foretold {expected}"
    trees = "".join(f", tree of {budget} {number(tau)}" for budget, tau in values["trees"].items())
    return f"step {values['step']:>6}  foretold acceptance length: chain {number(values['chain'])}{trees}"


def _waits_line(values: dict[str, Any]) -> str:
    """The figures of `dflash.engine.waits`."""
    waiting = dict(values["waiting"])
    own = waiting.pop(values["waited_for"])
    others = ", ".join(f"{worker} {share:.0%}" for worker, share in waiting.items())
    return f"step {values['step']:>6}  all wait for {values['waited_for']}, which waits {own:.0%} of its time; {others}"


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


@contextlib.contextmanager
def _wandb(config: RunConfig) -> Iterator[None]:
    mode = config.telemetry.wandb
    if mode == "auto":
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    if mode == "off":
        yield
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "telemetry.wandb asks for wandb, which is not installed: pip install wandb, or use --telemetry.wandb off"
        )
    import wandb  # noqa: PLC0415 - takes a second to import, and only where it is wanted

    settings = wandb.Settings(silent=True, console="off")
    run = wandb.init(project="dflash-harness", dir=str(config.output), mode=mode, config=to_dict(config), settings=settings)

    def log(event: events.Event) -> None:
        if event.name == "step":
            numbers = {key: value for key, value in event.fields.items() if isinstance(value, int | float)}
            run.log(numbers, step=event.fields["step"])
        elif event.name == "acceptance":
            run.log(_flat(event.fields), step=event.fields["step"])
        elif event.name == "checkpoint":
            run.log({f"validation/{key}": value for key, value in event.fields["metrics"].items()}, step=event.fields["step"])

    try:
        with events.subscribed(log):
            yield
    finally:
        run.finish()


def _flat(values: dict[str, Any]) -> dict[str, float]:
    trees = {f"tree_{budget}": tau for budget, tau in values.get("trees", {}).items()}
    numbers = {**values, **trees}
    return {f"acceptance/{values['kind']}/{k}": v for k, v in numbers.items() if isinstance(v, int | float) and k != "step"}


def verdict(times: Sequence[WorkerTimes]) -> str:
    """Which side of the queue waits for the other, and what to do about it."""
    targets = [t for t in times if t.worker.startswith("target")]
    drafters = [t for t in times if t.worker.startswith("drafter")]
    target_wait, drafter_wait = wait_fraction(targets), wait_fraction(drafters)
    if not targets:
        advice = ": use a faster disk" if drafter_wait > IMBALANCE else ""
        return f"drafters wait {drafter_wait:.0%} of their time for features{advice}"
    if drafter_wait > IMBALANCE and drafter_wait >= target_wait:
        return f"drafters wait {drafter_wait:.0%} of their time for the targets: add a target"
    if target_wait > IMBALANCE:
        return f"targets wait {target_wait:.0%} of their time for the drafters: add a drafter"
    return f"balanced: targets wait {target_wait:.0%}, drafters wait {drafter_wait:.0%}"


def wait_fraction(times: Sequence[WorkerTimes]) -> float:
    """Part of the time between optimizer steps that the workers stood still at the queue."""
    total = sum(t.busy_seconds + t.wait_seconds for t in times)
    return sum(t.wait_seconds for t in times) / total if total else 0.0
