"""One stress scenario in this process, under the probes; prints its counts as JSON on the last line of standard output.

`protected` is what a trainer does: one thread compiles everything, forward and backward, then recompiles are forbidden
(stance fail_on_recompile, which also avoids F19) and N threads only call. It must be clean. `unprotected` mixes traces, first
compiles and calls in all threads: it shows what this torch does without protection.
The seed decides what each thread does, not when: a replay repeats the actions, and the machine chooses the interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from diagnostics.catalogue import match
from diagnostics.findings import conclude
from diagnostics.observe import observed

KINDS = ("protected", "unprotected")
_SWITCH_INTERVAL_SECONDS = 1e-5
_MAX_EXAMPLES = 3

Action = Callable[[random.Random], bool]  # True: the result is right


@dataclass
class Tally:
    """What all threads did; each adds to it under the lock."""

    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by failure of the catalogue, or by exception
    wrong: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, *, right: bool | None, error: Exception | None) -> None:
        """One action: its result was right, wrong, or it raised."""
        with self.lock:
            self.actions[name] += 1
            if error is not None:
                kind = match(str(error)) or type(error).__name__
                self.errors[kind] += 1
                if len(self.examples) < _MAX_EXAMPLES:
                    self.examples.setdefault(kind, "".join(traceback.format_exception(error)[-3:]))
            elif not right:
                self.wrong[name] += 1


class Workload:
    """Small functions and modules with known results; built and compiled in the calling thread."""

    def __init__(self) -> None:
        self._x = torch.linspace(-1.0, 1.0, 8)
        self._module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self._compiled = [
            torch.compile(function, backend=backend) for function, backend in ((_poly, "eager"), (_wave, "aot_eager"))
        ]
        self._model = torch.compile(self._module, backend="aot_eager", fullgraph=True)
        self._expected = [_poly(self._x), _wave(self._x)]
        with torch.no_grad():
            self._output = self._module(self._x)
        for _ in range(2):
            self.call(random.Random(0))
            self.call_model(random.Random(0))

    def call(self, _choice: random.Random) -> bool:
        """Call both compiled functions."""
        results = [compiled(self._x) for compiled in self._compiled]
        return all(_close(result, expected) for result, expected in zip(results, self._expected, strict=True))

    def call_model(self, _choice: random.Random) -> bool:
        """Forward and backward of a compiled module. Its gradients are of this call only, because threads share the module."""
        output = self._model(self._x)
        gradients = torch.autograd.grad(output.sum(), list(self._module.parameters()))
        return _close(output, self._output) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def call_module(self, _choice: random.Random) -> bool:
        """Call the module as it is."""
        return _close(self._module(self._x), self._output)

    def first_compile(self, choice: random.Random) -> bool:
        """Compile a new function and call it."""
        factor = choice.random()

        def function(x: Tensor) -> Tensor:
            return x.sin() * factor

        return _close(torch.compile(function, backend="aot_eager")(self._x), function(self._x))

    def trace_with_make_fx(self, _choice: random.Random) -> bool:
        """Trace a function of two operations."""
        graph = make_fx(lambda x: torch.sin(x) + 1)(self._x)
        return len([node for node in graph.graph.nodes if node.op == "call_function"]) == 2

    def trace_symbolically(self, _choice: random.Random) -> bool:
        """Trace a module of three."""
        graph = torch.fx.symbolic_trace(self._module)
        return len([node for node in graph.graph.nodes if node.op == "call_module"]) == 3

    def actions(self, kind: str) -> dict[str, Action]:
        """What the threads choose from."""
        safe: dict[str, Action] = {
            "compiled call": self.call,
            "compiled forward and backward": self.call_model,
            "module call": self.call_module,
        }
        if kind == "protected":
            return safe
        return {
            **safe,
            "first compile": self.first_compile,
            "make_fx": self.trace_with_make_fx,
            "symbolic_trace": self.trace_symbolically,
        }


def run(kind: str, *, seconds: float, threads: int, seed: int) -> dict[str, Any]:
    """Run one scenario for `seconds`; returns its counts as JSON values."""
    tally, barrier = Tally(), threading.Barrier(threads)
    with observed() as log:
        workload = Workload()
        compiles_before = _compiles(log.observations())

        def work(index: int) -> None:
            choice = random.Random(f"{seed}-{index}")
            actions = list(workload.actions(kind).items())
            barrier.wait()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                name, action = choice.choice(actions)
                try:
                    tally.add(name, right=action(choice), error=None)
                except Exception as error:  # noqa: BLE001 - counting what fails is the purpose
                    tally.add(name, right=None, error=error)

        workers = [threading.Thread(target=work, args=(index,), name=f"stress-{index}") for index in range(threads)]
        interval = sys.getswitchinterval()
        stance = torch.compiler.set_stance("fail_on_recompile") if kind == "protected" else contextlib.nullcontext()
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        try:
            with stance:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
        finally:
            sys.setswitchinterval(interval)
    observations = log.observations()
    return {
        "kind": kind,
        "torch": torch.__version__,
        "actions": dict(tally.actions),
        "errors": dict(tally.errors),
        "wrong_results": dict(tally.wrong),
        "examples": tally.examples,
        "compiles_by_threads": _compiles(observations) - compiles_before,
        "findings": [finding.to_dict() for finding in conclude(observations)],
        "not_observed": [seen.name for seen in observations if seen.kind == "not_observed"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one scenario and print its counts."""
    parser = argparse.ArgumentParser(prog="python -m diagnostics.stress.runner", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)
    result = run(options.kind, seconds=options.seconds, threads=options.threads, seed=options.seed)
    print(json.dumps(result), flush=True)  # noqa: T201 - the command's result
    return 0


def _poly(x: Tensor) -> Tensor:
    return x * x * 3 + x - 1


def _wave(x: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(x * 2)


def _close(found: Any, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and torch.allclose(found, expected, atol=1e-5)


def _compiles(observations: Sequence[Any]) -> int:
    return sum(seen.count for seen in observations if seen.kind == "compile")


if __name__ == "__main__":
    sys.exit(main())
