"""Where threads of torch stop for the scheduler: the seams at which tracing and compiling share state.

| place | the thread is |
|---|---|
| trace begins, trace ended | before and after `Tracer.trace` |
| trace has its flag | inside, before the arguments are made: the tracing flag is set, `nn.Module` is not patched yet |
| trace records NODE | inside, while `nn.Module` is patched |
| compiled call | before its check of the tracing flag (torch.export asks the same) |
| compile begins, compile ended | around Dynamo's `_compile`, holding its compile lock |
| backward begins, backward ended | around `torch.autograd.backward` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from diagnostics import patch

Park = Callable[[str], None]
_BACKWARD = patch.Hook("torch.autograd", "backward")


@contextlib.contextmanager
def park_points(park: Park, report: patch.Report) -> Iterator[None]:
    """Call `park` with the name of the place at every point inside the block. Raises NotObservable."""
    with (
        patch.TRACE.subscribed(_trace(park, report), report),
        patch.COMPILE.subscribed(_around(park, "compile"), report),
        patch.FLAG_CHECK.subscribed(_before(park, "compiled call"), report),
        _BACKWARD.subscribed(_around(park, "backward"), report),
    ):
        yield


def _trace(park: Park, report: patch.Report) -> patch.Subscriber:
    def begin(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> patch.Finish:
        tracer = arguments[0] if arguments else keywords["self"]
        park("trace begins")
        inside = contextlib.ExitStack()
        inside.enter_context(patch.instance_observed(tracer, "create_args_for_root", _before(park, "trace has its flag"), report))
        inside.enter_context(patch.instance_observed(tracer, "create_node", _node(park), report))

        def end(_result: Any, _error: BaseException | None) -> None:
            inside.close()
            park("trace ended")

        return end

    return begin


def _node(park: Park) -> patch.Subscriber:
    def begin(arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        if arguments and arguments[0] != "placeholder":  # those are made before nn.Module is patched
            park(f"trace records {arguments[0]}")

    return begin


def _before(park: Park, place: str) -> patch.Subscriber:
    return lambda _arguments, _keywords: park(place)


def _around(park: Park, what: str) -> patch.Subscriber:
    def begin(_arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> patch.Finish:
        park(f"{what} begins")
        return lambda _result, _error: park(f"{what} ended")

    return begin
