"""Referrers: from an object to the name by which its owner knows it, as far as Python can tell."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

_DEPTH = 5
_OPTIMIZED = 0x1
"""``CO_OPTIMIZED``: a function's frame, whose locals are no dictionary of their own."""


def name_of(things: Sequence[Any], unseen: Sequence[Any]) -> str:
    """The nearest name for one of the things: a variable, or an attribute of an object; empty where nobody holds them.

    Containers are looked through. ``unseen``: containers of the caller's own, which are no holders.
    """
    hidden = {id(one) for one in unseen}
    level: list[Any] = list(things)
    for _ in range(_DEPTH):
        if not level:
            return ""
        name = _variable(level)
        if name:
            return name
        hidden.update((id(level), id(things)))
        above = [one for one in gc.get_referrers(*level) if id(one) not in hidden and not isinstance(one, FrameType)]
        for one in above:
            name = _owner(one, level, hidden)
            if name:
                return name
        hidden.update(map(id, above))
        level = [one for one in above if isinstance(one, (list, tuple, dict, set, CellType))]
    return "a container of containers" if level else ""


def _variable(things: Sequence[Any]) -> str:
    """The local variable of a running function that is one of these."""
    wanted = {id(one) for one in things}
    for frame in _frames():
        found = frame.f_locals
        name = next((name for name, value in found.items() if id(value) in wanted), "")
        where, optimizer = frame.f_code.co_name, found.get("self")
        if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
            found.clear()  # a copy, which would hold all of them as long as the function runs
        if name and isinstance(optimizer, torch.optim.Optimizer):
            return f"the state of {type(optimizer).__name__}"
        if name:
            return f"variable {name}" + ("" if where == "<module>" else f" of {where}()")
    return ""


def _frames() -> Iterator[FrameType]:
    """Of this thread, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("poochplan."):
            yield frame
        frame = frame.f_back


def _owner(holder: Any, held: Sequence[Any], hidden: set[int]) -> str:
    """What the holder is called, with the attribute or the key by which it holds; empty for a plain container."""
    wanted = {id(one) for one in held}
    if isinstance(holder, dict):
        name = next((str(key) for key, value in holder.items() if id(value) in wanted), "")
        if not name:
            return ""
        if "__name__" in holder and "__builtins__" in holder:
            return f"variable {name} of {holder['__name__']}"
        owner = next((x for x in gc.get_referrers(holder) if _has_dict(x, holder) and id(x) not in hidden), None)
        return "" if owner is None else f"{type(owner).__name__}.{name}"
    if isinstance(holder, FunctionType):
        return f"function {holder.__qualname__}"
    if isinstance(holder, (list, tuple, set, CellType, ModuleType, type)) or type(holder).__module__ == "builtins":
        return ""
    attributes = getattr(holder, "__dict__", {})
    name = next((name for name, value in attributes.items() if id(value) in wanted), "")
    return f"{type(holder).__name__}.{name}" if name else type(holder).__name__


def _has_dict(owner: Any, own: dict[Any, Any]) -> bool:
    return not isinstance(owner, (type, FrameType)) and getattr(owner, "__dict__", None) is own
