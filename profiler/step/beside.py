"""What lives beside the step and no op of it meets: a data set, a copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from poochplan.errors import UsageError
from poochplan.tensors.storages import own_tensors, parts_of

_MOST_OBJECTS = 100_000
DataParallel = torch.nn.parallel.DistributedDataParallel


def tensors_beside(also: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in each of ``also``, which are modules, optimizers, tensors, containers of these, and other objects
    (a data set, a loader, an average of the weights) by their attributes.

    A model for data-parallel training has buckets as large as its gradients; a stand-in counts for them.

    Raises
    ------
    UsageError
        It is no list or tuple, or there is no tensor in one of its entries.
    """
    if not isinstance(also, Sequence) or isinstance(also, str):
        raise UsageError(f"also: expected a list of modules, tensors or containers, found {type(also).__name__}")
    found: list[torch.Tensor] = []
    for entry in also:
        inside = list(_tensors_in(entry))
        if not inside:
            raise UsageError(
                f"also: expected modules, tensors or objects that hold tensors, found {type(entry).__name__} in which "
                "there is none; name what holds the memory, or leave it out"
            )
        found += inside
    return found


def _tensors_in(entry: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    pending = [entry]
    while pending and len(seen) < _MOST_OBJECTS:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, type, ModuleType, FunctionType, MethodType)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield from parts_of(thing)
            if thing.is_leaf and thing.grad is not None:
                yield from parts_of(thing.grad)
        else:
            yield from _buckets(thing)
            pending.extend(_inside(thing))


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, torch.nn.Module):
        return own_tensors(thing)
    if isinstance(thing, torch.optim.Optimizer):
        return list(thing.state.values())
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return thing
    return list(getattr(thing, "__dict__", {}).values())


def _buckets(thing: Any) -> Iterator[torch.Tensor]:
    """Stand-ins that take their memory while they are held."""
    if isinstance(thing, DataParallel):
        for parameter in thing.parameters():
            if parameter.requires_grad:
                yield torch.empty_like(parameter, requires_grad=False)
