"""Private names of training on several ranks: of FSDP2 (``torch.distributed.fsdp.fully_shard``), of storages that
release their memory and take it again, of DDP's buckets, and of the DTensors of tensor parallelism.

FSDP2 has one permanent storage for each gathered weight. The storage has memory in a unit's forward and backward, and
releases it after each (``resize_``). In between, it has no memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .tensor_internals import detached_alias, modules_of, unseen_by_modes

Resized = Callable[[torch.UntypedStorage, int], None]
"""Called with a storage whose size has changed, and its former bytes."""


def sharded_units(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's states of a model's units, each once. Each step calls it; where none is sharded it looks at none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: type | None = getattr(fsdp, "FSDPModule", None)
    if sharded is None or not sharded.__subclasses__():  # each class of modules that is sharded gets one
        return
    seen: set[Any] = set()
    for module in modules_of(model):
        state: Any = module._get_fsdp_state() if isinstance(module, sharded) else None  # type: ignore[operator]
        if state is not None and state not in seen:
            seen.add(state)
            yield state


def is_sharded(model: torch.nn.Module) -> bool:
    return next(sharded_units(model), None) is not None


def gathered_weights(model: torch.nn.Module) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors on the storages for FSDP2's gathered weights of the model, with memory or without. Also FSDP2's objects
    for weights without storages, which the first forward of their unit makes (:func:`has_storages`).
    """
    there = {one: _gathered(one) for one in _weights(model)}
    return [tensor for tensors in there.values() for tensor in tensors], [one for one, has in there.items() if not has]


def has_storages(weight: Any) -> bool:
    """Whether the storages for a gathered weight exist."""
    return bool(_gathered(weight))


def _gathered(weight: Any) -> list[torch.Tensor]:
    return [*weight.all_gather_outputs, *getattr(weight, "_unsharded_inner_tensors", ())]


def sharded_parameters(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The model's parameters between steps, by the ``id`` of the gathered ones that replace them."""
    there = ((getattr(one, "_unsharded_param", None), one.sharded_param) for one in _weights(model))
    return {id(gathered): sharded for gathered, sharded in there if gathered is not None}


def rebuilds_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether a later forward, usually the second, makes new buckets in the order of the gradients."""
    is_to_come = wrapper.static_graph or not wrapper.find_unused_parameters
    return is_to_come and not getattr(wrapper, "_has_rebuilt_buckets", True)


def takes_uneven_inputs(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether torch's ``Join`` lets the wrapper's ranks take different numbers of steps, from its first block on."""
    how = wrapper._join_config
    return how.enable and not how.throw_on_early_termination


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with this rank's part of a DTensor; any other tensor itself. It looks at the type alone."""
    module = sys.modules.get("torch.distributed.tensor")  # whose import takes a second
    is_distributed = module is not None and type(tensor) is module.DTensor
    return tensor._local_tensor if is_distributed else tensor  # type: ignore[attr-defined]


def without_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor of the same placements, mesh, shape and version counter, which holds no memory."""
    with unseen_by_modes():  # inside a mode the alias would be no DTensor
        alias: Any = detached_alias(tensor)
        alias._local_tensor = torch.empty(0, dtype=tensor.dtype, device=alias._local_tensor.device)
    return alias


def around_local_tensor(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor of the same placements, mesh and shape around another local tensor, detached from any graph."""
    kind: Any = type(like)
    return kind(local, like._spec, requires_grad=False)  # type: ignore[attr-defined]


def counts_of_ranks(model: torch.nn.Module) -> set[int]:
    """The numbers of ranks that shard the model's units together."""
    return {group.mesh_info.mesh.size() for group in _groups(model)}


def _weights(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's object for each weight that it shards."""
    for group in _groups(model):
        yield from group.fsdp_params


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's groups of weights that are gathered together."""
    for state in sharded_units(model):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older versions have a single group
            groups = [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


@contextlib.contextmanager
def told_of_resizes(tell: Resized) -> Iterator[None]:
    """A block in which ``tell`` is called for Python's calls of a storage's ``resize_``, which no dispatcher sees."""
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
