"""Private names of data-parallel training: of FSDP2 (``torch.distributed.fsdp.fully_shard``), of storages that are
given up and taken again, and of DDP's buckets.

FSDP2 has one storage for each gathered weight for good. It takes memory for it before a unit's forward and before its
backward, and gives it up behind each (``resize_``): between these the storage lives without memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .tensor_internals import modules_of

Resized = Callable[[torch.UntypedStorage, int], None]
"""Told a storage that has another size now, and the bytes it had."""


def sharded_units(model: torch.nn.Module) -> Iterator[Any]:
    """The states of FSDP2 of a model's units, each once. Each step asks; without FSDP2 no module is looked at."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    seen: set[Any] = set()
    for module in modules_of(model):
        state_of = getattr(type(module), "_get_fsdp_state", None)  # FSDPModule's: its import takes a second
        state = None if state_of is None else state_of(module)
        if state is not None and state not in seen:
            seen.add(state)
            yield state


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 shards it or a part of it."""
    return next(sharded_units(model), None) is not None


def gathered_weights(model: torch.nn.Module) -> tuple[list[torch.Tensor], bool]:
    """Tensors on the storages into which FSDP2 gathers the model's weights, with memory or without; and whether those
    are all: each is made at the first forward of its unit.
    """
    found: list[torch.Tensor] = []
    is_all = True
    for one in _weights(model):
        tensors = [*one.all_gather_outputs, *getattr(one, "_unsharded_inner_tensors", ())]
        is_all &= bool(tensors)
        found += tensors
    return found, is_all


def sharded_parameters(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The parameters that the model has between steps, by the ``id`` of the gathered ones that stand in their place."""
    there = ((getattr(one, "_unsharded_param", None), one.sharded_param) for one in _weights(model))
    return {id(gathered): sharded for gathered, sharded in there if gathered is not None}


def rebuilds_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether a forward to come makes the buckets anew, in the order of the gradients: the second one, as a rule."""
    is_to_come = wrapper.static_graph or not wrapper.find_unused_parameters
    return is_to_come and not getattr(wrapper, "_has_rebuilt_buckets", True)


def _weights(model: torch.nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each weight that it shards."""
    for state in sharded_units(model):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older versions have one
            groups = [state._fsdp_param_group]
        for group in groups:
            yield from () if group is None else group.fsdp_params


@contextlib.contextmanager
def told_of_resizes(tell: Resized) -> Iterator[None]:
    """A block in which Python's calls of a storage's ``resize_`` are told: the dispatcher sees none of them."""
    had_own, before = "resize_" in vars(torch.UntypedStorage), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        before_bytes = storage.nbytes()
        found = before(storage, size_bytes)
        tell(storage, before_bytes)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if had_own:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
        else:
            del torch.UntypedStorage.resize_
