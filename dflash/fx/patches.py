"""The patches that torch.fx makes while it traces, led to where threads do not meet: dispatch.py and wrapped.py.

A trace records its patches in a `_Patcher`, which applies, reverts and reapplies them. The classes of these records get other
methods here; that they are looked up on the class each time is checked by the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from dflash.fx import dispatch, wrapped
from dflash.fx.code_swap import UnknownInternals

_ABSENT = object()


class Patches:
    """Attributes of torch.fx that are replaced; in the order in which they are put on."""

    def __init__(self) -> None:
        """Raises UnknownInternals; changes nothing."""
        dispatch.prepare()
        if not isinstance(getattr(_class("_Patcher")(), "visited", None), set):
            raise UnknownInternals("_Patcher of torch.fx does not note what it has visited in a set")
        self._replacements = [(owner, name, make(_own(owner, name))) for owner, name, make in _replacements()]
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put all on."""
        for owner, name, replacement in self._replacements:
            self._originals.append((owner, name, _own(owner, name)))
            setattr(owner, name, replacement)

    def remove(self) -> None:
        """Undo `install`; also after only a part of it was done."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def after_fork(self) -> None:
        """See isolation.py."""
        dispatch.after_fork()
        wrapped.after_fork()


def _replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    method, item = _class("_PatchedFnSetAttr"), _class("_PatchedFnSetItem")
    return [
        (method, "patch", _method_patch),
        (method, "revert", _method_revert),
        (item, "patch", lambda _original: lambda self: wrapped.take(self.frame_dict, self.fn_name)),
        (item, "revert", lambda _original: lambda self: wrapped.drop(self.frame_dict, self.fn_name)),
        (_class("_Patcher"), "patch", _function_patch),
        (_class("Tracer"), "__init__", _tracer_init),
        (symbolic_trace, "_autowrap_check", _autowrap_check),
    ]


def _method_patch(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def patch(self: Any) -> None:
        if _is_dispatched(self):
            dispatch.push(self.fn_name, self.new_fn)
        else:
            original(self)

    return patch


def _method_revert(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def revert(self: Any) -> None:
        if _is_dispatched(self):
            dispatch.drop(self.fn_name, self.new_fn)
        else:
            original(self)

    return revert


def _function_patch(_original: Callable[..., None]) -> Callable[..., None]:
    record_class = _class("_PatchedFnSetItem")

    def patch(
        self: Any,
        frame_dict: dict[str, Any],
        name: str,
        new_fn: Callable[..., Any],
        deduplicate: bool = True,  # noqa: FBT002
    ) -> None:
        del deduplicate  # a trace has one record of a place; places that threads share are counted
        place = (id(frame_dict), name)
        if place not in self.visited:  # which torch clears when it has reverted everything
            self.visited.add(place)
            self.patches_made.append(record_class(frame_dict, name, None, new_fn))
            self.patches_made[-1].patch()

    return patch


def _tracer_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with wrapped.lock:  # or a wrapper could come or go while it is noted
            original(self, *args, **kwargs)
            self._autowrap_function_ids = wrapped.bare_ids(self._autowrap_function_ids)

    return init


def _autowrap_check(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def check(patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
        if not patcher.visit_once(frame_dict):
            return
        for name, value in frame_dict.copy().items():  # another thread may add to it meanwhile
            if not name.startswith("_") and callable(value):
                function = wrapped.bare(value)
                if id(function) in function_ids:
                    patcher.patch(frame_dict, name, function)

    return check


def _is_dispatched(record: Any) -> bool:
    return record.frame_dict is torch.nn.Module and record.fn_name in dispatch.METHODS


def _class(name: str) -> Any:
    found = getattr(symbolic_trace, name, None)
    if not isinstance(found, type):
        raise UnknownInternals(f"torch.fx._symbolic_trace has no class {name}")
    return found


def _own(owner: Any, name: str) -> Any:
    value = vars(owner).get(name, _ABSENT)
    if value is _ABSENT:
        raise UnknownInternals(f"{getattr(owner, '__qualname__', owner.__name__)} of torch.fx has no {name}")
    return value
