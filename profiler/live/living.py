"""Which tensors are alive, as far as Python's garbage collector knows them, and how many bytes they are."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator

import torch

from poochplan.formats.profile import ALLOCATION_UNIT_BYTES
from poochplan.tensors.storages import has_storage
from poochplan.tensors.torch_private import storage_identity


def live_tensors(device_type: str) -> Iterator[torch.Tensor]:
    """One tensor for each storage on that device, the largest first, of the tensors that Python objects are.

    Not those that only C++ holds (autograd's own, buckets of data-parallel training), nor storages without a tensor.
    """
    found: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and has_storage(one, device_type):
                found.setdefault(storage_identity(one.untyped_storage()), one)
    yield from sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())


def bytes_taken(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each rounded up to what is allocated at once."""
    return sum(
        -(-tensor.untyped_storage().nbytes() // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES for tensor in tensors
    )


def live_bytes_now(device_type: str) -> int:
    """Bytes of all live tensors on that device."""
    return bytes_taken(live_tensors(device_type))
