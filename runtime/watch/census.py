"""The census: which device storages live right now, whoever made them, and how many bytes each takes.

A meter that sees ops alone knows what lives beside the step only where an op meets it. Python's garbage collector knows
every tensor that Python has, so a data set, a copy of the weights or a kept loss counts without being told.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch

from poochplan.formats.profile_parts import rounded_up
from poochplan.tensors.storages import is_made_of_parts, memory_of, parts_of
from poochplan.torch_private.tensor_internals import storage_identity, without_modes, without_torch_function

DataParallel = torch.nn.parallel.DistributedDataParallel
LEAST_BYTES = 4096
"""What is smaller and is met by no op is left out: constants of libraries, of which every process has some."""

EVERY = 50
"""Of the steps behind the first ones, every so many begins at a census: memory changes in a long run, too."""

Storages = dict[int, torch.UntypedStorage]
"""By identity."""

_LEFT_OUT: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def leave_out(tensors: Iterable[torch.Tensor]) -> None:
    """No census counts these: what a check of steps keeps of them is not the training's."""
    for tensor in tensors:
        for storage in storages_of(tensor, tensor.device.type):
            key = storage_identity(storage)
            _LEFT_OUT[key] = weakref.ref(storage, lambda _, key=key: _LEFT_OUT.pop(key, None))  # type: ignore[misc]


def census(device_type: str, least_bytes: int = LEAST_BYTES) -> Storages:
    """The storages of at least that many bytes on that device that a Python tensor lies on."""
    found: Storages = {}
    with without_modes(), without_torch_function():
        for tensor in live_tensors():
            for storage in storages_of(tensor, device_type):
                if storage.nbytes() >= least_bytes:
                    found[storage_identity(storage)] = storage
    for key in found.keys() & _LEFT_OUT.keys():
        if _LEFT_OUT[key]() is found[key]:
            del found[key]
    return found


def census_bytes(device_type: str) -> int:
    """Bytes of all storages, however small, each rounded up to what is allocated at once."""
    return sum(rounded_up(storage.nbytes()) for storage in census(device_type, 1).values())


def live_tensors() -> Iterator[torch.Tensor]:
    """Every tensor that Python knows. By type and not by ``isinstance``, which runs code of proxies."""
    is_tensor: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        known = is_tensor.get(kind)
        if known is None:
            known = is_tensor[kind] = issubclass(kind, torch.Tensor)
        if known:
            yield thing


def storages_of(tensor: torch.Tensor, device_type: str) -> Iterator[torch.UntypedStorage]:
    """The storages on that device of a tensor, whatever its class, or of what it is made of."""
    try:
        for part in parts_of(tensor) if is_made_of_parts(tensor) else [tensor]:
            storage = memory_of(part) if part.device.type == device_type else None
            if storage is not None and storage.device.type == device_type:
                yield storage
    except (RuntimeError, NotImplementedError, AttributeError):
        return  # a class that is not ready yet


def wrapper_of(model: torch.nn.Module) -> DataParallel | None:
    """The model for data-parallel training that is this one, or that has been put around it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if isinstance(model, DataParallel):
        return model
    return next((one for one in gc.get_objects() if type(one) is DataParallel and one.module is model), None)


def bucket_bytes(model: torch.nn.Module) -> int:
    """What its buckets take: as much as the gradients, where these do not lie in them."""
    wrapper = wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(rounded_up(one.nbytes) for one in wrapper.parameters() if one.requires_grad)
