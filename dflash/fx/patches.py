"""The patches that torch.fx makes while it traces, led to where threads do not meet: dispatch.py and wrapped.py.

A trace records its patches in a `_Patcher`, which applies, reverts and reapplies them. The classes of these records get other
methods here; that they are looked up on the class each time is checked by the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from dflash.fx import dispatch
from dflash.fx.code_swap import UnknownInternals

_ABSENT = object()


class Patches:
    """Attributes of torch.fx that are replaced; in the order in which they are put on."""

    def __init__(self) -> None:
        """Raises UnknownInternals; changes nothing."""
        dispatch.prepare()
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


def _replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    method_patch = _class("_PatchedFnSetAttr")
    return [(method_patch, "patch", _method_patch), (method_patch, "revert", _method_revert)]


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
