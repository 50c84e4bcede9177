"""Holders: which objects hold memory outside the step, as names and bytes. It is only used to write a message."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from poochplan.formats.plan import Plan
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.storages import gradient_of, own_tensors
from poochplan.torch_private.tensor_internals import (
    is_made,
    storage_identity,
    tensors_in,
    without_modes,
    without_torch_function,
)

from .census import LEAST_BYTES, bucket_bytes, census, live, one_moment, storages_of

_DEPTH = 5
_OPTIMIZED = 0x1
"""``CO_OPTIMIZED``: the frame of a function, whose locals are not a separate dictionary."""
MOST = 8
"""At most this many storages, the largest ones, are traced to a name."""
BUCKETS = "buckets of DistributedDataParallel (profile the wrapped model)"
NOBODY = "memory that no Python object holds"
EARLIER = "what earlier steps saved, or this one before its model was called, and whose loss or output is kept"


class HeldMemory(NamedTuple):
    """The name of a holder, and the bytes of the storages that it holds."""

    name: str
    size_bytes: int


def held_beside(engine: Engine, segment: Segment, plan: Plan) -> list[HeldMemory]:
    """The holders of more bytes on the engine's device than the segment's plan includes, largest first.

    The model's parameters, buffers and gradients are left out. So is an optimizer's state up to the predicted bytes,
    and as many of the smallest other storages as the step's inputs were predicted to take.
    """
    kind, model = engine.device.kind, engine.model_of(segment)
    left_over = {storage_identity(storage) for storage in engine.segment.left_over_storages()}
    with one_moment(), without_modes(), without_torch_function():
        sizes = {key: storage.nbytes() for key, storage in census(kind).items()}
        found: dict[str, int] = defaultdict(int)
        for name, keys in _known(kind, model, left_over).items():
            taken = [sizes.pop(key) for key in keys if key in sizes]
            if name and taken:
                found[name] += sum(taken)
        found[EARLIER] = max(found[EARLIER], segment.left_over_bytes)
        optimizers = [name for name in found if name.startswith(_STATE)]
        for name in optimizers:
            found[name] -= plan.static_bytes.get("optimizer_state", 0)
        left_bytes = plan.static_bytes.get("input", 0)
        for given, size_bytes in segment.given:  # for a part of a data set this is the whole, which was not predicted
            if size_bytes <= left_bytes:
                left_bytes -= size_bytes
                storage = given()
                if storage is not None:
                    sizes.pop(storage_identity(storage), None)
        traced = _traced(kind, sizes) | {BUCKETS: bucket_bytes(model)}
    for name, size_bytes in _beyond_inputs(traced, left_bytes).items():
        found[name] += size_bytes
    ranked = sorted(found.items(), key=lambda one: -one[1])
    return [HeldMemory(name, size_bytes) for name, size_bytes in ranked if size_bytes >= LEAST_BYTES]


_STATE = "the state of "


def _known(kind: str, model: torch.nn.Module, left_over: set[int]) -> dict[str, set[int]]:
    """Keys of storages by their known holder, found without a search of referrers. Those of "" were predicted."""
    mine = set(own_tensors(model))
    known: dict[str, set[int]] = {"": _keys(kind, (x for p in mine for x in (p, gradient_of(p))))}
    known[EARLIER] = left_over
    for optimizer in live(torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        whose = "" if not mine.isdisjoint(parameters) else " (of another model)"
        state = _keys(kind, tensors_in(list(optimizer.state.values())))
        known.setdefault(f"{_STATE}{type(optimizer).__name__}{whose}", set()).update(state)
    modules = [one for one in live(torch.nn.Module) if is_made(one)]
    children = {id(child) for one in modules for child in one.children()}
    for module in modules:
        if id(module) not in children and mine.isdisjoint(own_tensors(module)):
            whole = (x for p in own_tensors(module) for x in (p, gradient_of(p)))
            known.setdefault(f"the weights of {type(module).__name__}", set()).update(_keys(kind, whole))
    return known


def _keys(kind: str, tensors: Iterable[torch.Tensor | None]) -> set[int]:
    return {storage_identity(s) for one in tensors if one is not None for s in storages_of(one, kind)}


def _traced(kind: str, sizes: Mapping[int, int]) -> dict[str, int]:
    """The other storages by name. Comparatively small ones get no separate name."""
    largest = set(sorted(sizes, key=lambda key: -sizes[key])[:MOST])
    tensors: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in live(torch.Tensor):
        for storage in storages_of(tensor, kind):
            key = storage_identity(storage)
            if key in largest:
                tensors[key].append(tensor)
    found: dict[str, int] = defaultdict(int)
    for key, size_bytes in sizes.items():
        name = name_of(tensors[key], unseen=[tensors, *tensors.values()]) if key in largest else "other tensors"
        found[name or NOBODY] += size_bytes
    return found


def _beyond_inputs(found: Mapping[str, int], inputs_bytes: int) -> dict[str, int]:
    """The storages that remain when the smallest ones are taken for the step's inputs."""
    beyond, left = dict(found), inputs_bytes
    for name, size_bytes in sorted(found.items(), key=lambda one: one[1]):
        if size_bytes > left:
            break
        left -= size_bytes
        del beyond[name]
    return beyond


def name_of(things: Sequence[Any], unseen: Sequence[Any]) -> str:
    """The nearest name for one of the objects: a variable, or an attribute; empty if no named object holds them.

    Containers are searched too. ``unseen``: the caller's own containers, which do not count as holders.
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
            found.clear()  # a copy, which would hold all of them while the function runs
        if name and isinstance(optimizer, torch.optim.Optimizer):
            return f"the state of {type(optimizer).__name__}"
        if name:
            return f"variable {name}" + ("" if where == "<module>" else f" of {where}()")
    return ""


def _frames() -> Iterator[FrameType]:
    """Frames of this thread, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("poochplan."):
            yield frame
        frame = frame.f_back


def _owner(holder: Any, held: Sequence[Any], hidden: set[int]) -> str:
    """Name of the holder, with the attribute or the key by which it holds the object; empty for a plain container."""
    wanted = {id(one) for one in held}
    if isinstance(holder, dict):
        name = next((str(key) for key, value in holder.items() if id(value) in wanted), "")
        if not name:
            return ""
        if "__name__" in holder and "__builtins__" in holder:
            return f"variable {name} of {holder['__name__']}"
        owners = (x for x in gc.get_referrers(holder) if not isinstance(x, (type, FrameType)) and id(x) not in hidden)
        owner = next((x for x in owners if getattr(x, "__dict__", None) is holder), None)
        return "" if owner is None else f"{type(owner).__name__}.{name}"
    if isinstance(holder, FunctionType):
        return f"function {holder.__qualname__}"
    if isinstance(holder, (list, tuple, set, CellType, ModuleType, type)) or type(holder).__module__ == "builtins":
        return ""
    attributes = getattr(holder, "__dict__", {})
    name = next((name for name, value in attributes.items() if id(value) in wanted), "")
    return f"{type(holder).__name__}.{name}" if name else type(holder).__name__
